"""The file format: names on disk, manifest, catalog, tensor index, checksums. No I/O."""
