"""Requests to forget ids in an output dir, and the audit of completed requests (docs/format.md, section 14)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.format import forgetting, layout
from recckpt.format.forgetting import Request
from recckpt.format.manifest import Manifest
from recckpt.format.tables import averages_of
from recckpt.output_dir.notes import NearHost, make_own_dir
from recckpt.storage import ABSENT, NotPlainError, Storage, missing
from recckpt.storage.retry import read_twice
from recckpt.types import EMBEDDING, SlotSpec

_AUDIT_BYTES = 1 << 30
_DIGEST_BYTES = 16
_KEY_BYTES = 32
FORGET_FIRST = "run `recckpt forget DIR` first, which completes the request"
_COUNTS = (SlotSpec(EMBEDDING, "int64", (1,)),)  # part of the format: the slots of a table of counts


# module -> URL of an output dir -> requests that were completed before the module got rows from it.
_rows_read = WeakKeyDictionary[object, dict[str, frozenset[str]]]()


@dataclass(frozen=True)
class Forgotten:
    """The outcome of one request.

    Attributes:
        table: name of the table.
        n_ids: number of ids to forget.
        rewritten: directory of a checkpoint -> directory of the checkpoint without the ids that supersedes it.
        n_rows: id of a checkpoint -> number of the ids that had a row in this checkpoint.
        removed: directories that were removed: replaced and superseded checkpoints, late commits, leftovers.
        is_resumed: whether an earlier process made the request.
        near_hosts: noted hosts whose near saves may contain the ids until these near saves are removed.
        mirrors_left: named mirror that may still contain the ids -> reason; only set for the last request.
    """

    table: str
    n_ids: int
    rewritten: dict[str, str]
    n_rows: dict[str, int]
    removed: tuple[str, ...]
    is_resumed: bool = False
    near_hosts: tuple[NearHost, ...] = ()
    mirrors_left: Mapping[str, str] = field(default_factory=dict)


def tables_of(table: str) -> tuple[str, ...]:
    """Return the names of the table, and of the table that counts the ids waiting for a row in it."""
    return table, f"{table}.candidates"


def meant_in(record: Manifest | None, table: str) -> tuple[str, ...]:
    """Like :func:`tables_of`, and the averages of the table.

    Without the second table if ``record`` has it with other slots than a table of counts.
    """
    if record is None:
        return *tables_of(table), f"{table}.average"
    counts = record.table(f"{table}.candidates")
    own = (table,) if counts is not None and counts.slots != _COUNTS else tables_of(table)
    return *own, *averages_of(table, record.tables)


def put_request(storage: Storage, request: Request) -> None:
    """Make a request durable. From then on, every owner of the output dir must carry out the request."""
    make_own_dir(storage, layout.FORGET_DIR)
    with suppress(FileExistsError):
        storage.put_if_absent(layout.FORGET_KEY, secrets.token_hex(_KEY_BYTES).encode())
    storage.put_if_absent(layout.forget_request(request.request), forgetting.encode_request(request))
    for directory in (layout.OWN_DIR, ""):
        storage.sync_dir(directory)


def requests(storage: Storage) -> dict[str, bool]:
    requests: dict[str, bool] = {}
    for name in storage.list_files(layout.FORGET_DIR):
        parsed = layout.parse_forget_request(name)
        if parsed is not None:
            requests[parsed[0]] = requests.get(parsed[0], True) and parsed[1]  # the request file is removed last
    return requests


def note_read(modules: Iterable[object], storage: Storage, *, is_anew: bool) -> None:
    """Note that a model of these modules is about to get rows from an output dir.

    These rows may have the ids of any request that is not completed yet. ``is_anew``: the rows replace all rows.
    """
    try:
        done = frozenset(name for name, is_done in requests(storage).items() if is_done)
    except OSError:  # the dir can be read but not listed
        done = frozenset()
    for reader in modules:
        by_url = _rows_read.setdefault(reader, {})
        by_url[storage.url] = done if is_anew else done & by_url.get(storage.url, done)


def seen_by(modules: Iterable[object], storage: Storage) -> frozenset[str] | None:
    """Return the requests that were completed before these modules got rows from an output dir; None if none did."""
    seen = [by_url[storage.url] for reader in modules if storage.url in (by_url := _rows_read.get(reader, {}))]
    return frozenset.intersection(*seen) if seen else None


def check_none_pending(storage: Storage, remedy: str) -> frozenset[str]:
    """Return all requests. Raise RecckptError if one is pending: the output would contain ids to be forgotten."""
    known = requests(storage)
    if not all(known.values()):
        raise RecckptError(
            f"{storage.url}: found an unfinished request to forget ids, so checkpoints may still contain them: {remedy}"
        )
    return frozenset(known)


def check_none_since(storage: Storage, known: frozenset[str]) -> None:
    """Raise RecckptError if there is a request not in ``known``, because rows read since then may have its ids."""
    if requests(storage).keys() - known:
        raise RecckptError(
            f"{storage.url}: ids had to be forgotten while checkpoints were read, so the rows read may contain them: "
            "no output was written; run the call again"
        )


def pending(storage: Storage) -> list[Request]:
    """Return the requests that are not completed, oldest first.

    Raises CorruptCheckpointError if one of them is damaged.
    """
    requests = []
    for name in storage.list_files(layout.FORGET_DIR):
        parsed = layout.parse_forget_request(name)
        if parsed is not None and not parsed[1]:
            requests.append(_read(storage, layout.join(layout.FORGET_DIR, name)))
    return sorted((request for request in requests if request is not None), key=lambda r: (r.asked, r.request))


def _read(storage: Storage, path: str) -> Request | None:
    try:
        return read_twice(
            storage, path, lambda: forgetting.decode_request(storage.read(path, forgetting.MAX_BYTES), path)
        )
    except ABSENT:
        return None  # completed meanwhile
    except CorruptCheckpointError as error:
        remedy = "remove this file, and repeat the request: its ids cannot be read"
        found, expected = error.found, error.expected
        raise CorruptCheckpointError(path, error.where, found=found, expected=expected, remedy=remedy) from error
    except NotPlainError as error:
        raise missing(path, error, "a request to forget ids") from error


def close_request(storage: Storage, request: Request, done: Mapping[str, Any]) -> None:
    before = _audit_bytes(storage)
    if not any(line.get("request") == request.request for line in forgetting.decode_audit(before, layout.FORGOTTEN)):
        line_values: dict[str, Any] = {
            "request": request.request,
            "table": request.table,
            "asked": request.asked,
            "by": request.by,
        }
        line_values |= {"version": request.version, **done, "n_ids": len(request.ids)}
        line = {**line_values, "digests": digests(key(storage) or _made_key(storage), request.ids)}
        storage.replace(layout.FORGOTTEN, before + forgetting.encode_line(line, before))
    with suppress(FileExistsError):
        storage.put_if_absent(layout.forget_request(request.request, is_done=True), b"{}\n")
    storage.remove(layout.forget_request(request.request))
    storage.sync_dir(layout.FORGET_DIR)


def remove_drafts(storage: Storage) -> None:
    """Remove drafts of requests that a crash left behind, because drafts contain ids. Only the owner may call this."""
    for name in storage.list_files(layout.FORGET_DIR):
        if layout.is_draft(name):
            storage.remove(layout.join(layout.FORGET_DIR, name))


def audit(storage: Storage) -> list[dict[str, Any]]:
    """Return the lines of the audit, [] if nothing was forgotten; CorruptCheckpointError if it is damaged."""
    return forgetting.decode_audit(_audit_bytes(storage), layout.FORGOTTEN)


def _audit_bytes(storage: Storage) -> bytes:
    try:
        return storage.read(layout.FORGOTTEN, _AUDIT_BYTES)
    except FileNotFoundError:
        return b""


def key(storage: Storage) -> bytes:
    try:
        secret = bytes.fromhex(storage.read(layout.FORGET_KEY, 2 * _KEY_BYTES + 1).decode())
    except (*ABSENT, ValueError):
        return b""
    return secret if len(secret) == _KEY_BYTES else b""


def _made_key(storage: Storage) -> bytes:
    """Make a new key if the old key is missing or damaged: without a key, anyone could test digests for an id."""
    made = secrets.token_bytes(_KEY_BYTES)
    storage.replace(layout.FORGET_KEY, made.hex().encode())
    return made


def digests(with_key: bytes, ids: Iterable[int] | npt.NDArray[np.int64]) -> list[str]:
    """Return one keyed digest per id. They are sorted, so that their order does not reveal the order of the ids."""
    each = (int(one).to_bytes(8, "little", signed=True) for one in ids)
    return sorted(hashlib.blake2b(id_bytes, key=with_key, digest_size=_DIGEST_BYTES).hexdigest() for id_bytes in each)


def forgotten_among(storage: Storage, table: str | None, ids: npt.NDArray[np.int64]) -> set[int]:
    """Return the ids that the audit lists as forgotten in a table; with None, in any table.

    Raises CorruptCheckpointError if the audit is damaged.
    """
    lines = [line for line in audit(storage) if table in (None, line.get("table"))]
    with_key = key(storage) if lines else b""
    known = {digest for line in lines for digest in line.get("digests", ())}
    return {int(id_) for id_ in ids if not known.isdisjoint(digests(with_key, [int(id_)]))} if with_key else set()
