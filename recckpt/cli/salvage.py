"""``recckpt salvage``: the rows of a table that are still whole."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.result import CommandError, CommandResult, usage_checked
from recckpt.inspect.salvage import salvage as salvage_table
from recckpt.inspect.salvage_link import Lost
from recckpt.text import Line, Table, count, escaped, one_line, plural

_HEAD = ("FILE", "BUCKETS", "ROWS", "REASON")


def salvage(args: argparse.Namespace) -> CommandResult:
    """Write what is whole to an Arrow file, and list what is not."""
    try:
        with usage_checked():
            done = salvage_table(args.checkpoint, args.table, args.out, unverified=args.unverified)
    except KeyError as error:
        raise CommandError(error.args[0]) from error
    table, n_lost = escaped(args.table), max(0, done.expected - done.rows)
    lines: list[Line] = [f"{table}: wrote {count(done.rows)} of {plural(done.expected, 'row')} to {one_line(args.out)}"]
    rows = [_row(lost) for lost in done.lost]
    lines += ["", Table(_HEAD, rows, ("ROWS",), dict.fromkeys(range(len(rows)), "damaged"))] if rows else []
    problems = [f"{table}: {plural(n_lost, 'row')} lost"] if done.lost else []
    problems += [f"{table}: {plural(done.unverified, 'row')} unverified"] if done.unverified else []
    data = {
        "table": args.table,
        "out": args.out,
        "rows": done.rows,
        "expected": done.expected,
        "unverified": done.unverified,
        "lost": [_data(lost) for lost in done.lost],
    }
    return CommandResult(data, lines, problems)


def _row(lost: Lost) -> tuple[str, ...]:
    begin, end = lost.buckets
    rows = "-" if lost.rows is None else count(lost.rows)
    return escaped(lost.file), f"{begin} to {end - 1}", rows, one_line(lost.reason)


def _data(lost: Lost) -> dict[str, Any]:
    return {"file": lost.file, "buckets": list(lost.buckets), "rows": lost.rows, "reason": lost.reason}
