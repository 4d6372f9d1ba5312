"""Decides once, for all ranks, what a save is. Pure."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, NoReturn

from recckpt.dense.sharded import Summary, is_whole
from recckpt.errors import RecckptError
from recckpt.format.buckets import Slice
from recckpt.save.choice import Choice
from recckpt.save.deltas import FULL, DeltaProposal, Kind, agreed_kind, spared_bytes
from recckpt.save.save_info import SaveInfo
from recckpt.storage.transfers import no_work_room
from recckpt.text import size
from recckpt.types import RowShare

Owned = Mapping[Slice | RowShare | None, Sequence[str]]  # the ids that a rank owns -> names of the tables
_LIVE_REMEDY = "start the process group before live_tables is called on each rank, and save with all ranks"
_Range = tuple[float, float, int]  # part of the ids from 0 to 1, and the rank that owns it


class Phase(IntEnum):
    """The phases in which a rank prepares a proposal, in order. If several phases fail, the first one is reported."""

    SETTLE = 1  # waits for the previous save
    CHECK = 2  # checks its model
    AGREE = 3  # compares what all propose, on rank 0
    CONFIRM = 4  # confirms the base of a delta, on rank 0
    ROOM = 5  # measures the free space
    STAGE = 6  # takes the state

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks raise a RecckptError of this phase unchanged."""
        return self in (Phase.SETTLE, Phase.AGREE, Phase.CONFIRM)


@dataclass(frozen=True)
class RankFailure:
    """A failure of one rank before the save begins: a RecckptError that all ranks raise, or otherwise its text."""

    phase: Phase
    reason: Exception | str
    rank: int = 0

    def raise_on(self, rank: int, own: Exception | None, info: SaveInfo) -> NoReturn:
        """Raise this failure on a rank as the error of the save. ``own``: that rank's error in the same phase, if any.

        Raises:
            Exception: the error of this rank, or an error of the first failed rank that all ranks raise.
            SaveFailedError: the error was an OSError, or another rank failed.
        """
        if own is not None and (rank == self.rank or not self.phase.is_of_all):
            if _is_of_storage(own) or (self.phase.is_of_all and not isinstance(own, RecckptError)):
                raise info.failure(rank, as_text(own)) from own
            raise own
        if isinstance(self.reason, str):
            raise info.failure(self.rank, self.reason)
        if _is_of_storage(self.reason):
            raise info.failure(self.rank, as_text(self.reason)) from self.reason
        raise self.reason


def _is_of_storage(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(error, RecckptError)


def as_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class WorkRoom:
    """The free space of a work dir. Ranks whose work dirs are on the same device of the same host share this space."""

    url: str
    device: tuple[str, int] | None
    free_bytes: int | None


@dataclass(frozen=True)
class Room:
    """The free space that a rank sees for a save; None if the storage cannot tell."""

    url: str  # output dir
    free_bytes: int | None
    min_free_bytes: int  # space that must stay free
    work: WorkRoom | None
    ranks: frozenset[int] | None = None  # ranks whose files use this space; None for all
    remedy: str = "make room, or lower max_keep"


@dataclass(frozen=True)
class Proposal:
    ckpt_id: str
    step: int | None
    choice: Choice
    writes_deltas: bool
    failure: RankFailure | None = None
    owned: Owned = field(default_factory=dict)
    unmatched: frozenset[str] = frozenset()  # messages on options that match none of its tables
    n_bytes: int = 0  # estimate for a full save
    room: Room | None = None
    delta: DeltaProposal | None = None
    sharded: Summary | None = None  # summary of its shards of sharded tensors
    digest: int = 0  # digest of the state that rank 0 saves for all
    own_extra: tuple[str, ...] = ()  # registered objects with one saved state per rank
    io_state: tuple[str, ...] = ()  # names of positions in the data


@dataclass(frozen=True)
class SavePlan:
    """The next actions of all ranks. Its size does not grow with the number of ranks."""

    kind: Kind = FULL
    displaced: str | None = None  # why a full save was due, if there is only space for a delta
    is_whole: bool = True  # whether sharded tensors are known to be complete; otherwise shares are compared
    has_differences: bool = False  # whether what rank 0 saves for all differs between ranks; digests say where
    own_extra: tuple[str, ...] = ()  # objects with one state per rank, on any rank
    io_state: tuple[str, ...] = ()
    refusal: RankFailure | None = None


def decide(proposals: Sequence[Proposal]) -> SavePlan:
    rooms, sizes = [each.room for each in proposals if each.room is not None], [each.n_bytes for each in proposals]
    writes_deltas = proposals[0].writes_deltas
    refusal = (
        _failed_in(proposals, Phase.SETTLE, Phase.CHECK)
        or _difference(proposals)
        or _failed_in(proposals, Phase.CONFIRM, Phase.ROOM)
        or (None if writes_deltas else shortage(rooms, sizes))  # the size of a delta is known only after staging
        or _failed_in(proposals, Phase.STAGE)
    )
    if refusal is not None:
        return SavePlan(refusal=refusal)
    kind, displaced = agreed_kind([each.delta for each in proposals]), None
    if kind.stand_in is not None and shortage(rooms, sizes) is not None:
        kind, displaced = kind.stand_in, kind.why_full
    needs = [each.n_bytes - spared_bytes(kind, each.delta) for each in proposals]
    return SavePlan(
        kind,
        displaced,
        is_whole([each.sharded for each in proposals if each.sharded is not None]),
        len({each.digest for each in proposals}) > 1,
        tuple(dict.fromkeys(name for each in proposals for name in each.own_extra)),
        tuple(dict.fromkeys(name for each in proposals for name in each.io_state)),
        shortage(rooms, needs) if writes_deltas else None,
    )


def _failed_in(proposals: Sequence[Proposal], *phases: Phase) -> RankFailure | None:
    failures = [(each.failure, rank) for rank, each in enumerate(proposals) if each.failure is not None]
    of_these = [replace(failure, rank=rank) for failure, rank in failures if failure.phase in phases]
    return min(of_these, key=lambda failure: (failure.phase, failure.rank), default=None)


def _difference(proposals: Sequence[Proposal]) -> RankFailure | None:
    """Return why the ranks are not at the same save, or why ids have no owner or several; None if all is well."""
    first = proposals[0]
    for rank, each in enumerate(proposals):
        if (each.ckpt_id, each.step) != (first.ckpt_id, first.step):
            cause = f"it saves {each.ckpt_id!r} of step {each.step}, rank 0 {first.ckpt_id!r} of step {first.step}"
            return RankFailure(Phase.AGREE, f"{cause}: all ranks must save the same checkpoint", rank)
        if each.choice != first.choice:
            cause = "its choose= differs from that of rank 0"
            return RankFailure(Phase.AGREE, f"{cause}: pass the same choose= on all ranks", rank)
    unmatched = frozenset.intersection(*(each.unmatched for each in proposals))
    if unmatched:
        return RankFailure(Phase.AGREE, ValueError("; ".join(sorted(unmatched))))
    owned = [each.owned for each in proposals]
    problem = (why_shared(owned) if len(proposals) > 1 else None) or why_missing(owned)
    return None if problem is None else RankFailure(Phase.AGREE, ValueError(problem))


def shortage(rooms: Sequence[Room], needs: Sequence[int]) -> RankFailure | None:
    """Return the first rank that sees too little free space; rank i writes ``needs[i]`` bytes."""
    by_device = Counter[Any]()
    for room, n_bytes in zip(rooms, needs, strict=True):
        if room.work is not None:
            by_device[room.work.device] += n_bytes
    for rank, room in enumerate(rooms):
        total = sum(n_bytes for other, n_bytes in enumerate(needs) if room.ranks is None or other in room.ranks)
        if room.free_bytes is not None and room.free_bytes - total < room.min_free_bytes:
            kept = f" and leave {size(room.min_free_bytes)}" if room.min_free_bytes else ""
            problem = f"found {size(room.free_bytes)} free, expected {size(total)} for the save{kept}"
            return RankFailure(Phase.ROOM, OSError(errno.ENOSPC, f"{problem}; {room.remedy}", room.url), rank)
        work = room.work
        if work is not None and work.free_bytes is not None and work.free_bytes < by_device[work.device]:
            return RankFailure(Phase.ROOM, no_work_room(work.url, work.free_bytes, by_device[work.device]), rank)
    return None


def why_shared(owned: Sequence[Owned]) -> str | None:
    """Return a message on tables with ids that several ranks own, and what to do; None if there are no such tables."""
    ranges: dict[Sequence[str], list[_Range]] = {}  # names of tables with the same owners -> ranges
    for rank, of_rank in enumerate(owned):
        for own, names in of_rank.items():
            if own is None or own.begin < own.end:
                part = (own.begin / own.size, own.end / own.size, rank) if own else (0.0, 1.0, rank)
                ranges.setdefault(names, []).append(part)
    groups: dict[str, list[Sequence[str]]] = {}
    for names in ranges:
        for name in names:
            groups.setdefault(name, []).append(names)
    overlaps: dict[tuple[Sequence[str], ...], tuple[int, int] | None] = {}
    problems = []
    for name in sorted(groups):
        group = tuple(groups[name])
        if group not in overlaps:
            parts = sorted(part for names in group for part in ranges[names])  # neighbours, in the order of ids
            pairs = ((one, other) for (_, end, one), (begin, _, other) in pairwise(parts) if begin < end)
            overlaps[group] = next(pairs, None)
        two = overlaps[group]
        if two is not None:
            problems.append(f"table {name!r}: ranks {min(two)} and {max(two)} own the same ids")
    if not problems:
        return None
    if any(isinstance(own, RowShare) for of_rank in owned for own in of_rank):
        return f"{'; '.join(problems)}: {_LIVE_REMEDY}"
    return (
        f"{'; '.join(problems)}: each id must belong to one rank; else it is saved twice and cannot be loaded; "
        "make the table a recckpt.sparse.ShardedHashTable, or give it slice=gen_slice(rank, ranks)"
    )


def why_missing(owned: Sequence[Owned]) -> str | None:
    """Return a message about rows of live tables that no rank saves, and what to do; None if there are no such rows."""
    ranges: dict[tuple[str, int], list[RowShare]] = {}
    for of_rank in owned:
        for own, names in of_rank.items():
            if isinstance(own, RowShare):
                for name in names:
                    ranges.setdefault((name, own.size), []).append(own)
    problems = [
        f"table {name!r}: found {n_saved} rows on {len(owned)} ranks, expected {size}"
        for (name, size), of_table in sorted(ranges.items())
        if (n_saved := sum(own.end - own.begin for own in of_table)) < size
    ]
    if not problems:
        return None
    return f"{'; '.join(problems)}: {_LIVE_REMEDY}"
