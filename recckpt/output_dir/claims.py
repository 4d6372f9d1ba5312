"""Who may write to an output dir, read from the claims that its writers left there, and what follows for readers.

Follows "Readers" of the commit protocol (docs/format.md, section 8).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.json_fields import Fields, check_seal, parse, seal
from recckpt.format.manifest import Manifest
from recckpt.format.near_list import NearList
from recckpt.storage import NotPlainError, Storage, missing
from recckpt.storage.read_again import read_twice

FORMAT = "recckpt-owner"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 64 << 20  # part of the format
_SEAL = "owner_xxh3"  # part of the format


@dataclass(frozen=True)
class MirrorOf:
    """The run that an output dir is a mirror of, or was until a run went on with it there."""

    url: str  # where the run was, as its mirror reached it
    run: str  # nonce of the first claim there, by which the run is known again; "" of one without claims
    epoch: int  # the highest there when the claim was made


@dataclass(frozen=True)
class Claim:
    """A writer's claim on an output dir; the one of the highest epoch owns it."""

    epoch: int  # number of the claim
    nonce: str  # 32 hex digits that no other claim has
    host: str  # where the writer runs
    pid: int  # its process
    time: str  # when it made the claim, UTC; for people only
    purpose: str = ""  # the command that made it; "" of one that trains
    mirror_of: MirrorOf | None = None  # of a claim that a mirror made
    continues: MirrorOf | None = None  # of one by which a mirror became a run of its own, and of those after it


@dataclass(frozen=True)
class Takeover:
    """What was there when a writer took over."""

    epoch: int  # of the writer
    save_ids: frozenset[str]  # what was committed; a manifest of an older epoch counts only if it is here
    highest_step: int  # of the directories ``ckpt_<step>`` at this takeover and all before; -1 for none
    directories: frozenset[str]  # the names of all others
    near: NearList | None = None  # which near saves count; None where those of this epoch alone would

    @property
    def near_list(self) -> NearList:
        """Which near saves count: where the list says nothing of them, those of its own epoch and later ones."""
        return self.near or NearList(self.epoch)

    def excludes(self, record: Manifest) -> str | None:
        """Say why a manifest does not count; None where it does."""
        if record.epoch >= self.epoch or record.save_id in self.save_ids:
            return None
        return (
            f"committed by the writer of epoch {record.epoch} after that of epoch {self.epoch} had taken over; "
            "it is ignored"
        )

    def has_seen(self, directory: str) -> bool:
        """Say by its name whether a directory is of an earlier writer: this one and later ones never make it."""
        step, epoch = layout.parse_step(directory), layout.parse_step_epoch(directory)
        if step is None:
            return directory in self.directories
        return step <= self.highest_step and (epoch is None or epoch < self.epoch)


NO_TAKEOVER = Takeover(0, frozenset(), -1, frozenset())  # no owners, or a copied checkpoint: all count


def claimed_epochs(storage: Storage) -> list[int]:
    """Return the epochs of all claims and lists, ascending; a list excludes commits even when its claim is gone."""
    epochs = map(layout.parse_owner_file, storage.list_files(layout.OWNER_DIR))
    return sorted({epoch for epoch in epochs if epoch is not None})


def has_claims(storage: Storage) -> bool:
    """Say whether a writer claims the output dir; the list of a takeover may outlive its claim, and does not count."""
    return any(map(layout.is_claim, storage.list_files(layout.OWNER_DIR)))


def last_takeover(storage: Storage) -> Takeover:
    """Return the newest takeover that was published; errors as of ``read_claim``."""
    for epoch in reversed(claimed_epochs(storage)):
        with suppress(FileNotFoundError):  # a claim without a list
            fields = _read(storage, layout.takeover(epoch), epoch)
            return Takeover(
                epoch,
                frozenset(fields.texts("committed")),
                fields.count("highest_step", low=-1),
                frozenset(fields.texts("directories")),
                _near_list(fields, epoch),
            )
    return NO_TAKEOVER


def read_claim(storage: Storage, epoch: int) -> Claim:
    """Return the claim of an epoch.

    Raises FileNotFoundError where there is none, CorruptCheckpointError where it is damaged, FormatVersionError where a
    newer format wrote it.
    """
    fields = _read(storage, layout.claim(epoch), epoch)
    purpose = fields.text("purpose") if fields.has("purpose") else ""
    mirror_of, continues = (_mirror_of(fields, key) for key in ("mirror_of", "continues"))
    who = fields.text("nonce"), fields.text("host"), fields.count("pid"), fields.text("time")
    return Claim(epoch, *who, purpose, mirror_of, continues)


def _mirror_of(fields: Fields, key: str) -> MirrorOf | None:
    if not fields.has(key):
        return None
    inside = fields.mapping(key)
    return MirrorOf(inside.text("url"), inside.text("run"), inside.count("epoch"))


@lru_cache(maxsize=64)
def encode_claim(claim: Claim) -> bytes:
    """Return the bytes of a claim's file."""
    own: dict[str, object] = {"nonce": claim.nonce, "host": claim.host, "pid": claim.pid, "time": claim.time}
    own |= {"purpose": claim.purpose} if claim.purpose else {}
    mirrors = {"mirror_of": claim.mirror_of, "continues": claim.continues}
    own |= {key: asdict(mirror) for key, mirror in mirrors.items() if mirror is not None}
    return seal({**_head(claim.epoch), **own}, _SEAL)


def encode_takeover(claim: Claim, takeover: Takeover) -> bytes:
    """Return the bytes of the list that a writer publishes when it takes over."""
    own = {
        "nonce": claim.nonce,
        "committed": sorted(takeover.save_ids),
        "highest_step": takeover.highest_step,
        "directories": sorted(takeover.directories),
    }
    if takeover.near is not None:
        own["near"] = sorted(takeover.near.names)
        own |= {"near_epoch": takeover.near.epoch} if takeover.near.epoch != takeover.epoch else {}
    return seal({**_head(claim.epoch), **own}, _SEAL)


def _near_list(fields: Fields, epoch: int) -> NearList | None:
    if not fields.has("near"):
        return None
    return NearList(fields.count("near_epoch") if fields.has("near_epoch") else epoch, frozenset(fields.texts("near")))


def _head(epoch: int) -> dict[str, str | int]:
    return {"format": FORMAT, "version": VERSION, "epoch": epoch}


def _read(storage: Storage, name: str, epoch: int) -> Fields:
    return read_twice(storage, name, partial(_read_once, storage, name, epoch))


def _read_once(storage: Storage, name: str, epoch: int) -> Fields:
    try:
        data = storage.read(name, MAX_BYTES + 1)
    except NotPlainError as error:
        raise missing(name, error, "a file of one that writes here") from error
    if len(data) > MAX_BYTES:
        raise CorruptCheckpointError(name, "its size", found=f"over {MAX_BYTES} bytes", expected="less")
    fields = parse(data, name)
    fields.check_format(FORMAT, VERSION)
    check_seal(data, _SEAL, name)
    if fields.count("epoch") != epoch:
        raise fields.wrong("epoch", str(fields.count("epoch")), str(epoch))
    return fields
