"""What the bytes mean: names on disk, manifest, catalog, tensor index, checksums. No I/O."""
