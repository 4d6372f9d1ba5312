"""The way of a load: locate, select, read, apply."""
