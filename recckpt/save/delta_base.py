"""The base of a saver: the checkpoint from which it counts what changes, to write deltas (docs/format.md, 12.5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.format.reduced import Reduced
from recckpt.format.tables import LiveLayout
from recckpt.near.payload import Payload
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.policies.deltas import MAX_DELTAS, Chain, Deltas, as_deltas
from recckpt.sparse.table.store import StoredTable, is_stored
from recckpt.sparse.table.tracker import Freezing, Tracker
from recckpt.storage import Storage
from recckpt.types import SavableTable, SlotSpec

log = logging.getLogger("recckpt")

_ANY = 1e18  # times the bytes of a full checkpoint


@dataclass(frozen=True)
class Origin:
    """A committed checkpoint as deltas know it, whichever form of it they read."""

    save_id: str  # its name
    place: tuple[int, int]  # where it stands in the order of commits
    slots: Mapping[str, tuple[SlotSpec, ...]]  # those of its tables
    reduced: Mapping[str, Reduced]  # what was left out of those that were not saved as they were
    live: Mapping[str, LiveLayout]  # how those lay that were live
    is_candidate: bool = False  # whether it was restored, and is yet to be confirmed


class Changes:
    """What changes in the tables of a saver, and since which checkpoint. Each rank has one; not thread-safe.

    An acknowledged commit makes a base. A restore makes a candidate, which the next save confirms on rank 0, or drops:
    where another writer has gone on from it, it may be removed at any time.

    Args:
        policy: when a save is full all the same.

    Attributes:
        tracker: the marks of the tables.
        base: from which they count; None where the next save is full.
    """

    def __init__(self, policy: Deltas) -> None:
        self.policy, self.tracker = policy, Tracker()
        self.base: Origin | None = None

    @property
    def has_candidate(self) -> bool:
        """Whether the base is yet to be confirmed."""
        return self.base is not None and self.base.is_candidate

    def on_whole_restore(self, checkpoint: Checkpoint, tables: Iterable[SavableTable]) -> None:
        """Count changes from a checkpoint of the own output dir, whose rows are exactly those of these tables.

        Not if the checkpoint lacks the slots that say which rows are saved: rows could differ without being touched.
        A near save stands for the checkpoint below it, and what it holds has changed since.
        """
        is_near = checkpoint.near_dir is not None
        restored = _origin((checkpoint.below[0] if is_near else checkpoint).manifest)
        if any(reduced.forgets_why for reduced in restored.reduced.values()):
            return
        if self.base is None or self.base.save_id != restored.save_id:
            self.base = replace(restored, is_candidate=True)
        stored = [table for table in tables if is_stored(table)]
        if is_near:
            self._resume(checkpoint, restored, stored)
            return
        for table in stored:
            self.tracker.begin(table, restored.save_id)

    def _resume(self, save: Checkpoint, restored: Origin, tables: Sequence[StoredTable]) -> None:
        """Mark in tables what a near save holds of them (rule *payload_is_marks*)."""
        slices = {table.name: getattr(table, "slice", None) for table in tables}
        payload = Payload(save, set(slices.values()))
        try:
            for table in tables:
                if payload.is_whole(table.name):
                    self.tracker.forget(table)
                    continue
                deleted, own = payload.deleted(table.name), slices[table.name]
                deleted = deleted if own is None else deleted[own.owns(deleted)]
                self.tracker.resume(table, restored.save_id, payload.changed(table.name), deleted)
        except (RecckptError, OSError) as error:  # all is restored by now
            log.warning("the next save is full: %s cannot be read once more: %s", save.manifest.save_id, error)
            self.base = None

    def is_base_gone(self, storage: Storage, fence: Fence) -> bool:
        """Say whether somebody has removed what a delta would stand on, where asking costs no request."""
        if self.base is None or self.base.is_candidate or not storage.asking_is_free:
            return False
        return any(not _is_there(storage, link) for link in chain_of(fence.listing, self.base.save_id))

    def confirm(self, storage: Storage, fence: Fence, *, is_resumed: bool) -> None:
        """Take the output dir over, or check that it is held, and drop a base that no delta can stand on.

        That is one that is gone, and a candidate that others may remove or a power cut lose.

        Raises:
            WriterFencedError, OSError: as :meth:`Fence.hold`; or the storage failed.
        """
        fence.hold(is_resumed=is_resumed)
        base = self.base
        if base is None:
            return
        links = chain_of(fence.listing, base.save_id)
        if not base.is_candidate:
            if not links:
                log.warning("%s: this save is full: what it was to stand on was removed by somebody else", storage.url)
                self.base = None
            return
        if base.place != fence.newest_at_takeover or not links:
            log.info("%s: the next save is full, since what was restored is not the newest there", storage.url)
            self.base = None
            return
        for link in links:
            _sync(storage, link)
        storage.sync_dir("")
        self.base = replace(base, is_candidate=False)

    def committed(self, record: Manifest) -> None:
        """Count from a checkpoint of this saver, which is acknowledged and not ephemeral."""
        self.base = _origin(record)

    @property
    def marks(self) -> Freezing:
        """The marks that a save takes."""
        return self.tracker

    @property
    def peeked(self) -> PeekedChanges:
        """The same for a near save, whatever becomes of it."""
        return PeekedChanges(self)

    def drop_base(self) -> None:
        """Let the next save be full."""
        self.base = None

    def chain(self, fence: Fence) -> Chain | None:
        """Return what the policy has to know of what a delta would stand on, as the owner has last seen it."""
        links = chain_of(fence.listing, self.base.save_id) if self.base else ()
        if not links:
            return None
        *deltas, full = [link.manifest.n_bytes for link in links]
        return Chain(len(deltas), sum(deltas), full)


class PeekedChanges(Changes):
    """What changes, for a near save: marks and base are read, and stay (rule *keeps_marks*).

    However long the chain is, a near save is none of its links; only where much has changed it is not worth its bytes.
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__(Deltas(full_every=MAX_DELTAS, max_chain_bytes=_ANY, max_dirty=changes.policy.max_dirty))
        self.base = None if changes.base is None else replace(changes.base, is_candidate=False)
        self._tracker = changes.tracker

    @property
    def marks(self) -> Freezing:
        """The marks, to read."""
        return self._tracker.peeking

    def is_base_gone(self, storage: Storage, fence: Fence) -> bool:
        """Say no: rank 0 has looked before."""
        return False


def changes_of(deltas: bool | Deltas) -> Changes | None:
    """Return what a saver counts with, None where all its saves are full; ValueError where it is neither."""
    policy = as_deltas(deltas)
    return Changes(policy) if policy else None


def _origin(record: Manifest) -> Origin:
    slots = {table.name: table.slots for table in record.tables}
    reduced = {table.name: table.reduced for table in record.tables if table.reduced is not None}
    live = {table.name: table.live for table in record.tables if table.live is not None}
    return Origin(record.origin, record.place, slots, reduced, live)


def _is_there(storage: Storage, link: Checkpoint) -> bool:
    try:
        storage.size(layout.join(link.directory, layout.MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _sync(storage: Storage, link: Checkpoint) -> None:
    for subdirectory in layout.subdirectories(file.name for file in link.manifest.files):
        storage.sync_dir(layout.join(link.directory, subdirectory))
