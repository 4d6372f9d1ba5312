"""Near saves: what changed since the newest checkpoint, on the host itself, every few steps."""
