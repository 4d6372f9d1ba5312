"""A table whose rows lie on many ranks."""
