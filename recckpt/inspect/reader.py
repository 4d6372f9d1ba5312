"""Reads a checkpoint without the model and without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.buckets import distinct
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.format.tensor_index import NUMPY_DTYPES
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.open_files import first_whole
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, column_buffer
from recckpt.sparse.files.chain_table import AlignedRows, as_ids
from recckpt.sparse.files.merged_rows import check_count
from recckpt.sparse.files.table_reader import table_schema
from recckpt.storage import absolute
from recckpt.text import cell, count, escaped, html, nearest, one_line, plural, shown, size
from recckpt.types import EMBEDDING, SlotSpec

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

    from recckpt.inspect.changes import CheckpointChanges

_MOST = 20  # most names on a line in notebooks
_STYLE = """
.recckpt.checkpoint h1 { font-size: 1.1em; } .recckpt.checkpoint .scroll { margin: .5em 0; }
.recckpt.checkpoint .scroll td:last-child { max-width: 34em; }
"""

Ids = Iterable[int] | npt.NDArray[np.integer[Any]]


def dataset(path: str | os.PathLike[str], table: str, *, checked: bool = True) -> Dataset:
    """Return the rows of a table as a ``pyarrow.dataset.Dataset``, which pyarrow, polars and duckdb query lazily.

    Columns are ``table``, ``id`` and the slots; only rows of this table are included. At first only catalogs and the
    ends of the files are read. A query reads the columns that it needs and checks each of their bytes, only once if
    files are mapped. For damaged bytes a query raises CorruptCheckpointError, or an error of the querying library with
    the same message. Imports no torch.

    pyarrow's joins, ``sort_by`` and ``get_fragments`` bypass the checks: they need ``checked=False``, or the rows as a
    table. They do not work for a delta, whose rows are merged for each query.

    The files stay open: on a local file system all rows remain readable even if the writer removes the checkpoint; on
    object stores a query then fails. Several threads may query it.

    Args:
        path: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        table: name of the table.
        checked: False: Arrow uses a full checkpoint's values directly from memory maps, without noticing damage, which
            ``recckpt verify`` finds. Without memory maps the files are copied to temporary files first.

    Raises:
        KeyError: the checkpoint has no such table.
        TypeError, CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as
            :class:`CheckpointReader`.
    """
    return CheckpointReader(path).dataset(table, checked=checked)


class CheckpointReader:
    """Reads tables and tensors of one committed checkpoint; every byte that it returns has been checked.

    Imports no torch and runs no code from the files. As a context manager it closes itself. :meth:`lookup`,
    :meth:`refresh` and :meth:`at_this_checkpoint` are thread-safe, other methods are not. Notebooks show it as a
    table of the checkpoint's contents.

    All files are opened immediately; for a delta, the files of its whole chain. On a local file system the open files
    stay readable even if rotation removes them, and their disk space is freed only when the reader is closed. On object
    stores a read then raises CheckpointRemovedError.

    Args:
        path: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.

    Raises:
        TypeError: ``path`` is not a path.
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: the writer removed the checkpoint before its files were open, four times in a row.
        CorruptCheckpointError: the manifest is damaged, or a file is missing or of another size.
        FormatVersionError: a newer recckpt wrote the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be a path or URL of a checkpoint or output dir, found {path!r}")
        self._path = absolute(os.fspath(path))
        self._moving = threading.Lock()
        self._now = first_whole(partial(locate_path, self._path), lambda located: OpenChain.open(*located))

    @shown
    def __repr__(self) -> str:
        return self._in_words()

    def __fspath__(self) -> str:
        return self.path

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._now = OpenChain.of(self._now.storage, self._now.checkpoint)

    def refresh(self) -> bool:
        """Move to the checkpoint that the path means now, such as the newest of an output dir; return whether it moved.

        Only links that are new to this reader are opened and read: with deltas, only what changed. Iterators over the
        previous checkpoint can be read to the end. After an error the reader stays at its checkpoint.
        Thread-safe: a look-up in another thread uses either checkpoint, never both. Before the reader moves, it
        prepares look-ups for the tables that were looked up before.

        Raises:
            CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as for
                the constructor.
        """
        with self._moving:
            before = self._now
            self._now = first_whole(partial(locate_path, self._path), lambda located: OpenChain.open(*located, before))
            return self._now.manifest.name != before.manifest.name

    def at_this_checkpoint(self) -> CheckpointReader:
        """Return a reader of the same open files that stays at this checkpoint when this one moves on. Thread-safe.

        Use the reader for an answer that needs several look-ups in the same checkpoint. It costs nothing, and need not
        be closed.
        """
        return reader_of(self._now)

    @property
    def path(self) -> str:
        """The checkpoint's own path or URL. A reader can replace a path, such as in a call of :func:`recckpt.diff`."""
        return self._now.storage.url_of(self._now.checkpoint.directory)

    @property
    def chain(self) -> OpenChain:
        """Internal: the open files, which can be loaded even after the checkpoint was removed."""
        return self._now.open_all()

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest, known without opening other files."""
        return self._now.manifest

    def tables(self) -> list[str]:
        """Return the names of the tables."""
        return [table.name for table in self.manifest.tables]

    def slots(self, name: str) -> Sequence[SlotSpec]:
        """Return the slots of a table."""
        return self.manifest.named_table(name).slots

    def schema(self, name: str, columns: Collection[str] | None = None) -> pa.Schema:
        """Return the Arrow schema of the batches of a table: ``id`` and one column per slot."""
        entry = self.manifest.named_table(name)
        return table_schema(slot for slot in entry.slots if columns is None or slot.name in columns)

    def table(
        self, name: str, columns: Collection[str] | None = None, ids: Ids | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table as Arrow batches, in bucket order within each shard; for a delta, over all shards.

        Args:
            name: the table.
            columns: slots to read beside ``id``; None for all.
            ids: read only the rows of these ids; shards and batches that cannot contain them are not read.

        Raises:
            KeyError: there is no such table or slot.
            TypeError: ``ids`` are not int64 numbers, or ``columns`` is a single name.
            CorruptCheckpointError: a file is damaged, or an id occurs twice.
            CheckpointRemovedError: the writer removed the checkpoint, on storage that is not a local file system.
        """
        if ids is None:
            return self.chain.table_with(name, columns).all_rows()
        sought = distinct(as_ids(ids))
        return self.chain.table_with(name, columns, sought).rows_of(sought)

    def lookup(self, name: str, ids: Ids, slot: str = EMBEDDING, default: Any = 0) -> AlignedRows:
        """Return one row for each of ``ids``, in their order, and a mask of the ids that the table has. Thread-safe.

        All rows come from one checkpoint, even if :meth:`refresh` moves on in the meantime. The first call for a table
        reads all its ids and keeps them in memory, 16 bytes per row; later calls take milliseconds. Values are checked
        when first read from a memory map, or at every read without maps. To read a few rows once, :meth:`table` with
        ``ids`` reads less.

        Args:
            name: the table.
            ids: int64 numbers, repeats allowed.
            slot: the slot to read.
            default: the value, or a row of values, for ids that the table does not have.

        Returns:
            ``values``, shape (ids, *slot_shape) in the slot's dtype, with bfloat16 as float32; and ``found``, a bool
            for each id.

        Raises:
            KeyError: there is no such table or slot.
            TypeError: ``ids`` are not int64 numbers, or ``slot`` is not a name.
            ValueError: ``default`` does not fit the slot.
            CorruptCheckpointError, CheckpointRemovedError: as :meth:`table`.
        """
        if not isinstance(slot, str):
            raise TypeError(f"slot must be the name of one slot, found {slot!r}; read several by table(name, columns)")
        now = self.chain
        found = {spec.name: spec for spec in now.manifest.named_table(name).slots}
        if slot not in found:
            raise KeyError(f"table {name!r} has no slot {slot!r}; it has {[*found]}{nearest(slot, found)}")
        return now.find(name, as_ids(ids), found[slot], default)

    def changes_since(self, before: CheckpointReader | str | None) -> CheckpointChanges:
        """Return what changed since an older checkpoint of the run, such as the previous one that ``follow`` yielded.

        For servers that update rows every minute and dense layers every hour. Reads manifests and indexes of dense
        tensors; reads rows only when you iterate.

        Args:
            before: a reader of the older checkpoint, or its ``manifest.name``. With a name, the older dense tensors are
                unknown, and so are the older tables unless that checkpoint is in this checkpoint's chain. All tables
                are replaced if ``before`` is None or not in the chain, such as after a full save or after ids were
                forgotten.

        Raises:
            TypeError: ``before`` is of another type.
            CorruptCheckpointError: an index of dense tensors is damaged.
        """
        if not isinstance(before, CheckpointReader | str | None):
            raise TypeError(f"before must be a CheckpointReader, its manifest.name or None, found {before!r:.200}")
        from recckpt.inspect.changes import changes_between

        return changes_between(before._now if isinstance(before, CheckpointReader) else before, self.chain)

    def dataset(self, name: str, *, checked: bool = True) -> Dataset:
        """Return the rows of a table for other libraries to query; see :func:`recckpt.inspect.dataset`.

        Raises:
            KeyError: there is no such table.
            CorruptCheckpointError: a file is missing, cut short or has another schema, or an id is in two shards.
        """
        from recckpt.sparse.files.dataset import dataset_of  # slow import of Arrow's datasets

        return dataset_of(self.chain.table_with(name, None), checked=checked)

    def tensor_names(self) -> list[str]:
        """Return the names of the dense tensors."""
        return list(self.chain.tensors.model)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dense tensor; or, for a name ``table@slot``, of that slot for all rows of the table."""
        if (of_table := self._slot(name)) is not None:
            return (of_table[0].rows, *of_table[1].shape)
        return self.chain.tensors.named(name).shape

    def tensor_dtype(self, name: str) -> str:
        """Return the dtype of a dense tensor or of ``table@slot``, such as ``float32``."""
        of_table = self._slot(name)
        return of_table[1].dtype if of_table is not None else self.chain.tensors.named(name).dtype

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a dense tensor, whole, as a numpy array; bfloat16 comes as uint16 bit patterns.

        Args:
            name: name of the tensor; or ``table@slot``, such as ``item@embedding``, for a slot of all rows of a table;
                or ``table@id`` for the ids. All slots of a table have the same row order. The whole result is in
                memory: read large tables by :meth:`table`.

        Raises:
            KeyError: there is no such tensor or slot.
            CorruptCheckpointError: its bytes differ from the saved bytes.
        """
        if (of_table := self._slot(name)) is None:
            dense = self.chain.tensors
            return dense.read(dense.named(name))
        entry, slot = of_table
        rows = self.chain.table(entry.name, [] if slot.name == ID else [slot.name])
        own_rows = sum(link.entry.own_rows for link in rows.links)
        check_count(rows.links[0], min(entry.rows, own_rows))  # before memory is allocated
        values, begin = np.empty((entry.rows, *slot.shape), NUMPY_DTYPES[slot.dtype]), 0
        for batch in rows.all_rows():
            end = begin + batch.num_rows
            if end <= entry.rows:  # a surplus of rows raises an error at the end of ``table``
                column = np.frombuffer(column_buffer(batch.column(slot.name)), values.dtype)
                values[begin:end] = column.reshape(-1, *slot.shape)
            begin = end
        return values

    def _slot(self, name: str) -> tuple[TableEntry, SlotSpec] | None:
        """Return the table and slot of a name ``table@slot`` or ``table@id``; None for any other name."""
        table, _, slot = name.rpartition("@")
        entry = None if name in self.chain.tensors.model or not table else self.manifest.table(table)
        if entry is None:
            return None
        slots = {ID: ID_SPEC, **{spec.name: spec for spec in entry.slots}}
        if slot not in slots:
            raise KeyError(f"table {table!r} has no slot {slot!r}; it has {[*slots]}{nearest(slot, slots)}")
        return entry, slots[slot]

    def _in_words(self) -> str:
        manifest, n_links = self.manifest, len(self._now.links)
        links = f" of {plural(n_links, 'link')}" if n_links > 1 else ""
        step = "" if manifest.step is None else f", step {manifest.step}"
        kind = f"{manifest.kind}{links}{step}, {one_line(manifest.time)}"
        content = f"{plural(manifest.rows, 'row')} in {plural(len(manifest.tables), 'table')}"
        return f"{one_line(self.path)}: {kind}, {content}, {size(manifest.n_bytes)}"

    def _repr_html_(self) -> str:
        """Return a page made from the manifest alone: nothing is opened or read."""
        manifest, names = self.manifest, self.manifest.names
        tables = []
        for each in manifest.tables:
            slots = ", ".join(f"{escaped(slot.name)} {slot.kind}" for slot in each.slots)
            tables.append((escaped(each.name), count(each.rows), size(each.rows * each.row_bytes), slots))
        state = [(escaped(name), one_line(cell(value))) for name, value in manifest.state.items()]
        parts = [f"<h1>{html.text(self._in_words())}</h1>"]
        parts += html.section("Tables", ("TABLE", "ROWS", "BYTES", "SLOTS"), tables, ("ROWS", "BYTES"))
        parts += html.section("Training state", ("NAME", "VALUE"), state, ())
        groups = {"dense": names.dense, "registered": names.extra, "positions": names.io_state}
        for group, all_names in groups.items():
            more = f" and {count(len(all_names) - _MOST)} more" if len(all_names) > _MOST else ""
            few = ", ".join(map(escaped, all_names[:_MOST])) + more
            parts += [f"<p><strong>{group}:</strong> {html.text(few)}</p>"] if all_names else []
        return html.body("checkpoint", parts, _STYLE)


def reader_of(chain: OpenChain) -> CheckpointReader:
    """Return a reader of an open checkpoint; the reader always stays at this checkpoint."""
    reader = CheckpointReader.__new__(CheckpointReader)
    reader._path, reader._moving, reader._now = chain.storage.url_of(chain.directory), threading.Lock(), chain
    return reader
