"""Which checkpoints are committed in an output dir, and which process may change it."""
