"""A source that is one table in files of rows: the files of a directory one after another, all with one schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from recckpt.convert.arrow_rows import Columns
from recckpt.convert.beside import beside
from recckpt.convert.source import ImportOptions, LeftOut, SourceContents, SourceRows, SourceTable
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

Batches = Callable[[str], Iterator[pa.RecordBatch]]


class FileRows:
    """Reads one table from files that each give batches of Arrow.

    Args:
        format: its name.
        files: of the source.
        names: those with rows.
        batches: reads one of them.
        n_rows: of all; None if only reading shows it; ``most_rows`` is a bound then.
        most_rows: at least as many as there are.
        options: what the columns are.
        left_out: contents of the files that do not become rows, or change their form.

    Raises:
        ConversionError: there is no row that shows what the columns are, or a table cannot have such.
    """

    def __init__(
        self,
        format: str,
        files: SourceFiles,
        names: Sequence[str],
        batches: Batches,
        options: ImportOptions,
        *,
        n_rows: int | None,
        most_rows: int,
        left_out: Sequence[LeftOut],
    ) -> None:
        self._files, self._names, self._batches = files, names, batches
        with self.named(names[0]):
            first = next((batch for name in names for batch in batches(name) if batch.num_rows), None)
        if first is None:
            raise ConversionError(files.url, "", found="no rows", expected="one at least", remedy="")
        self._columns = Columns(first, options, files.url)
        count = most_rows if n_rows is None else n_rows
        table = self._columns.table(options.table or files.stem, count, is_exact=n_rows is not None)
        left = tuple(LeftOut(f"column {name}", "a name that slots cannot have") for name in self._columns.left_out)
        unasked = tuple(LeftOut(f"column {name}", "not asked for") for name in self._columns.unasked)
        self.contents = SourceContents(
            format, (table,), left_out=(*left_out, *left, *unasked, *beside(files, names, format))
        )

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows, file after file."""
        for name in self._names:
            with self.named(name):
                for batch in self._batches(name):
                    if not batch.schema.equals(self._columns.schema):
                        remedy = "make all files of a table alike"
                        found, expected = batch.schema.names, self._columns.schema.names
                        if found == expected:
                            found, expected = batch.schema.types, self._columns.schema.types
                        path = self._files.path(name)
                        raise ConversionError(path, "its columns", found=found, expected=expected, remedy=remedy)
                    if batch.num_rows:
                        yield self._columns.rows(batch)

    def close(self) -> None:
        """Do nothing: each file is closed once it is read."""

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Say in an error of Arrow which file it is about."""
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError, EOFError) as error:
            found = f"what Arrow does not read ({error!s:.200})"
            raise ConversionError(self._files.path(name), "", found=found, expected="a whole file") from error
