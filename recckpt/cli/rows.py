"""``recckpt head`` and ``recckpt get``: rows of a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from recckpt.cli.result import CommandError, CommandResult, usage_checked
from recckpt.format.tables import TableEntry
from recckpt.inspect.reader import CheckpointReader
from recckpt.output_dir.first_whole import first_whole
from recckpt.sparse.files.arrow_format import ID, column_values, ids_in
from recckpt.text import Line, Table, cell, escaped, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
_T = TypeVar("_T")


def head(args: argparse.Namespace) -> CommandResult:
    """Print the first rows of a table, in the order of the files."""

    def first(reader: CheckpointReader) -> tuple[list[str], list[Row]]:
        columns = _columns(reader, args)
        return columns, list(islice(_rows(reader, args.table, columns), args.n))

    columns, rows = _read(args.checkpoint, first)
    return CommandResult({"table": args.table, "rows": rows}, _lines(columns, rows))


def get(args: argparse.Namespace) -> CommandResult:
    """Print rows by id, in the order asked for; ids that the table lacks are a problem."""
    ids = list(dict.fromkeys(args.ids))

    def by_id(reader: CheckpointReader) -> tuple[list[str], dict[int, Row]]:
        columns = _columns(reader, args)
        return columns, {row[ID]: row for row in _rows(reader, args.table, columns, ids)}

    columns, by_number = _read(args.checkpoint, by_id)
    missing = [number for number in ids if number not in by_number]
    rows = [by_number[number] for number in ids if number in by_number]
    listed = ", ".join(map(str, missing))
    problems = [f"table {args.table!r} has no row of id {listed}"] if missing else []
    data = {"table": args.table, "rows": rows, "missing": missing}
    return CommandResult(data, _lines(columns, rows) if rows else [], problems)


def _read(path: str, take: Callable[[CheckpointReader], _T]) -> _T:
    """Read from a checkpoint, or from a newer one if its writer removes it meanwhile."""

    def find() -> CheckpointReader:
        with usage_checked():
            return CheckpointReader(path)

    def use(reader: CheckpointReader) -> _T:
        with reader:
            return take(reader)

    return first_whole(find, use)


def _table(reader: CheckpointReader, name: str) -> TableEntry:
    try:
        return reader.manifest.named_table(name)
    except KeyError as error:
        raise CommandError(error.args[0]) from error


def _columns(reader: CheckpointReader, args: argparse.Namespace) -> list[str]:
    """Return the slots to print, in the order asked for."""
    slots = [slot.name for slot in _table(reader, args.table).slots]
    if args.columns is None:
        return slots
    asked = [name for name in dict.fromkeys(args.columns.split(",")) if name != ID]
    for name in asked:
        if name not in slots:
            raise CommandError(
                f"table {args.table!r} has no slot {name!r}{nearest(name, slots)}; it has {', '.join(slots)}"
            )
    return asked


def _rows(
    reader: CheckpointReader, table: str, columns: Sequence[str], ids: Iterable[int] | None = None
) -> Iterator[Row]:
    entry = _table(reader, table)
    for batch in reader.table(table, columns, ids):
        yield from _batch_rows(entry, batch, columns)


def _batch_rows(entry: TableEntry, batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[Row]:
    specs = {slot.name: slot for slot in entry.slots}
    ids = ids_in(batch)
    values = {name: column_values(batch.column(name), specs[name]) for name in columns}
    for row in range(len(ids)):
        yield {ID: int(ids[row])} | {name: column[row].tolist() for name, column in values.items()}


def _lines(columns: Sequence[str], rows: Sequence[Row]) -> list[Line]:
    names = (ID, *columns)
    return [Table([escaped(name) for name in names], [[cell(row[name]) for name in names] for row in rows], (ID,))]
