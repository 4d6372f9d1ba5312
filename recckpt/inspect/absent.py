"""Searches all part files of a directory for ids, including unlisted files; reads files of ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of, distinct, is_among
from recckpt.format.manifest import Manifest
from recckpt.inspect.verify import find_checkpoints
from recckpt.output_dir.at_path import counted_back
from recckpt.output_dir.checkpoint_dir import attempt_dirs, has_manifest, read_manifest
from recckpt.output_dir.forget_requests import audit, forgotten_among, meant_in, pending, tables_of
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, TABLE, unlisted_batches
from recckpt.storage import Storage, open_parent, open_storage
from recckpt.storage.local_files import mapped
from recckpt.text import instead_of

_THREADS = 8
_KINDS = "a text file with one id per line, an .npy file of integers, or a .parquet file with a column id"

Ids = npt.NDArray[np.int64]


@dataclass
class Holding:
    """The ids of a search that one directory has in one table."""

    directory: str
    ckpt_id: str | None  # None without a manifest: a leftover, a near save, a copy of a part
    table: str
    n_rows: int = 0
    n_deletes: int = 0
    ids: list[Ids] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Absence:
    url: str  # where the search looked
    holding: tuple[Holding, ...]  # directories that have ids; empty if the ids are absent
    unread: dict[str, str]  # part that could not be read -> why
    pending: dict[str, int]  # table -> number of the ids in unfinished requests to forget
    n_parts: int  # number of files read
    n_asked: int  # number of the ids that the audit lists as requested to be forgotten


def look_for(path: str, ids: Ids, table: str | None = None) -> Absence:
    """Find which ids are still stored in a checkpoint and its chain, or anywhere in a directory.

    Args:
        path: a checkpoint, an output dir, a mirror, or a near dir of this host; any fsspec URL.
        ids: int64.
        table: search only this table, also in its counts of ids without a row; None for all tables.

    Raises:
        CheckpointNotFoundError: the directory has no file that could contain ids.
        ValueError: no storage takes the path, or no checkpoint there has such a table.
    """
    sought, unread = distinct(ids), dict[str, str]()
    storage, directories = _directories(path, unread)
    parts = [part for each in directories for part in _parts(storage, each, unread)]
    manifests = {each: _manifest(storage, each) for each in {*directories, *(directory for directory, _ in parts)}}
    if not parts and not unread and not any(manifests.values()) and layout.OWN_DIR not in storage.list_dirs():
        raise CheckpointNotFoundError(f"{storage.url}: found no checkpoint")  # absence would prove nothing
    if table is not None:
        _check_table(storage, table, manifests.values())
    of = {each: None if table is None else meant_in(record, table) for each, record in manifests.items()}
    looks = run_all(lambda part: _look(storage, *part, sought, of[part[0]]), parts, storage.threads(_THREADS))
    holdings: dict[tuple[str, str], Holding] = {}
    for (directory, name), look in zip(parts, looks, strict=True):
        if isinstance(look, str):
            unread[layout.join(directory, name)] = look
            continue
        record = manifests[directory]
        for of_table, there in look.items():
            new = Holding(directory, record.ckpt_id if record else None, of_table)
            own = holdings.setdefault((directory, of_table), new)
            own.ids.append(there)
            if layout.holds_deletes(name):
                own.n_deletes += len(there)
            else:
                own.n_rows += len(there)
    requests = [r for r in pending(storage) if table is None or not {*tables_of(table)}.isdisjoint(tables_of(r.table))]
    waiting = {request.table: int(is_among(request.ids, sought).sum()) for request in requests}
    in_order = tuple(holdings[key] for key in sorted(holdings))
    return Absence(storage.url, in_order, unread, waiting, len(parts), len(forgotten_among(storage, table, sought)))


def _directories(path: str, unread: dict[str, str]) -> tuple[Storage, Sequence[str]]:
    """Return the directories to search ("" for files outside of them); add missing parts of a chain to ``unread``."""
    inside, (parent, directory) = open_storage(path), open_parent(path)
    if not has_manifest(parent, directory):
        directories = attempt_dirs(inside)
        if directories or layout.OWN_DIR in inside.list_dirs():
            return inside, [*directories, ""]
        if not inside.why_empty() and counted_back(parent, directory) is None:
            raise CheckpointNotFoundError(f"{inside.url}: found no checkpoint")
    checkpoints = find_checkpoints(path)  # raises CheckpointNotFoundError for a directory that recckpt did not make
    record = _manifest(checkpoints.storage, checkpoints.directories[0])
    if record is None or (record.kind == "delta" and len(checkpoints.directories) == 1):
        where = layout.join(checkpoints.directories[0], layout.MANIFEST)
        unread[where] = "that its manifest or one of its bases is damaged or missing"
    return checkpoints.storage, checkpoints.directories


def _manifest(storage: Storage, directory: str) -> Manifest | None:
    try:
        return read_manifest(storage, directory) if directory else None
    except (CorruptCheckpointError, FormatVersionError, OSError):
        return None


def _parts(storage: Storage, top: str, unread: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (directory, name in it) of each part below ``top``; a directory is a checkpoint, near save or copy.

    Missing parts that a manifest lists are included, so that the attempt to read them reports the loss.
    """
    record = _manifest(storage, top)
    names = {file.name for file in record.files} if record else set()
    try:
        there = storage.list_files(top)
    except OSError as error:
        unread[top or "."] = f"{type(error).__name__}: {error}"
    else:
        names.update(name for name in there if top or "/" not in name)
    for name in sorted(names):
        if layout.may_have_rows(name) or name.rpartition("/")[2] == layout.SPARSE_DIR:  # a symbolic link
            below, _, file = f"/{name}".rpartition(f"/{layout.SPARSE_DIR}/")
            yield (layout.join(top, below[1:]), f"{layout.SPARSE_DIR}/{file}") if below else (top, name)


def _check_table(storage: Storage, table: str, manifests: Iterable[Manifest | None]) -> None:
    """Raise ValueError for an unknown table, because a search that finds nothing in it would prove nothing."""
    records = [record for record in manifests if record is not None]
    names = {entry.name for record in records for entry in record.tables}
    names |= {request.table for request in pending(storage)}
    names |= {line["table"] for line in audit(storage) if isinstance(line.get("table"), str)}
    if records and names.isdisjoint(tables_of(table)):
        raise ValueError(f"{storage.url}: found no table {table!r} in any checkpoint{instead_of(table, sorted(names))}")


def _look(
    storage: Storage, directory: str, name: str, sought: Ids, tables: Sequence[str] | None
) -> Mapping[str, Ids] | str:
    """Return table -> ids found in a part, or the reason why the part cannot be read."""
    ids_by_table: dict[str, list[Ids]] = {}
    try:
        for names, columns in unlisted_batches(mapped(storage, layout.join(directory, name))):
            numbers, ids = np.frombuffer(columns[TABLE], np.uint16), np.frombuffer(columns[ID], np.int64)
            if (np.diff(bucket_of(ids).astype(np.int64)) < 0).any():  # compressed bytes, or bytes of another writer
                raise ValueError("rows that are not in bucket order")
            is_sought = is_among(ids, sought)
            for number in np.unique(numbers[is_sought]):
                if tables is None or names[number] in tables:
                    ids_by_table.setdefault(names[number], []).append(ids[is_sought & (numbers == number)])
    except (pa.ArrowException, OSError, ValueError, LookupError, EOFError) as error:
        return f"{type(error).__name__}: {error}"
    return {of_table: np.concatenate(there) for of_table, there in ids_by_table.items()}


def read_ids(path: str) -> npt.NDArray[np.int64]:
    """Return the ids in a file, in file order; ValueError if the file has no ids, or ids that are not int64."""
    file = Path(path)
    read = {".npy": _of_npy, ".parquet": _of_parquet}.get(file.suffix.lower(), _of_text)
    ids = read(file)
    if not len(ids):
        raise ValueError(f"{path}: found no ids, expected {_KINDS}")
    return ids


def _of_text(file: Path) -> npt.NDArray[np.int64]:
    try:
        with file.open(encoding="utf-8") as lines:
            return np.fromiter(_numbers(file, lines), np.int64)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: found no text ({error}), expected {_KINDS}") from error


def _numbers(file: Path, lines: Iterator[str]) -> Iterator[int]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        id_ = int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
        if id_ is None or not -(2**63) <= id_ < 2**63:
            raise ValueError(f"{file}, line {number}: found {text[:40]!r}, expected an int64; {_KINDS}")
        yield id_


def _of_npy(file: Path) -> npt.NDArray[np.int64]:
    try:
        values = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: found no array of numbers ({error}), expected {_KINDS}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else "several arrays"
        raise ValueError(f"{file}: found {found}, expected integers of one dimension")
    return _as_int64(file, values)


def _of_parquet(file: Path) -> npt.NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            name = "id" if "id" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise ValueError(f"{file}: found the columns {names}, expected one, or one with the name id")
            column = source.read([name]).column(name)
    except pa.ArrowException as error:
        raise ValueError(f"{file}: found no Parquet file ({error}), expected {_KINDS}") from error
    if not pa.types.is_integer(column.type) or column.null_count:
        found = f"{column.null_count} nulls" if column.null_count else str(column.type)
        raise ValueError(f"{file}, column {name!r}: found {found}, expected integers")
    return _as_int64(file, column.to_numpy())


def _as_int64(file: Path, values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    if values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
        raise ValueError(f"{file}: found an id beyond int64")
    return values.astype(np.int64)
