"""Writes the page of the command line from what the commands say of themselves: ``python docs/command_line.py``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from recckpt.cli.app import parser_of_commands

PAGE = Path(__file__).parent / "command-line.md"
_HEAD = """# Command line

`recckpt COMMAND --help` says the same. No command imports torch. `recckpt` is also `python -m recckpt`.

"""


def page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = "100"  # as wide as argparse makes its lines
    commands = next(
        action for action in parser_of_commands()._actions if isinstance(action, argparse._SubParsersAction)
    )
    parts = [
        f"## {name}\n\n```text\n{command.format_help().rstrip()}\n```\n" for name, command in commands.choices.items()
    ]
    return _HEAD + "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
