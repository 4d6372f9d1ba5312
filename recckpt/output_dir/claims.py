"""Claims of writers on an output dir: which writer owns it, and what that means for readers.

Follows "Readers" of the commit protocol (docs/format.md, section 8).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.codec import Count, Document, FileKind, HighestCount, JsonRecord, plain
from recckpt.format.manifest import Manifest
from recckpt.format.near_seal import NearList
from recckpt.storage import NotPlainError, Storage, missing
from recckpt.storage.retry import read_twice

KIND = FileKind("recckpt-owner", 1, "owner_xxh3", 64 << 20)  # part of the format
_TRIES = 3  # attempts if a list is removed before it is read because a newer list was published


class Claim(JsonRecord, frozen=True):
    """A writer's claim on an output dir; the claim with the highest epoch owns it."""

    epoch: Count
    nonce: str  # 32 hex digits, unique
    host: str
    pid: Count
    time: str  # time of the claim, UTC; for people only
    purpose: str = ""  # the command that writes; "" for training


@dataclass(frozen=True)
class Takeover:
    epoch: int  # epoch of the writer
    save_ids: frozenset[str]  # committed saves: manifests of older epochs are valid only if listed here
    highest_step: int  # highest step of a directory ``ckpt_<step>`` at this takeover or before; -1 for none
    directories: frozenset[str]  # all other directories
    run: str  # nonce of the first claim, the id of the run
    near: NearList  # the valid near saves

    def excludes(self, record: Manifest) -> str | None:
        if record.epoch >= self.epoch or record.save_id in self.save_ids:
            return None
        return (
            f"committed by the writer of epoch {record.epoch} after the writer of epoch {self.epoch} had taken over; "
            "it is ignored"
        )

    def has_seen(self, directory: str) -> bool:
        """Return, by its name, whether a directory may belong to an earlier writer: later ones never use the name."""
        step, epoch = layout.parse_step(directory), layout.parse_step_epoch(directory)
        if step is None:
            return directory in self.directories
        return step <= self.highest_step and (epoch is None or epoch < self.epoch)


NO_TAKEOVER = Takeover(0, frozenset(), -1, frozenset(), "", NearList())  # no owners, or a copied checkpoint: all valid


class _List(JsonRecord, frozen=True):
    committed: frozenset[str]
    highest_step: HighestCount
    directories: frozenset[str]
    run: str
    near_by: str = ""
    near: frozenset[str] | None = None


def claimed_epochs(storage: Storage) -> list[int]:
    """Return the epochs of all claims and lists, ascending. A list excludes commits even if its claim is gone."""
    epochs = map(layout.parse_owner_file, storage.list_files(layout.OWNER_DIR))
    return sorted({epoch for epoch in epochs if epoch is not None})


def last_takeover(storage: Storage) -> Takeover:
    """Return the newest published takeover; same errors as ``read_claim``.

    A takeover that vanishes before it is read has a successor, so the listing is repeated. Treating the takeover as
    missing would make late commits valid.
    """
    for is_last in (*[False] * (_TRIES - 1), True):
        names = storage.list_files(layout.OWNER_DIR)
        # If the last writer has another format, its list may not be published yet. Its claim only identifies it.
        epochs = filter(None, map(layout.parse_owner_file, filter(layout.is_claim, names)))
        with suppress(OSError, CorruptCheckpointError):
            if last_epoch := max(epochs, default=0):
                read_claim(storage, last_epoch)
        epoch = max(filter(None, map(layout.parse_owner_file, filter(layout.is_takeover, names))), default=0)
        if not epoch:
            break
        try:
            return read_takeover(storage, epoch)
        except FileNotFoundError as error:
            if is_last:
                raise missing(layout.takeover(epoch), error, "the list that is shown there") from error
    return NO_TAKEOVER


def read_takeover(storage: Storage, epoch: int) -> Takeover:
    """Return the takeover of an epoch; same errors as ``read_claim``."""
    fields = _read(storage, layout.takeover(epoch), epoch).read(_List)
    near = NearList(fields.near_by, fields.near or frozenset(), fields.near is None)
    return Takeover(epoch, fields.committed, fields.highest_step, fields.directories, fields.run, near)


def read_claim(storage: Storage, epoch: int) -> Claim:
    """Return the claim of an epoch.

    Raises FileNotFoundError if there is no claim, CorruptCheckpointError if it is damaged, FormatVersionError if a
    newer format wrote it.
    """
    return _read(storage, layout.claim(epoch), epoch).read(Claim)


@lru_cache(maxsize=64)
def encode_claim(claim: Claim) -> bytes:
    return KIND.encode(plain(claim))


def encode_takeover(claim: Claim, takeover: Takeover) -> bytes:
    own = {
        "epoch": claim.epoch,
        "nonce": claim.nonce,
        "run": takeover.run,
        "committed": sorted(takeover.save_ids),
        "highest_step": takeover.highest_step,
        "directories": sorted(takeover.directories),
    }
    own |= {"near_by": takeover.near.by} if takeover.near.by else {}
    return KIND.encode(own if takeover.near.is_void else {**own, "near": sorted(takeover.near.names)})


def _read(storage: Storage, name: str, epoch: int) -> Document:
    def read() -> Document:
        try:
            data = storage.read(name, KIND.max_bytes + 1)
        except NotPlainError as error:
            raise missing(name, error, "the claim or list of a writer") from error
        document = KIND.open(data, name)
        if (found := document.count("epoch")) != epoch:
            raise document.wrong("epoch", found, epoch)
        return document

    return read_twice(storage, name, read)
