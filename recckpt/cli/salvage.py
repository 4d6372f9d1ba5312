"""``recckpt salvage``: the rows of a table that are still whole."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from recckpt.cli.result import CommandError, CommandResult, usage_checked
from recckpt.inspect.salvage import Salvaged
from recckpt.inspect.salvage import salvage as salvage_table
from recckpt.inspect.salvage_link import Lost
from recckpt.text import Line, Table, count, escaped, one_line, plural, section

_HEAD = ("FILE", "BUCKETS", "ROWS", "REASON")


def salvage(args: argparse.Namespace) -> CommandResult:
    """Write what is whole to an Arrow file, and list what is not."""
    try:
        with usage_checked():
            done = salvage_table(args.checkpoint, args.table, args.out, unverified=args.unverified)
    except KeyError as error:
        raise CommandError(error.args[0]) from error
    table, n_lost = escaped(args.table), max(0, done.expected - done.rows)
    of = f"{plural(done.expected, 'row')} of {escaped(done.ckpt_id)}"
    lines: list[Line] = [f"{table}: wrote {count(done.rows)} of {of} to {one_line(args.out)}"]
    rows = [_row(lost) for lost in done.lost]
    lines += ["", Table(_HEAD, rows, ("ROWS",), dict.fromkeys(range(len(rows)), "damaged"))] if rows else []
    lines += section("what would give more", list(_more(done)))
    problems = [f"{table}: {plural(n_lost, 'row')} lost"] if done.lost else []
    problems += [f"{table}: {plural(done.unverified, 'row')} unverified"] if done.unverified else []
    data = {
        "table": args.table,
        "out": args.out,
        "rows": done.rows,
        "expected": done.expected,
        "unverified": done.unverified,
        "checkpoint": done.ckpt_id,
        "lost": [_data(lost) for lost in done.lost],
        "unverified_left": done.n_unverified_left,
        "fuller": None if done.fuller is None else asdict(done.fuller),
    }
    return CommandResult(data, lines, problems)


def _more(done: Salvaged) -> Iterator[str]:
    """Say what would give more rows."""
    if done.n_unverified_left:
        rows = plural(done.n_unverified_left, "row")
        yield f"--unverified: up to {rows} that are there, though no checksum vouches for them or they may have changed"
    if done.fuller is not None:
        older, step = done.fuller, "" if done.fuller.step is None else f" of step {done.fuller.step}"
        rows = plural(older.rows, "row")
        yield f"{escaped(older.ckpt_id)}{step}: {rows}, of files that are not damaged here; `recckpt verify` it first"


def _row(lost: Lost) -> tuple[str, ...]:
    begin, end = lost.buckets
    rows = "-" if lost.rows is None else count(lost.rows)
    return escaped(lost.file), f"{begin} to {end - 1}", rows, one_line(lost.reason)


def _data(lost: Lost) -> dict[str, Any]:
    return {"file": lost.file, "buckets": list(lost.buckets), "rows": lost.rows, "reason": lost.reason}
