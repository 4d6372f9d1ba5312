"""Tables of a source under other names in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from recckpt.convert.source import ImportSource, SourceContents, SourceRows, SourceTable
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.text import first_few, nearest


def named(source: ImportSource, names: Mapping[str, str], path: str) -> ImportSource:
    """Return a source whose tables have other names, of which each is that of a table in the source.

    Raises:
        ConversionError: the source has no table of a name.
    """
    there = [table.name for table in source.contents.tables]
    for name in names:
        if name not in there:
            found, remedy = f"no table {name!r} to give a name to", nearest(name, there).strip("; ")
            expected = f"one of {first_few(there, 20)}"
            raise ConversionError(path, "", found=found, expected=expected, remedy=remedy)
    return _Named(source, names) if names else source


class _Named:
    """Calls the tables of a source, and the state that its sparse optimizer has of them, by other names."""

    def __init__(self, source: ImportSource, names: Mapping[str, str]) -> None:
        self._source = source
        tables = [replace(table, name=names.get(table.name, table.name)) for table in source.contents.tables]
        self._theirs = dict(zip((table.name for table in tables), source.contents.tables, strict=True))
        extra = _renamed_scalars(source.contents, names)
        self.contents = replace(source.contents, tables=tuple(tables), extra=extra)

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows of a table."""
        yield from self._source.rows(self._theirs[table.name])

    def close(self) -> None:
        """Close its files."""
        self._source.close()


def _renamed_scalars(contents: SourceContents, names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the states of registered objects, that of the sparse optimizer with the names that tables have here."""
    scalars = contents.extra.get(SPARSE_OPTIM)
    if scalars is None:
        return contents.extra
    state = {names.get(name, name): value for name, value in scalars["state"].items()}
    groups = [{**g, "tables": [names.get(name, name) for name in g["tables"]]} for g in scalars["param_groups"]]
    return {**contents.extra, SPARSE_OPTIM: {**scalars, "state": state, "param_groups": groups}}
