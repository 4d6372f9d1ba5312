"""The steps of a load: locate, select, read, apply."""
