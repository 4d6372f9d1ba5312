"""Proves that ids are in no file of an output dir: reads the ids of every part that is there, listed or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.inspect.verify import find_checkpoints
from recckpt.output_dir.checkpoint_dir import has_manifest, read_manifest
from recckpt.output_dir.forget_requests import audit, digests, key, pending, tables_of
from recckpt.output_dir.listing import attempt_dirs
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, TABLE, Messages, column_items, ids_in
from recckpt.storage import Storage, open_parent, open_storage
from recckpt.storage.local_files import mapped

_THREADS = 8

Ids = npt.NDArray[np.int64]


@dataclass
class Holding:
    """What one directory holds of the ids in one table."""

    directory: str
    ckpt_id: str | None  # None of a leftover, and where the manifest cannot be read
    table: str
    n_rows: int = 0
    n_deletes: int = 0
    ids: list[Ids] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Absence:
    """What :func:`look_for` found.

    Attributes:
        url: where it looked.
        holding: what still holds ids; empty where they are absent.
        unread: parts of which nobody can say what they hold -> why.
        pending: requests to forget that are not ended: table -> how many of the ids they name.
        n_parts: how many files were read.
        n_asked: how many of the ids the audit has as asked to be forgotten, in the table or in any.
    """

    url: str
    holding: tuple[Holding, ...]
    unread: dict[str, str]
    pending: dict[str, int]
    n_parts: int
    n_asked: int


def look_for(path: str, ids: Ids, table: str | None = None) -> Absence:
    """Look for ids in the tables of a checkpoint and what it stands on, or in all directories of an output dir.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        ids: int64.
        table: the table that is meant, with its counts of ids that have no row yet; None for all.

    Raises:
        CheckpointNotFoundError: it is neither.
        ValueError: no storage takes the path.
    """
    wanted = np.unique(ids)
    storage, directories = _directories(path)
    files = [(directory, name) for directory in directories for name in storage.list_files(directory)]
    parts = [pair for pair in files if layout.is_part(pair[1])]
    tables = None if table is None else tables_of(table)
    looks = run_all(lambda pair: _look(storage, *pair, wanted, tables), parts, storage.threads(_THREADS))
    found: dict[tuple[str, str], Holding] = {}
    unread: dict[str, str] = {}
    names = {directory: _ckpt_id(storage, directory) for directory in {directory for directory, _ in parts}}
    for (directory, name), look in zip(parts, looks, strict=True):
        if isinstance(look, str):
            unread[layout.join(directory, name)] = look
            continue
        for of_table, there in look.items():
            own = found.setdefault((directory, of_table), Holding(directory, names[directory], of_table))
            if ".deletes." in name:
                own.n_deletes += len(there)
            else:
                own.n_rows += len(there)
            own.ids.append(there)
    requests = {r.table: int(np.isin(r.ids, wanted).sum()) for r in pending(storage) if table in (None, r.table)}
    holding = tuple(found[name] for name in sorted(found))
    return Absence(storage.url, holding, unread, requests, len(parts), _asked(storage, wanted, table))


def _directories(path: str) -> tuple[Storage, Sequence[str]]:
    storage, directory = open_parent(path)
    if has_manifest(storage, directory):
        found = find_checkpoints(path)
        return found.storage, found.directories
    inside = open_storage(path)
    directories = attempt_dirs(inside)
    if not directories and layout.OWN_DIR not in inside.list_dirs():
        raise CheckpointNotFoundError(f"{inside.url}: {inside.why_empty() or 'found no checkpoint'}")
    return inside, directories


def _ckpt_id(storage: Storage, directory: str) -> str | None:
    try:
        record = read_manifest(storage, directory)
    except (CorruptCheckpointError, FormatVersionError, OSError):
        return None
    return None if record is None else record.ckpt_id


def _look(
    storage: Storage, directory: str, name: str, wanted: Ids, tables: Sequence[str] | None
) -> dict[str, Ids] | str:
    """Return which of the ids a part holds, by table; or why it cannot be read."""
    try:
        memory = mapped(storage, layout.join(directory, name))
        found: dict[str, list[Ids]] = {}
        for of_table, ids in _ids_of(memory):
            there = ids[np.isin(ids, wanted)]
            if len(there) and (tables is None or of_table in tables):
                found.setdefault(of_table, []).append(there)
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return {of_table: np.concatenate(there) for of_table, there in found.items()}


def _ids_of(memory: memoryview) -> Iterator[tuple[str, Ids]]:
    """Yield the ids of each table in each batch of an Arrow file, by its columns alone."""
    pa.ipc.open_file(pa.py_buffer(memory))  # which looks at the footer
    Messages(memory).check_all()
    schema = pa.ipc.open_file(pa.py_buffer(memory)).schema
    options = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name in (TABLE, ID)])
    reader = pa.ipc.open_file(pa.py_buffer(memory), options=options)
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate(full=True)
        column = batch.column(TABLE)
        numbers, tables, ids = column_items(column).to_numpy(), column.dictionary.to_pylist(), ids_in(batch)
        for of_table in np.unique(numbers):
            yield tables[of_table], ids[numbers == of_table]


def _asked(storage: Storage, wanted: Ids, table: str | None) -> int:
    """Return how many of the ids the audit says were asked to be forgotten."""
    lines = [line for line in audit(storage) if table in (None, line.get("table"))]
    with_key = key(storage) if lines else b""
    if not with_key:
        return 0
    known = {digest for line in lines for digest in line.get("digests", ())}
    return len(known.intersection(digests(with_key, wanted)))
