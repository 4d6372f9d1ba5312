"""The arguments of ``recckpt diff`` and ``recckpt sql``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

_A_CHECKPOINT = "a checkpoint, or an output dir, whose newest is meant; a path or URL, DIR/latest~1 too"


def add_diff(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``diff``."""
    parser = command("diff", "say what differs between two checkpoints: rows, tensors, training state")
    parser.epilog = "exit codes: 0 equal, 1 different, 2 an error"
    add = parser.add_argument
    add("before", metavar="BEFORE", help=_A_CHECKPOINT)
    add("after", metavar="AFTER", help="the same")
    tolerance_help = "values of tables and tensors that differ by no more are the same (default: %(default)s)"
    add("--tolerance", type=_tolerance, default=0.0, metavar="X", help=tolerance_help)
    add("--top", type=_count, default=10, metavar="N", help="rows to name that moved most (default: %(default)s)")
    add("--html", metavar="FILE", help="write a page that needs nothing else to this file too; must not exist")


def add_sql(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``sql``."""
    parser = command("sql", "query tables, `checkpoints` and `timeline` by SQL, with duckdb")
    parser.add_argument("checkpoint", metavar="CKPT", help=_A_CHECKPOINT)
    parser.add_argument("query", metavar="QUERY", help='such as "select count(*) from item"; quote names: "user/1"')
    parser.add_argument("--csv", action="store_true", help="print CSV, with a header")


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


_tolerance.__name__, _count.__name__ = "number", "count"  # as argparse calls it in "invalid ... value"
