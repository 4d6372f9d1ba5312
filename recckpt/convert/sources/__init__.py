"""The formats that are read, one a file: ``recognises(files)`` and ``open_source(files, options)``."""
