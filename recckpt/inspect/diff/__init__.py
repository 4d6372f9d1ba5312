"""Two checkpoints compared: rows, tensors and all else."""
