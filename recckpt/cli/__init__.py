"""The command line: look into checkpoints from the shell, without torch."""
