"""The arguments of ``recckpt history`` and ``recckpt first``, which look at all checkpoints of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from recckpt.inspect.over_time.condition import SYNTAX

_DIR = "output dir; a path or URL"


def add_history(command: Callable[[str, str], argparse.ArgumentParser], id_type: Callable[[str], int]) -> None:
    """Add ``history``; ids are parsed by ``id_type``."""
    parser = command("history", "show rows of a table over all checkpoints of a run: norm, changes, count, moments")
    parser.add_argument("dir", metavar="RUN", help=_DIR)
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument("ids", metavar="ID", nargs="+", type=id_type, help="any int64, negative ones too")


def add_first(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``first``."""
    parser = command("first", "find the first checkpoint of a run in which a row or tensor meets a condition")
    parser.add_argument("dir", metavar="RUN", help=_DIR)
    parser.add_argument("--where", metavar="CONDITION", default="not finite", help=f"{SYNTAX} (default: %(default)s)")
