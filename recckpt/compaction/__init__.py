"""Compaction: a chain read, and a full checkpoint of the same content written, part by part (no torch here)."""
