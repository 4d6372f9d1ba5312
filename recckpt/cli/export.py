"""``recckpt export``: tables and tensors of a checkpoint in another format."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.convert.exporting import Exported, export_checkpoint
from recckpt.errors import RecckptError
from recckpt.text import Line, Table, count, escaped, one_line, size

_HEAD = ("TABLE", "ROWS", "SLOTS", "LARGEST ERROR")


def export(args: argparse.Namespace) -> CommandResult:
    """Export, and say what was written."""
    slots = None if args.slots is None else args.slots.split(",")
    with usage_checked():
        try:
            done = export_checkpoint(
                args.checkpoint,
                args.target,
                to=args.to,
                tables=args.tables,
                slots=slots,
                where=_where(args.where),
                dtype=args.dtype,
                since=args.since,
            )
        except RecckptError as error:
            return CommandResult({"problems": [str(error)]}, [], [str(error)])
    return CommandResult(_data(done), list(_lines(done)))


def _where(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"--where: not JSON: {error}") from error


def _lines(done: Exported) -> Iterator[Line]:
    tables = done.metadata["tables"]
    if tables:
        rows = [(escaped(name), count(t["rows"]), ", ".join(t["slots"]), _error(t)) for name, t in tables.items()]
        yield Table(_HEAD, rows, ("ROWS",))
    if done.left_out:
        yield ""
        yield Table(("LEFT OUT", "WHY"), [(escaped(left.name), left.reason) for left in done.left_out])
    yield ""
    yield f"{escaped(done.ckpt_id)}: wrote {one_line(done.target)}, {size(done.n_bytes)}"


def _error(table: dict[str, Any]) -> str:
    return f"{table['largest_error']:.3g}" if "largest_error" in table else "-"


def _data(done: Exported) -> dict[str, Any]:
    return {
        "id": done.ckpt_id,
        "target": done.target,
        "format": done.format,
        "metadata": dict(done.metadata),
        "left_out": [{"name": left.name, "reason": left.reason} for left in done.left_out],
        "bytes": done.n_bytes,
    }
