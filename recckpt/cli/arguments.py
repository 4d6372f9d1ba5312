"""Types of arguments, and arguments that several commands have in common."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

A_CHECKPOINT = "a checkpoint, or an output dir for its newest checkpoint; a path or URL, also DIR/latest~1"
AN_OUTPUT_DIR = "output dir; a path or URL"
A_FILE_OF_IDS = "a text file with one id per line, .npy or .parquet"


def _count_from(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return count


natural, positive = _count_from(0), _count_from(1)


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= threading.TIMEOUT_MAX:
        raise ValueError(text)
    return number


def int64(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an int64")
    return number


def n_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([kMGT]?)(i?)B?", text, re.ASCII)
    if match is None or not int(match[1]) or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 500000 or 50MB, found {text!r:.100}")
    return int(match[1]) * int((1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


seconds.__name__, int64.__name__ = "number of seconds", "id"  # names that argparse prints in "invalid ... value"


class Argument(NamedTuple):
    names: tuple[str, ...]
    options: dict[str, Any]


def argument(usage: str, what: str | None = None, **options: Any) -> Argument:
    """Return an argument; examples of ``usage``: ``dir DIR``, ``--once`` for a flag, ``-a,--all N``."""
    names, _, metavar = usage.partition(" ")
    if metavar:
        options["metavar"] = metavar
    elif names.startswith("-") and "choices" not in options:
        options.setdefault("action", "store_true")
    return Argument(tuple(names.split(",")), {"help": what, **options})


def page(what: str) -> Argument:
    return argument("--out,--html FILE.html", f"{what}, self-contained", dest="out")


def threads(what: str, default: int | None = None) -> Argument:
    shown = 8 if default is None else "%(default)s"
    what = f"files to {what} at once (default: {shown}, locally at most one per core)"
    return argument("--threads N", what, type=positive, default=default)


_OVERDUE = "age of the newest checkpoint above which the next save is overdue (default: 3 times the usual)"
OVERDUE = argument("--overdue SECONDS", _OVERDUE, type=seconds)
