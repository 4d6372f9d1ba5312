"""``recckpt import``: what another program saved, as a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from recckpt.cli.passed_by import passed_by
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.convert.importing import ImportPlan, import_checkpoint
from recckpt.convert.source import ImportOptions
from recckpt.errors import RecckptError
from recckpt.text import Line, Table, count, escaped, one_line, plural, size
from recckpt.types import SlotSpec

_HEAD = ("TABLE", "ROWS", "SLOTS")


def import_source(args: argparse.Namespace) -> CommandResult:
    """Import, or say what an import would do."""
    if args.step is not None and args.step < 0:
        raise UsageError(f"--step: found {args.step}, expected 0 or more")
    with usage_checked():
        try:
            done = _import(args)
        except RecckptError as error:
            return CommandResult({"problems": [str(error)]}, [], [str(error)])
    notes = passed_by(args.dir, done.ckpt_id, done.step)
    return CommandResult({**_data(done, args), "notes": notes}, [*_lines(done, args), *notes])


def _import(args: argparse.Namespace) -> ImportPlan:
    as_table = dict(named := [_as_table(text) for text in args.as_table])
    if len(as_table) < len(named):
        raise UsageError(f"--as-table: found {args.as_table}, expected each tensor once: it becomes one table")
    slots = None if args.slots is None else tuple(name for name in args.slots.split(",") if name)
    options = ImportOptions(
        ids=args.ids,
        embedding=args.embedding,
        slots=slots,
        as_table=as_table,
        table=_name(args),
        names=dict(map(_new_name, args.names)),
    )
    return import_checkpoint(
        args.source,
        args.dir,
        format=args.format,
        tables=args.tables,
        options=options,
        step=args.step,
        dry_run=args.dry_run,
    )


def _name(args: argparse.Namespace) -> str:
    return args.tables[0] if args.tables and len(args.tables) == 1 else ""


def _as_table(text: str) -> tuple[str, str | None]:
    name, _, ids = text.partition("=")
    if not name:
        raise UsageError(f"--as-table: found {text!r}, expected TENSOR or TENSOR=IDS")
    return name, ids or None


def _new_name(text: str) -> tuple[str, str]:
    name, _, new = text.partition("=")
    if not name or not new:
        raise UsageError(f"--name: found {text!r}, expected TABLE=NEW")
    return name, new


def _lines(done: ImportPlan, args: argparse.Namespace) -> Iterator[Line]:
    contents = done.contents
    what = f"{contents.format}, {plural(len(contents.tables), 'table')}, {plural(len(contents.dense), 'dense tensor')}"
    yield f"{one_line(done.source)}: {what}, step {'-' if contents.step is None else contents.step}"
    if contents.tables:
        yield ""
        slots = {table.name: ", ".join(map(_slot, table.slots)) for table in contents.tables}
        exact = {table.name: table.is_exact or not args.dry_run for table in contents.tables}
        rows = [(escaped(n), count(done.rows[n]) if exact[n] else "?", slots[n]) for n in slots]
        yield Table(_HEAD, rows, ("ROWS",))
    if contents.values:
        yield f"plain values, to model.pt: {', '.join(map(_value, contents.values.items()))}"
    if contents.extra:
        yield f"extra: {', '.join(map(_value, contents.extra.items()))}"
    if contents.io_state:
        yield f"positions in the data: of {plural(len(contents.io_state), 'rank')}"
    if contents.left_out:
        yield ""
        yield Table(("NOT AS IT WAS", "WHY"), [(escaped(left.name), left.reason) for left in contents.left_out])
    yield ""
    where = one_line(f"{args.dir}/{done.directory or done.ckpt_id}")
    wrote = f"wrote {where}, {size(done.n_bytes)}" if done.directory else f"would write {where}"
    yield wrote


def _value(item: tuple[str, Any]) -> str:
    """Return the name of a value, and how many tensors are inside one that is not plain itself."""
    n_tensors = _tensors_in(item[1])
    return escaped(item[0]) + (f" (with {plural(n_tensors, 'tensor')} inside)" if n_tensors else "")


def _tensors_in(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_tensors_in, value.values()))
    if isinstance(value, list | tuple | set):
        return sum(map(_tensors_in, value))
    return int(hasattr(value, "dtype") and hasattr(value, "shape"))


def _slot(slot: SlotSpec) -> str:
    return f"{escaped(slot.name)} {slot.dtype}[{', '.join(map(str, slot.shape))}]"


def _data(done: ImportPlan, args: argparse.Namespace) -> dict[str, Any]:
    contents = done.contents
    nested = (*contents.values.items(), *contents.extra.items())
    tables = [
        {
            "name": table.name,
            "rows": done.rows[table.name] if table.is_exact or not args.dry_run else None,
            "slots": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in table.slots],
        }
        for table in contents.tables
    ]
    return {
        "source": done.source,
        "format": contents.format,
        "id": done.ckpt_id,
        "directory": done.directory or None,
        "step": contents.step,
        "tables": tables,
        "dense": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in contents.dense],
        "values": list(contents.values),
        "extra": list(contents.extra),
        "tensors_inside": {name: n for name, value in nested if (n := _tensors_in(value))},
        "positions": len(contents.io_state),
        "left_out": [{"name": left.name, "reason": left.reason} for left in contents.left_out],
        "bytes": done.n_bytes,
    }
