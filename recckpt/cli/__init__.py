"""The command line: inspects and changes checkpoints from the shell, without torch."""

from recckpt.cli.app import main

__all__ = ["main"]
