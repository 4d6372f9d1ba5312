"""``recckpt head``, ``get``, ``history`` and ``sql``: rows of tables."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from recckpt.cli.arguments import A_CHECKPOINT, AN_OUTPUT_DIR, argument, int64, natural
from recckpt.cli.result import PROBLEM, USAGE, CommandError, CommandResult, UsageError, usage_checked
from recckpt.errors import CheckpointNotFoundError
from recckpt.text import Line, Table, cell, escaped, one_line, plural

if TYPE_CHECKING:
    import duckdb

    from recckpt.convert.reader import SourceReader
    from recckpt.inspect.reader import CheckpointReader

Row = dict[str, Any]
_Answer = TypeVar("_Answer")
_ID = "id"
_ZONED = "TIMESTAMP WITH TIME ZONE"  # duckdb's name of the type, also inside nested types


def _id_or_all(text: str) -> int | None:
    return None if text == _ALL else int64(text)


_id_or_all.__name__ = int64.__name__
_WHICH = argument("ids ID", "any int64, also negative; `all` for a dense tensor", nargs="+", type=_id_or_all)
_OF_A_TABLE = (
    argument("checkpoint CKPT", A_CHECKPOINT),
    argument("table TABLE"),
    argument("--columns A,B", "slots to print, separated by commas (default: all)"),
)
_IDS = argument("ids ID", "any int64, also negative", nargs="+", type=int64)
_ALL = "all"
_MOST_ROWS = 20  # most rows of a tensor to print; --json has all
ARGUMENTS = {
    "head": (argument("-n N", "number of rows (default: %(default)s)", type=natural, default=10), *_OF_A_TABLE),
    "get": (*_OF_A_TABLE, _WHICH),
    "history": (argument("dir RUN", AN_OUTPUT_DIR), argument("table TABLE"), _IDS),
    "sql": (
        argument("checkpoint CKPT", A_CHECKPOINT),
        argument("query QUERY", 'such as "select count(*) from item"; quote names like "user/1"'),
        argument("--csv", "print CSV, with a header"),
        argument(
            "--unchecked",
            "do not check the values of a full checkpoint (default: every value that is read is checked)",
            dest="checked",
            action="store_false",
        ),
    ),
}


def run_head(args: argparse.Namespace) -> CommandResult:
    columns, rows = _read(args, lambda reader: _rows(reader, args, None, args.n))
    return CommandResult({"table": args.table, "rows": rows}, _table_of_rows(columns, rows))


def run_get(args: argparse.Namespace) -> CommandResult:
    """Print rows by id, in the order of the arguments, or a dense tensor; missing ids are a problem."""
    if None in args.ids:
        return _read(args, lambda reader: _tensor(reader, args))
    ids = list(dict.fromkeys(args.ids))
    columns, there = _read(args, lambda reader: _rows(reader, args, ids))
    by_number = {row[_ID]: row for row in there}
    missing = [number for number in ids if number not in by_number]
    rows = [by_number[number] for number in ids if number in by_number]
    problems = [f"table {args.table!r} has no row of id {', '.join(map(str, missing))}"] if missing else []
    data = {"table": args.table, "rows": rows, "missing": missing}
    return CommandResult(data, _table_of_rows(columns, rows) if rows else [], problems)


def _read(args: argparse.Namespace, use: Callable[[CheckpointReader | SourceReader], _Answer]) -> _Answer:
    """Call a function on a checkpoint; if the writer removes the checkpoint meanwhile, on a newer one."""
    from recckpt.cli.others import reader_at
    from recckpt.output_dir.open_files import first_whole

    def used(reader: CheckpointReader | SourceReader) -> _Answer:
        with reader:
            return use(reader)

    return first_whole(lambda: reader_at(args.checkpoint), used)


def _rows(
    reader: CheckpointReader | SourceReader, args: argparse.Namespace, ids: Iterable[int] | None, n: int | None = None
) -> tuple[list[str], list[Row]]:
    """Return the requested columns, and the first ``n`` rows or all; CommandError for unknown names."""
    from recckpt.sparse.files.arrow_format import column_values, ids_in

    try:
        specs = {slot.name: slot for slot in reader.slots(args.table)}
        asked = [*specs] if args.columns is None else [c for c in dict.fromkeys(args.columns.split(",")) if c != _ID]
        batches = reader.table(args.table, asked, ids)
    except KeyError as error:
        raise CommandError(error.args[0]) from error
    rows = list[Row]()
    for batch in batches if n != 0 else ():
        values = [(name, column_values(batch.column(name), specs[name])) for name in asked]
        for row, number in enumerate(ids_in(batch)[: None if n is None else n - len(rows)].tolist()):
            rows.append({_ID: number} | {name: column[row].tolist() for name, column in values})
        if len(rows) == n:
            break
    return asked, rows


def _tensor(reader: CheckpointReader | SourceReader, args: argparse.Namespace) -> CommandResult:
    from recckpt.format.tensor_index import NUMPY_DTYPES, widened

    name = args.table
    if name in reader.tables() and name not in reader.tensor_names():
        raise UsageError(
            f"{name!r} is a table: name ids of it, or see its first rows by `recckpt head`; `{_ALL}` is for tensors"
        )
    try:
        values, dtype, shape = reader.read_tensor(name), reader.tensor_dtype(name), reader.tensor_shape(name)
    except KeyError as error:
        raise CommandError(error.args[0]) from error
    values = widened(values) if dtype == "bfloat16" else values
    as_bits = "" if dtype in ("bfloat16", NUMPY_DTYPES[dtype].name) else ", as bits"
    lines: list[Line] = [f"{escaped(name)}: {dtype} {shape}{as_bits}"]
    rows = (
        [(str(number), cell(_plain(row.tolist()))) for number, row in enumerate(values[:_MOST_ROWS])] if shape else []
    )
    lines += [Table(("ROW", "VALUES"), rows, ("ROW",))] if shape else [cell(_plain(values.item()))]
    if shape and shape[0] > _MOST_ROWS:
        lines.append(f"and {plural(shape[0] - _MOST_ROWS, 'row')} more; --json has all")
    return CommandResult(
        {"tensor": name, "dtype": dtype, "shape": list(shape), "values": _plain(values.tolist())}, lines
    )


def _table_of_rows(columns: Sequence[str], rows: Sequence[Row]) -> list[Line]:
    names = (_ID, *columns)
    return [Table([escaped(name) for name in names], [[cell(row[name]) for name in names] for row in rows], (_ID,))]


def run_history(args: argparse.Namespace) -> CommandResult:
    from recckpt.inspect.row_history import history, lines_of

    with usage_checked():
        try:
            rows = history(args.dir, args.table, args.ids)
        except KeyError as error:
            raise CommandError(error.args[0]) from error
    missing = ", ".join(str(row.id) for row in rows.rows if not row.is_known)
    what = f"no checkpoint has a row for id {missing} in table {escaped(args.table)}"
    problems = [f"{rows.url}: {what}"] if missing else []
    if rows.damage:
        problems.append(f"{rows.url}: found damage in {plural(len(rows.damage), 'place')}; `recckpt verify` shows all")
    return CommandResult(rows.to_dict(), lines_of(rows), problems)


def run_sql(args: argparse.Namespace) -> CommandResult:
    from recckpt.cli.others import source_at, views_of
    from recckpt.inspect.sql import open_views

    if args.csv and args.json:
        raise UsageError("--csv and --json exclude each other; pass one of them")
    try:
        with usage_checked():
            connection, tables = open_views(args.checkpoint, checked=args.checked)
    except CheckpointNotFoundError:
        if (source := source_at(args.checkpoint)) is None:
            raise
        connection, tables = views_of(source)
    import duckdb  # open_views() has checked that it is installed

    try:
        names, rows = _answer(connection, args.query)
    except duckdb.Error as error:
        for problem in (getattr(rows_of, "problem", None) for rows_of in tables):
            if problem is not None:
                raise problem from error
        is_usage = isinstance(error, duckdb.ProgrammingError | duckdb.NotSupportedError)
        raise CommandError(str(error), USAGE if is_usage else PROBLEM) from error
    finally:
        connection.close()
    data = {"columns": names, "rows": [[_plain(value) for value in row] for row in rows]}
    if not args.csv:
        return CommandResult(data, _table_of_answer(names, rows))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([["" if value is None else _plain(value) for value in row] for row in rows])
    return CommandResult(data, out.getvalue().removesuffix("\n").split("\n"))


def _answer(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    import duckdb

    statements = duckdb.extract_statements(query)
    if not statements:
        raise UsageError("found no query")
    *before, last = statements
    for statement in before:
        connection.execute(statement)
    kinds: list[tuple[str, str]] = []  # stays empty if it is not a query, or an invalid one
    with suppress(duckdb.Error):
        described = connection.execute(f"describe {last.query}").fetchall()
        kinds = [(name, kind) for name, kind, *_ in described]
    if any(_ZONED in kind for _, kind in kinds):
        cursor = connection.execute(_with_times_as_text(last.query, [kind for _, kind in kinds]))
        return [name for name, _ in kinds], cursor.fetchall()
    cursor = connection.execute(last)
    names = [column[0] for column in cursor.description or ()]
    return names, cursor.fetchall() if names else []


def _with_times_as_text(query: str, kinds: Sequence[str]) -> str:
    """Return a query with times with time zones as text, because duckdb needs pytz to return them as objects."""
    import duckdb

    for end in (at for at in range(len(query) - 1, -1, -1) if query[at] == ";"):
        with suppress(duckdb.Error):  # the semicolon may be in a text or a comment
            if not duckdb.extract_statements(query[end + 1 :]):  # it ends the statement; only a comment may follow
                query = query[:end]
                break
    names = [f"c{number}" for number in range(len(kinds))]
    columns = [
        f"cast({name} as {kind.replace(_ZONED, 'VARCHAR')})" if _ZONED in kind else name
        for name, kind in zip(names, kinds, strict=True)
    ]
    return f"select {', '.join(columns)} from ({query}\n) as answer({', '.join(names)})"


def _table_of_answer(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Line]:
    def is_number(value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

    def shown(value: Any) -> str:
        return "NULL" if value is None else one_line(cell(list(value) if isinstance(value, tuple) else value))

    heads = [escaped(name) for name in names]
    right = {head for at, head in enumerate(heads) if all(is_number(row[at]) for row in rows)}
    return [Table(heads, [[shown(value) for value in row] for row in rows], right)] if names else []


def _plain(value: Any) -> Any:
    """Return a value in a type of JSON: types that JSON lacks, such as dates, become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
