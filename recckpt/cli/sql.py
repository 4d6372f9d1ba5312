"""``recckpt sql``: a query of the tables of a checkpoint."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
from collections.abc import Sequence
from typing import Any

from recckpt.cli.result import USAGE, CommandError, Outcome, UsageError, usage_checked
from recckpt.inspect.sql import connect
from recckpt.text import Line, Table, cell, escaped, one_line


def sql(args: argparse.Namespace) -> Outcome:
    """Run a query, and print what it gives."""
    if args.csv and args.json:
        raise UsageError("--csv and --json are two forms of one answer; name one of them")
    with usage_checked():
        connection = connect(args.checkpoint)
    import duckdb  # which connect() has found

    try:
        if not duckdb.extract_statements(args.query):
            raise UsageError("found no query")
        cursor = connection.execute(args.query)
        names = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchall() if names else []
    except (duckdb.ProgrammingError, duckdb.NotSupportedError) as error:
        raise CommandError(str(error), USAGE) from error
    except duckdb.Error as error:
        raise CommandError(str(error)) from error
    finally:
        connection.close()
    data = {"columns": names, "rows": [[_plain(value) for value in row] for row in rows]}
    return Outcome(data, _csv(names, rows) if args.csv else _lines(names, rows))


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
