"""The formats that are written, one a file."""
