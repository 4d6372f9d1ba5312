"""The arguments of ``recckpt diff``, ``recckpt report``, ``recckpt sql`` and ``recckpt watch``."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable
from contextlib import suppress

_A_CHECKPOINT = "a checkpoint, or an output dir, whose newest is meant; a path or URL, DIR/latest~1 too"


def add_diff(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``diff``."""
    parser = command("diff", "say what differs between two checkpoints: rows, tensors, training state")
    add = parser.add_argument
    add("before", metavar="BEFORE", help=_A_CHECKPOINT)
    add("after", metavar="AFTER", help="the same")
    tolerance_help = "values of tables and tensors that differ by no more are the same (default: %(default)s)"
    add("--tolerance", type=_tolerance, default=0.0, metavar="X", help=tolerance_help)
    add("--top", type=natural, default=10, metavar="N", help="rows to name that moved most (default: %(default)s)")
    _add_page(parser, "a page of it to write too; must not exist")


def add_report(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``report``."""
    parser = command("report", "look at a run, and write a page: what is unhealthy, checkpoints, saves, rows of tables")
    add = parser.add_argument
    add("dir", metavar="DIR", help="output dir; a path or URL")
    _add_page(parser, "the page to write (default: report.html, with --json none); must not exist")
    add("--quick", dest="deep", action="store_false", help="read no rows: manifests, sizes and the timeline only")
    add("--threads", type=positive, metavar="N", help="files to read at once (default: 8, locally at most one a core)")
    _add_overdue(parser)
    rate_help = "how often the run fails; says how often it would best save, by what its saves have taken"
    add("--failures-per-day", type=_rate, metavar="N", help=rate_help)
    near_help = "say too what near saves of Near(PATH) on this host would give back now"
    add("--near", metavar="PATH", help=near_help)


def add_sql(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``sql``."""
    parser = command("sql", "query tables, `checkpoints` and `timeline` by SQL, with duckdb")
    parser.add_argument("checkpoint", metavar="CKPT", help=_A_CHECKPOINT)
    parser.add_argument("query", metavar="QUERY", help='such as "select count(*) from item"; quote names: "user/1"')
    parser.add_argument("--csv", action="store_true", help="print CSV, with a header")
    unchecked_help = "take the values of a full checkpoint as they are; without it, those that are read are checked"
    parser.add_argument("--unchecked", dest="checked", action="store_false", help=unchecked_help)


def add_watch(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``watch``."""
    parser = command("watch", "show how a run saves, and go on showing it until control-C")
    parser.description = (
        "Show how a run saves: step, last save, pause, chain, errors; and go on showing it until control-C. Without a "
        "terminal, or without rich, a line whenever something has changed; with --json, a line a look. Of a directory "
        "of output dirs a line for each run."
    )
    parser.add_argument(
        "dir", metavar="DIR", help="output dir, which need not be there yet, or a directory of output dirs"
    )
    interval_help = "from one look to the next (default: %(default)g)"
    parser.add_argument("--interval", type=seconds, default=5.0, metavar="SECONDS", help=interval_help)
    once_help = "look once; exit code 1 where the last save failed or the next one is overdue"
    parser.add_argument("--once", action="store_true", help=once_help)
    near_help = "show of one run what its near saves of Near(PATH) on this host would give back"
    parser.add_argument("--near", metavar="PATH", help=near_help)
    _add_overdue(parser)


def _add_page(parser: argparse.ArgumentParser, what: str) -> None:
    """Add where the page goes, by either name in each command that writes one."""
    parser.add_argument("--out", "--html", dest="out", metavar="FILE.html", help=f"{what}; it needs no other file")


def _add_overdue(parser: argparse.ArgumentParser) -> None:
    overdue_help = "age of the newest checkpoint from which on the next save is missed (default: 3 times the usual)"
    parser.add_argument("--overdue", type=seconds, metavar="SECONDS", help=overdue_help)


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


def _rate(text: str) -> float:
    number = 0.0
    with suppress(ValueError):
        number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0 such as 0.5 or 3, found {text!r:.100}")
    return number


def natural(text: str) -> int:
    """Return a count that may be 0; ValueError for all else."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def positive(text: str) -> int:
    """Return a count of at least 1; ValueError for all else."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def seconds(text: str) -> float:
    """Return a number of seconds that a thread can wait; ValueError for all else."""
    number = float(text)
    if not 0 < number <= threading.TIMEOUT_MAX:
        raise ValueError(text)
    return number


# as argparse calls it in "invalid ... value"
_tolerance.__name__, seconds.__name__ = "number", "number of seconds"
natural.__name__ = positive.__name__ = "count"
