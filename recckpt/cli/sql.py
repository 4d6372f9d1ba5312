"""``recckpt sql``: a query of the tables of a checkpoint."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recckpt.cli.result import PROBLEM, USAGE, CommandError, CommandResult, UsageError, usage_checked
from recckpt.inspect.sql import open_views
from recckpt.text import Line, Table, cell, escaped, one_line

if TYPE_CHECKING:
    import duckdb

_ZONED = "TIMESTAMP WITH TIME ZONE"  # as duckdb calls the type, within others too


def sql(args: argparse.Namespace) -> CommandResult:
    """Run a query, and print what it gives."""
    if args.csv and args.json:
        raise UsageError("--csv and --json are two forms of one answer; name one of them")
    with usage_checked():
        views = open_views(args.checkpoint, checked=args.checked)
    import duckdb  # which open_views() has found

    try:
        names, rows = _answer(views.connection, args.query)
    except duckdb.Error as error:
        if views.problem is not None:
            raise views.problem from error
        is_usage = isinstance(error, duckdb.ProgrammingError | duckdb.NotSupportedError)
        raise CommandError(str(error), USAGE if is_usage else PROBLEM) from error
    finally:
        views.connection.close()
    data = {"columns": names, "rows": [[_plain(value) for value in row] for row in rows]}
    return CommandResult(data, _csv(names, rows) if args.csv else _lines(names, rows))


def _answer(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run all statements, and return the columns and rows that the last one gives."""
    import duckdb

    statements = duckdb.extract_statements(query)
    if not statements:
        raise UsageError("found no query")
    *before, last = statements
    for statement in before:
        connection.execute(statement)
    columns = _described(connection, last.query)
    if any(_ZONED in kind for _, kind in columns):
        cursor = connection.execute(_with_times_as_text(last.query, [kind for _, kind in columns]))
        return [name for name, _ in columns], cursor.fetchall()
    cursor = connection.execute(last)
    names = [column[0] for column in cursor.description or ()]
    return names, cursor.fetchall() if names else []


def _described(connection: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, str]]:
    """Return the names and types of what a query gives; [] of what is no query, or is a wrong one."""
    import duckdb

    try:
        return [(name, kind) for name, kind, *_ in connection.execute(f"describe {query}").fetchall()]
    except duckdb.Error:
        return []


def _with_times_as_text(query: str, kinds: Sequence[str]) -> str:
    """Return a query that gives times with a time zone as text: to make Python's times of them, duckdb needs pytz."""
    names = [f"c{number}" for number in range(len(kinds))]
    columns = [
        f"cast({name} as {kind.replace(_ZONED, 'VARCHAR')})" if _ZONED in kind else name
        for name, kind in zip(names, kinds, strict=True)
    ]
    return f"select {', '.join(columns)} from ({_without_end(query)}\n) as answer({', '.join(names)})"


def _without_end(query: str) -> str:
    """Return a statement without the semicolon that ends it, behind which there may be a comment."""
    import duckdb

    for end in (at for at in range(len(query) - 1, -1, -1) if query[at] == ";"):
        with suppress(duckdb.Error):  # where the semicolon is in a text or a comment
            if not duckdb.extract_statements(query[end + 1 :]):
                return query[:end]
    return query


def _lines(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Line]:
    if not names:
        return []
    is_number = [all(_is_number(row[at]) for row in rows) for at in range(len(names))]
    heads = [escaped(name) for name in names]
    right = {head for head, numeric in zip(heads, is_number, strict=True) if numeric}
    return [Table(heads, [[_cell(value) for value in row] for row in rows], right)]


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([["" if value is None else _plain(value) for value in row] for row in rows])
    return out.getvalue().removesuffix("\n").split("\n")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    return one_line(cell(list(value) if isinstance(value, tuple) else value))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: what it lacks, such as dates, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
