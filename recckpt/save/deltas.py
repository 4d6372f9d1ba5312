"""Decides, once for all ranks, whether a save is full or a delta; keeps the base since which changes are counted."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress

import numpy as np
import numpy.typing as npt

from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.format.tables import LiveLayout, Reduced
from recckpt.output_dir.commit import chain_of
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.policies.deltas import MAX_DELTAS, Chain, Deltas, as_deltas
from recckpt.sparse.files.reduced_rows import TableChoice
from recckpt.sparse.files.table_rows import RowsInParts, TableSource
from recckpt.sparse.table.marks import FrozenRows
from recckpt.sparse.table.store import is_stored
from recckpt.sparse.table.tracker import Freeze, Tracker
from recckpt.storage import Storage
from recckpt.types import SavableTable, SlotSpec

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class DeltaBase:
    """A committed checkpoint that can be the base of deltas; it keeps its name even if another one replaces it."""

    save_id: str
    place: tuple[int, int]  # its position in the order of commits
    slots: Mapping[str, tuple[SlotSpec, ...]]  # by table
    reduced: Mapping[str, Reduced]  # by table, if something was left out
    live: Mapping[str, LiveLayout]  # by live table
    is_candidate: bool = False  # whether it was restored, so that the next save must confirm it


class Changes:
    """Counts the changes in the tables of a saver since a checkpoint, the base. One per rank; not thread-safe.

    An acknowledged commit becomes the base. A restored checkpoint becomes a candidate. The next save confirms the
    candidate on rank 0, or drops it, because another writer that continued from it may remove it at any time.

    Attributes:
        freeze: the function by which a save takes tables together with their marks of changed rows.
        base: the checkpoint since which changes are counted; None if the next save is full.
    """

    def __init__(self, policy: Deltas) -> None:
        self.policy, self.tracker = policy, Tracker()
        self.freeze: Freeze = self.tracker.freeze
        self.base: DeltaBase | None = None

    @property
    def has_candidate(self) -> bool:
        return self.base is not None and self.base.is_candidate

    def on_whole_restore(self, checkpoint: Checkpoint, tables: Iterable[SavableTable]) -> None:
        """Count changes since a checkpoint of this output dir; the tables have exactly its rows.

        Do nothing if the checkpoint lacks the slots that decide which rows are saved: then rows that were not touched
        could differ from the checkpoint.
        """
        if self.resume_from(checkpoint.manifest):
            for table in tables:
                if is_stored(table):
                    self.tracker.begin(table, checkpoint.manifest.name)

    def resume_from(self, record: Manifest) -> bool:
        """Make a restored checkpoint the candidate for the base; return False if later changes are not known."""
        restored = _base_of(record)
        if any(reduced.forgets_why for reduced in restored.reduced.values()):
            return False
        if self.base is None or self.base.save_id != restored.save_id:
            self.base = replace(restored, is_candidate=True)
        return True

    def is_in_doubt(self, storage: Storage, fence: Fence) -> bool:
        """Return whether the base must be confirmed: it is a candidate, or was found missing without a request."""
        if self.base is None or self.base.is_candidate or not storage.asking_is_free:
            return self.has_candidate
        return any(not _is_there(storage, link) for link in chain_of(fence.listing, self.base.save_id))

    def confirm(self, storage: Storage, fence: Fence, *, is_resumed: bool) -> None:
        """Take the output dir over, or check that this writer still holds it; then drop the base if it is not usable.

        A base is not usable if it is gone, or if it is a candidate that other writers may remove. The takeover has made
        the other checkpoints durable.

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
                log.warning("%s: this save is full: its base was removed by another process", storage.url)
                self.base = None
            return
        if base.place != fence.newest_at_takeover or not links:
            log.info("%s: the next save is full, because the restored checkpoint is not the newest there", storage.url)
            self.base = None
            return
        self.base = replace(base, is_candidate=False)

    def committed(self, record: Manifest) -> None:
        self.base = _base_of(record)

    def drop_base(self) -> None:
        self.base = None

    def chain(self, fence: Fence) -> Chain | None:
        """Return the chain that a delta would extend, from the owner's last listing."""
        links = chain_of(fence.listing, self.base.save_id) if self.base else ()
        if not links:
            return None
        *deltas, full = [link.manifest.n_bytes for link in links]
        return Chain(len(deltas), sum(deltas), full)

    def due_compaction(self, fence: Fence) -> tuple[Checkpoint, str] | None:
        """Return the base of the next delta and the reason to compact it; None if there is no reason."""
        chain = self.chain(fence)
        reason = self.policy.why_compact(chain) if chain else None
        return (chain_of(fence.listing, self.base.save_id)[0], reason) if self.base and reason else None


def changes_of(deltas: bool | Deltas) -> Changes | None:
    policy = as_deltas(deltas)
    return Changes(policy) if policy else None


def _base_of(record: Manifest) -> DeltaBase:
    slots = {table.name: table.slots for table in record.tables}
    reduced = {table.name: table.reduced for table in record.tables if table.reduced is not None}
    live = {table.name: table.live for table in record.tables if table.live is not None}
    return DeltaBase(record.name, record.place, slots, reduced, live)


def _is_there(storage: Storage, link: Checkpoint) -> bool:
    try:
        storage.size(layout.join(link.directory, layout.MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class TableChanges:
    """The tables of one rank, by columns. Rank 0 receives one such record per rank, and adds them up.

    Attributes:
        n_changed: number of rows and deleted ids in a delta.
        row_bytes: 0 if a filter chooses the rows, because their number is known only when they are written.
        is_replaced: whether a delta would have to contain all rows.
        is_saved_otherwise: whether ``choose=`` differs from the ``choose=`` of the base.
    """

    names: tuple[str, ...]
    n_changed: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    row_bytes: npt.NDArray[np.int64]
    is_replaced: npt.NDArray[np.bool_]
    is_saved_otherwise: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Mapping[str, tuple[int, int, int, bool, bool]]) -> TableChanges:
        columns = np.array(list(rows.values()), np.int64).reshape(-1, 5).T
        return cls(tuple(rows), *columns[:3], *columns[3:].astype(np.bool_))


@dataclass(frozen=True)
class DeltaProposal:
    """The delta that a rank would write. Only rank 0 knows the chain."""

    policy: Deltas
    base: str | None
    chain: Chain | None
    tables: TableChanges


@dataclass(frozen=True)
class Kind:
    base: str | None = None  # save id of the parent of a delta; None for a full save
    replaced: frozenset[str] = frozenset()  # tables that the delta holds whole
    why_full: str | None = None  # why this is not a delta, if deltas are on
    n_links: int = 1  # length of the chain, including this save
    stand_in: Kind | None = None  # the delta to save if there is too little space for a full save

    @property
    def name(self) -> str:
        return "full" if self.base is None else "delta"


FULL = Kind()


def delta_proposal(
    changes: Changes,
    chain: Chain | None,
    tables: Sequence[TableSource],
    frozen: Mapping[str, FrozenRows],
    *,
    choices: Mapping[str, TableChoice],
    layouts: Mapping[str, LiveLayout],
) -> DeltaProposal:
    base = changes.base

    def changes_of(table: TableSource) -> tuple[int, int, int, bool, bool]:
        slots, reduced, is_filtered = table.slots, None, False
        if table.name in choices:
            choice = choices[table.name]
            slots, reduced, is_filtered = choice.slots, choice.reduced, choice.where is not None
        row_bytes = 0 if is_filtered else 8 + sum(slot.row_bytes for slot in slots)
        is_otherwise = base is not None and table.name in base.slots and base.reduced.get(table.name) != reduced
        marks = frozen.get(table.name)  # a table of the user's own class has no marks
        is_replaced = base is None or marks is None or marks.is_replaced(base.save_id)
        is_replaced = is_replaced or marks is None or base is None or base.slots.get(table.name) != slots
        is_replaced = is_replaced or base is None or base.live.get(table.name) != layouts.get(table.name)
        n_changed = table.n_rows if is_replaced or marks is None else marks.n_changed
        if isinstance(table, RowsInParts) and not is_replaced:
            n_changed = table.share_of(n_changed)
        return n_changed, table.n_rows, row_bytes, is_replaced, is_otherwise

    of_tables = TableChanges.of({table.name: changes_of(table) for table in tables})
    return DeltaProposal(changes.policy, base.save_id if base else None, chain, of_tables)


def agreed_kind(proposals: Sequence[DeltaProposal | None]) -> Kind:
    first = proposals[0]
    if first is None:
        return FULL
    others = [rank for rank, each in enumerate(proposals) if each is None or each.base != first.base]
    if others:
        return Kind(why_full=f"rank {others[0]} counts changes since another checkpoint, or does not count them")
    tables = _changes_of_all([each.tables for each in proposals if each is not None])
    for name in compress(tables.names, tables.is_saved_otherwise):
        return Kind(why_full=f"table {name!r} is saved differently: choose= has changed")
    n_changed = int(np.where(tables.is_replaced, tables.n_rows, tables.n_changed).sum())
    why_full = first.policy.why_full(first.chain, n_changed, int(tables.n_rows.sum()))
    if first.chain is None:
        return Kind(why_full=why_full)
    replaced = frozenset(compress(tables.names, tables.is_replaced))
    delta = Kind(first.base, replaced, n_links=first.chain.n_deltas + 2)
    if why_full is None:
        return delta
    return Kind(why_full=why_full, stand_in=delta if first.chain.n_deltas < MAX_DELTAS else None)


def _changes_of_all(ranks: Sequence[TableChanges]) -> TableChanges:
    alike: defaultdict[tuple[str, ...], list[TableChanges]] = defaultdict(list)
    for tables in ranks:
        alike[tables.names].append(tables)
    places = {name: place for place, name in enumerate(dict.fromkeys(chain.from_iterable(alike)))}
    n_changed, n_rows, row_bytes = np.zeros((3, len(places)), np.int64)
    is_replaced, is_saved_otherwise = np.zeros((2, len(places)), np.bool_)
    for names, group in alike.items():
        at = [places[name] for name in names]
        n_changed[at] += sum(tables.n_changed for tables in group)
        n_rows[at] += sum(tables.n_rows for tables in group)
        is_replaced[at] |= np.any([tables.is_replaced for tables in group], axis=0)
        is_saved_otherwise[at] |= np.any([tables.is_saved_otherwise for tables in group], axis=0)
    return TableChanges(tuple(places), n_changed, n_rows, row_bytes, is_replaced, is_saved_otherwise)


def spared_bytes(kind: Kind, proposal: DeltaProposal | None) -> int:
    """Estimate how many bytes a rank does not write because the save is a delta."""
    if kind.base is None or proposal is None:
        return 0
    tables = proposal.tables
    n_spared = (tables.n_rows - tables.n_changed).clip(min=0)
    n_spared[[name in kind.replaced for name in tables.names]] = 0
    return int(n_spared @ tables.row_bytes)
