"""What looks into checkpoints: reader, verify, repair."""
