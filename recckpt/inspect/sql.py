"""Opens tables of a checkpoint in duckdb and polars, which read only what a query needs (no torch here)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import needed
from recckpt.format.manifest import NOT_FINITE
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.index_file import read_timeline
from recckpt.output_dir.listing import look_around
from recckpt.output_dir.open_files import first_whole
from recckpt.sparse.files.arrow_format import TABLE
from recckpt.storage import Storage

if TYPE_CHECKING:
    import duckdb
    import polars
    from pyarrow.dataset import Dataset

log = logging.getLogger("recckpt")

_CHECKPOINTS = pa.schema(
    [
        ("id", pa.string()),
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("time", pa.string()),
        ("ephemeral", pa.bool_()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("path", pa.string()),
        ("state", pa.string()),
    ]
)

_TIMELINE = pa.schema(
    [
        ("ckpt_id", pa.string()),
        ("step", pa.int64()),
        ("kind", pa.string()),
        ("time", pa.string()),
        ("blocked_sec", pa.float64()),
        ("total_sec", pa.float64()),
        ("n_bytes", pa.int64()),
        ("n_rows", pa.int64()),
        ("error", pa.string()),
    ]
)


def connect(path: str | os.PathLike[str], *, checked: bool = True) -> duckdb.DuckDBPyConnection:
    """Return a duckdb connection, in memory, with a view of each table of a checkpoint.

    A view has ``id`` and the slots, float16 and bfloat16 as float32. There are two more tables. ``checkpoints`` has the
    checkpoints of the output dir, oldest first, with a column for each metric, rate and label in their states.
    ``timeline`` has the last saves, including failed saves with their ``error``. If a table has one of these names, or
    a name that differs from another table's only in case, its view ends in ``_2`` and a warning is logged, because SQL
    ignores case; the same holds for slots of one table and for the columns of ``checkpoints``.

    A query reads the columns that it names; a delta's chain is merged anew for each query.
    Every value read is checked; a query that finds damage raises a ``duckdb.Error`` that names the damaged file. Files
    stay open as long as the connection. Imports no torch.

    Args:
        path: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        checked: False does not check the values of a full checkpoint on a local file system.

    Raises:
        MissingLibraryError: duckdb is not installed.
        TypeError, CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as
            :class:`CheckpointReader`.
    """
    return open_views(path, checked=checked)[0]


def open_views(path: str | os.PathLike[str], *, checked: bool) -> tuple[duckdb.DuckDBPyConnection, Sequence[Dataset]]:
    """Return what :func:`connect` returns, and the data sets behind its views.

    duckdb turns an error of recckpt in a query into a ``duckdb.Error``; the data set keeps the original as ``problem``.
    """
    library = needed("duckdb", "sql")
    opened = _opened(path)
    connection: duckdb.DuckDBPyConnection = library.connect()
    connection.register("checkpoints", _checkpoints(opened.storage))
    connection.register("timeline", _timeline(opened.storage))
    tables = {entry.name: _rows(opened, entry.name, checked=checked) for entry in opened.manifest.tables}
    create_views(connection, tables, opened.storage.url, taken=("checkpoints", "timeline"))
    return connection, [*tables.values()]


def create_views(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, Dataset], url: str, taken: Collection[str] = ()
) -> None:
    """Make a view for each table; if its name is ``taken``, the view gets another name, with a warning."""
    library, views = needed("duckdb", "sql"), _free_names(tables, taken)
    for table, dataset in tables.items():
        view = views[table]
        if view != table:
            log.warning("%s: table %r is the view %r: its name is taken", url, table, view)
        rows = connection.from_arrow(dataset)
        renamed = zip(rows.columns, dataset.schema.names, strict=True)  # duckdb renames columns that it mistakes
        columns = {column: name for column, name in renamed if name != TABLE}
        shown = _free_names(columns.values())
        for name, free in shown.items():
            if free != name:
                what = f"slot {name!r} of table {table!r} is the column {free!r}"
                log.warning("%s: %s: its name differs from another only in case, which SQL ignores", url, what)
        rows.select(*(library.ColumnExpression(c).alias(shown[name]) for c, name in columns.items())).create_view(view)


def scan(path: str | os.PathLike[str], table: str, *, checked: bool = True) -> polars.LazyFrame:
    """Return the rows of a table as a polars LazyFrame, which reads the columns and rows that a query asks for.

    Its columns are ``id`` and the slots, float16 and bfloat16 as float32. Reads and checks the same as
    :func:`connect`.

    Args:
        path: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        table: name of the table.
        checked: as in :func:`connect`; a query that finds damage raises CorruptCheckpointError.

    Raises:
        MissingLibraryError: polars is not installed.
        KeyError: the checkpoint has no such table.
        TypeError, CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError: as
            :class:`CheckpointReader`.
    """
    library = needed("polars", "sql")
    rows = _rows(_opened(path), table, checked=checked)
    frame: polars.LazyFrame = library.scan_pyarrow_dataset(rows)
    return frame.drop(TABLE) if TABLE in rows.schema.names else frame


def _opened(path: str | os.PathLike[str]) -> OpenChain:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a path or URL of a checkpoint or output dir, found {path!r}")
    return first_whole(lambda: locate_path(os.fspath(path)), lambda located: OpenChain.open(*located))


def _rows(opened: OpenChain, name: str, *, checked: bool) -> Dataset:
    from recckpt.sparse.files.dataset import checked_dataset, dataset_of, has_halves  # slow import

    slots = opened.manifest.named_table(name).slots
    table = opened.table(name, [slot.name for slot in slots])
    if has_halves(slots):
        return checked_dataset(table, as_numbers=True)
    return dataset_of(table, checked=checked or not table.links[0].is_mapped)  # else whole files would be copied


def _free_names(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Return name -> unique name, also when case is ignored: unchanged if possible, else with a number."""
    names_in_sql, others = dict[str, str](), {name.casefold() for name in taken}
    for name in names:
        number, free = 1, name
        while free.casefold() in others:
            number += 1
            free = f"{name}_{number}"
        names_in_sql[name] = free
        others.add(free.casefold())
    return names_in_sql


def _checkpoints(storage: Storage) -> pa.Table:
    current = look_around(storage).current
    rows = [
        {
            "id": each.ckpt_id,
            "step": each.manifest.step,
            "kind": each.manifest.kind,
            "time": each.manifest.time,
            "ephemeral": each.manifest.ephemeral,
            "rows": each.manifest.rows,
            "bytes": each.manifest.n_bytes,
            "path": storage.url_of(each.directory),
            "state": json.dumps(dict(each.manifest.state)),
        }
        for each in current
    ]
    table = pa.Table.from_pylist(rows, _CHECKPOINTS)
    names = dict.fromkeys(name for each in current for name in each.manifest.state)
    for name, free in _free_names(names, _CHECKPOINTS.names).items():
        if free != name:
            what = f"{name!r} of their states is the column {free!r} of 'checkpoints'"
            log.warning("%s: %s: its name is taken", storage.url, what)
        table = table.append_column(free, _column(_numbers([each.manifest.state.get(name) for each in current])))
    return table


def _numbers(values: list[Any]) -> list[Any]:
    """Return the values, with texts such as "NaN" as numbers, unless any value is other text."""
    texts = {value for value in values if isinstance(value, str)}
    if not texts or not texts.issubset(NOT_FINITE):
        return values
    return [float(value) if isinstance(value, str) else value for value in values]


def _timeline(storage: Storage) -> pa.Table:
    lines = read_timeline(storage)
    names = dict.fromkeys([*_TIMELINE.names, *(name for line in lines for name in line)])
    kinds = {field.name: field.type for field in _TIMELINE}
    return pa.table({name: _column([line.get(name) for line in lines], kinds.get(name)) for name in names})


def _column(values: list[Any], kind: pa.DataType | None = None) -> pa.Array:
    """Return a column of JSON values: of one type if all values fit it, else as text."""
    try:
        column = pa.array(values, kind)
        is_known = "struct<>" not in str(column.type)  # as for a lone {}, which duckdb before 2 refuses
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # a line written by hand
        is_known = False
    if not is_known:
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column
