"""What became of rows and tensors over the checkpoints of a run."""
