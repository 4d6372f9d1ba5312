"""What looks into checkpoints: reader, verify, salvage, repair."""
