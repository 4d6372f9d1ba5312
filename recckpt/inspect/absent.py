"""Proves that ids are in no file of an output dir: reads the ids of every part that is there, listed or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.distinct import distinct, is_among
from recckpt.format.manifest import Manifest
from recckpt.inspect.verify import find_checkpoints
from recckpt.output_dir.at_path import counted_back
from recckpt.output_dir.checkpoint_dir import has_manifest, read_manifest
from recckpt.output_dir.forget_requests import audit, forgotten_among, meant_in, pending, tables_of
from recckpt.output_dir.known_mirrors import KnownMirror, mirrors_behind
from recckpt.output_dir.listing import attempt_dirs
from recckpt.output_dir.near_hosts import NearHost, hosts_behind
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, TABLE, Messages, column_items, ids_in
from recckpt.storage import Storage, open_parent, open_storage
from recckpt.storage.local_files import mapped
from recckpt.text import instead_of

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
        unread: part that could not be read -> why.
        pending: requests to forget that are not ended: table -> how many of the ids they name.
        n_parts: how many files were read.
        n_asked: how many of the ids the audit has as asked to be forgotten, in the table or in any.
        mirrors_behind: mirrors of the output dir, and mirrors of those, of which it is not known that they have
            forgotten what was forgotten.
        hosts_behind: hosts of which it is not known that near saves there have not got what was forgotten.
    """

    url: str
    holding: tuple[Holding, ...]
    unread: dict[str, str]
    pending: dict[str, int]
    n_parts: int
    n_asked: int
    mirrors_behind: tuple[KnownMirror, ...] = ()
    hosts_behind: tuple[NearHost, ...] = ()


def look_for(path: str, ids: Ids, table: str | None = None) -> Absence:
    """Look for ids in the tables of a checkpoint and what it stands on, or in all directories of an output dir.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        ids: int64.
        table: the table that is meant, with its counts of ids that have no row yet; None for all.

    Raises:
        CheckpointNotFoundError: it is neither.
        ValueError: no storage takes the path, or no checkpoint there has such a table.
    """
    sought, unread = distinct(ids), dict[str, str]()
    storage, directories = _directories(path, unread)
    manifests = {directory: _manifest(storage, directory) for directory in directories}
    if table is not None:
        _check_table(storage, table, manifests.values())
    parts = [(each, name) for each in directories for name in _parts(storage, each, manifests[each], unread)]
    if not parts and not unread and not any(manifests.values()) and layout.OWN_DIR not in storage.list_dirs():
        raise CheckpointNotFoundError(
            f"{storage.url}: found no checkpoint"
        )  # where nothing was, absence proves nothing
    tables = None if table is None else tables_of(table)
    of = {each: None if table is None else meant_in(record, table) for each, record in manifests.items()}
    looks = run_all(lambda pair: _look(storage, *pair, sought, of[pair[0]]), parts, storage.threads(_THREADS))
    holdings: dict[tuple[str, str], Holding] = {}
    for (directory, name), look in zip(parts, looks, strict=True):
        if isinstance(look, str):
            unread[layout.join(directory, name)] = look
            continue
        for of_table, there in look.items():
            record = manifests[directory]
            new = Holding(directory, record.ckpt_id if record else None, of_table)
            own = holdings.setdefault((directory, of_table), new)
            if layout.holds_deletes(name):
                own.n_deletes += len(there)
            else:
                own.n_rows += len(there)
            own.ids.append(there)
    meant = [r for r in pending(storage) if tables is None or not set(tables).isdisjoint(tables_of(r.table))]
    requests = {r.table: int(is_among(r.ids, sought).sum()) for r in meant}
    holding = tuple(holdings[name] for name in sorted(holdings))
    n_asked = len(forgotten_among(storage, table, sought))
    mirrors, hosts = tuple(mirrors_behind(storage)), tuple(hosts_behind(storage))
    return Absence(storage.url, holding, unread, requests, len(parts), n_asked, mirrors, hosts)


def _directories(path: str, unread: dict[str, str]) -> tuple[Storage, Sequence[str]]:
    """Return where parts may lie, "" for the output dir itself; note a link that is not there to be looked at."""
    inside, (parent, directory) = open_storage(path), open_parent(path)
    if not has_manifest(parent, directory):
        directories = attempt_dirs(inside)
        if directories or layout.OWN_DIR in inside.list_dirs():
            return inside, [*directories, ""]
        if not inside.why_empty() and counted_back(parent, directory) is None:
            raise CheckpointNotFoundError(f"{inside.url}: found no checkpoint")
    checkpoints = find_checkpoints(path)  # CheckpointNotFoundError where it is nothing of ours
    record = _manifest(checkpoints.storage, checkpoints.directories[0])
    if record is None or (record.kind == "delta" and len(checkpoints.directories) == 1):
        unread[layout.join(checkpoints.directories[0], layout.MANIFEST)] = (
            "that its manifest or what it stands on is damaged or missing"
        )
    return checkpoints.storage, checkpoints.directories


def _manifest(storage: Storage, directory: str) -> Manifest | None:
    try:
        return read_manifest(storage, directory) if directory else None
    except (CorruptCheckpointError, FormatVersionError, OSError):
        return None


def _check_table(storage: Storage, table: str, manifests: Iterable[Manifest | None]) -> None:
    """Raise ValueError for a table that is nowhere: that its ids are absent would prove nothing."""
    records = [record for record in manifests if record is not None]
    names = {entry.name for record in records for entry in record.tables}
    names |= {request.table for request in pending(storage)}
    names |= {line["table"] for line in audit(storage) if isinstance(line.get("table"), str)}
    if records and names.isdisjoint(tables_of(table)):
        raise ValueError(f"{storage.url}: found no table {table!r} in any checkpoint{instead_of(table, sorted(names))}")


def _parts(storage: Storage, directory: str, record: Manifest | None, unread: dict[str, str]) -> list[str]:
    """Return the parts that are there, and those that the manifest has: one that is missing cannot be read."""
    names = {file.name for file in record.files} if record else set()
    try:
        there = storage.list_files(directory)
    except OSError as error:
        unread[directory or "."] = f"{type(error).__name__}: {error}"
    else:
        names.update(name for name in there if directory or "/" not in name)
    return sorted(name for name in names if layout.may_have_rows(name) or name == layout.SPARSE_DIR)  # that is a link


def _look(
    storage: Storage, directory: str, name: str, sought: Ids, tables: Sequence[str] | None
) -> dict[str, Ids] | str:
    """Return which of the ids a part holds, by table; or why it cannot be read."""
    try:
        memory = mapped(storage, layout.join(directory, name))
        ids_by_table: dict[str, list[Ids]] = {}
        for of_table, ids in _ids_of(memory):
            there = ids[is_among(ids, sought)]
            if len(there) and (tables is None or of_table in tables):
                ids_by_table.setdefault(of_table, []).append(there)
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return {of_table: np.concatenate(there) for of_table, there in ids_by_table.items()}


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
