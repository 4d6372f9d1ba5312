"""Rows to Arrow files, and back."""
