"""A directory that an export wrote: its metadata names the tables, and each lies in a directory of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceRows, SourceTable
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import DELETES, RECORDS, file_name
from recckpt.errors import ConversionError

FORMAT = "recckpt-export"  # part of the format
_READ_AGAIN = ("parquet", "npy", "csv")
_MAX_BYTES = 1 << 26


def exported_tables(files: SourceFiles, format: str) -> list[str]:
    """Return the tables that an export of this format has here; [] where these are no files of one.

    Raises:
        ConversionError: it is an increment, which is no whole table.
    """
    name = RECORDS[format] if format in _READ_AGAIN else ""
    if files.is_file or name not in files.names:
        return []
    try:
        record = json.loads(files.read(name, _MAX_BYTES))
    except (ValueError, RecursionError):
        return []  # of another program
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("tables"), dict):
        return []
    check_is_whole(record, files.path(name))
    directories = {each.partition("/")[0] for each in files.names if "/" in each}
    return list(record["tables"]) if {file_name(table) for table in record["tables"]} & directories else []


def check_is_whole(record: Mapping[str, Any], path: str) -> None:
    """Refuse what an export says of an increment."""
    if "since" in record:
        found = f"the rows that have changed since {record['since']!r}"
        raise ConversionError(path, "", found=found, expected="whole tables", remedy="export without --since")


def check_is_one_table(files: SourceFiles, names: Sequence[str]) -> None:
    """Refuse files of rows that are an increment's deleted ids."""
    for name in names:
        above = f"{files.url.rstrip('/')}/{name}" if not files.is_file else files.url
        if any(part.endswith(DELETES) for part in above.split("/")[:-1]):
            found = "the ids that an increment deletes"
            raise ConversionError(files.path(name), "", found=found, expected="rows", remedy="export without --since")


def open_tables(
    files: SourceFiles,
    tables: Sequence[str],
    options: ImportOptions,
    opened: Callable[[SourceFiles, ImportOptions], ImportSource],
) -> ImportSource:
    """Open the directory of each table; ConversionError where one is missing, or an option is for one table alone."""
    left = [
        LeftOut(f"table {each}", "not asked for")
        for each in tables
        if options.table in tables and each != options.table
    ]
    tables = [options.table] if options.table in tables else tables
    if options.table and len(tables) > 1:
        expected = f"the name of one: {', '.join(tables)}"
        remedy = "name the directory of one table, or leave out the name"
        raise ConversionError(files.url, "", found=f"{len(tables)} tables", expected=expected, remedy=remedy)
    sources = {}
    for table in tables:
        name = options.table or table
        sources[name] = opened(SourceFiles(f"{files.url.rstrip('/')}/{file_name(table)}"), replace(options, table=name))
    return _Tables(sources, left)


class _Tables:
    """Several sources of one table each."""

    def __init__(self, sources: Mapping[str, ImportSource], others: Sequence[LeftOut]) -> None:
        self._sources = sources
        each_contents = [source.contents for source in sources.values()]
        left = [LeftOut(f"table {name}, {each.name}", each.reason) for name in sources for each in self._left(name)]
        of_all = tuple(table for contents in each_contents for table in contents.tables)
        self.contents = replace(each_contents[0], tables=of_all, left_out=(*others, *left))

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows of one."""
        return self._sources[table.name].rows(table)

    def close(self) -> None:
        """Close all."""
        for source in self._sources.values():
            source.close()

    def _left(self, name: str) -> Sequence[LeftOut]:
        return self._sources[name].contents.left_out
