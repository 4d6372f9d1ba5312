"""What is committed in an output dir, and who may change it."""
