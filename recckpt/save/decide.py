"""What a save is, decided once for all ranks from what each of them proposes; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NoReturn

from recckpt.dense.sharded import Summary, is_whole
from recckpt.errors import RecckptError
from recckpt.save.check import Owned
from recckpt.save.choice import Choice
from recckpt.save.full_or_delta import FULL, DeltaProposal, Kind, agreed_kind, spared_bytes
from recckpt.save.owners import why_missing, why_shared
from recckpt.save.room import Room, shortage
from recckpt.save.save_info import SaveInfo


class Phase(IntEnum):
    """What a rank does before it proposes, in this order. Where ranks fail in several, the first counts."""

    SETTLE = 1  # waits for the save before
    CHECK = 2  # checks its model
    AGREE = 3  # compares what all propose, on rank 0
    CONFIRM = 4  # confirms what a delta would stand on, on rank 0
    ROOM = 5  # asks for the room that is left
    STAGE = 6  # takes the state

    @property
    def is_of_all(self) -> bool:
        """Whether its errors of recckpt are those of all ranks, which raise them as they are."""
        return self in (Phase.SETTLE, Phase.AGREE, Phase.CONFIRM)


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on a rank before it could propose: an error of recckpt for all ranks, of others the text."""

    phase: Phase
    reason: Exception | str


@dataclass(frozen=True)
class Proposal:
    """What a rank has to save, or why it cannot."""

    ckpt_id: str
    step: int | None
    choice: Choice
    writes_deltas: bool
    failure: RankFailure | None = None
    owned: Owned = field(default_factory=dict)
    unmatched: frozenset[str] = frozenset()  # messages: its options that match no table that it has
    n_bytes: int = 0  # about what it writes in a full save
    room: Room | None = None
    delta: DeltaProposal | None = None
    sharded: Summary | None = None  # of its pieces of sharded tensors
    digest: int = 0  # of what rank 0 saves for all
    own_extra: tuple[str, ...] = ()  # names of registered objects of which each rank saves its own state
    io_state: tuple[str, ...] = ()  # names of positions in the data


@dataclass(frozen=True)
class Refusal:
    """Why there is no save: what failed first, on which rank."""

    rank: int
    phase: Phase
    reason: Exception | str

    def raise_on(self, rank: int, own: Exception | None, info: SaveInfo) -> NoReturn:
        """Raise it on a rank, as the error of this save; ``own`` is what failed there in the same phase, if anything.

        Raises:
            Exception: what failed on this rank itself, or, where it is an error of all, on the first that failed.
            SaveFailedError: that was an OSError, or another rank failed.
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


@dataclass(frozen=True)
class SavePlan:
    """What all ranks do next; what is in it does not grow with their number."""

    kind: Kind = FULL
    displaced: str | None = None  # why a full save was due, in place of which there is room for a delta only
    is_whole: bool = True  # whether the pieces of sharded tensors are known to be whole; else shares are compared
    has_differences: bool = False  # whether ranks differ in what rank 0 saves for all, which digests then name
    own_extra: tuple[str, ...] = ()  # names of what any rank has
    io_state: tuple[str, ...] = ()
    refusal: Refusal | None = None

    @property
    def is_unsettled(self) -> bool:
        """Whether there is no save because the one before has failed."""
        return self.refusal is not None and self.refusal.phase is Phase.SETTLE


def decide(proposals: Sequence[Proposal]) -> SavePlan:
    """Return what a save is, or why there is none."""
    refusal = _refusal(proposals)
    if refusal is not None:
        return SavePlan(refusal=refusal)
    rooms = [each.room for each in proposals if each.room is not None]
    kind, displaced = agreed_kind([each.delta for each in proposals]), None
    if kind.stand_in is not None and shortage(rooms, [each.n_bytes for each in proposals]) is not None:
        kind, displaced = kind.stand_in, kind.why_full
    if proposals[0].writes_deltas:
        needs = [each.n_bytes - spared_bytes(kind, each.delta) for each in proposals]
        refusal = _no_room(rooms, needs)
    return SavePlan(
        kind,
        displaced,
        is_whole([each.sharded for each in proposals if each.sharded is not None]),
        len({each.digest for each in proposals}) > 1,
        _once(each.own_extra for each in proposals),
        _once(each.io_state for each in proposals),
        refusal,
    )


def as_text(error: Exception) -> str:
    """Return an error as text for the other ranks."""
    return f"{type(error).__name__}: {error}"


def _refusal(proposals: Sequence[Proposal]) -> Refusal | None:
    """Return what fails first, in the order of phases; without deltas, that there is no room too."""
    return (
        _failed_in(Phase.SETTLE, proposals)
        or _failed_in(Phase.CHECK, proposals)
        or _difference(proposals)
        or _failed_in(Phase.CONFIRM, proposals)
        or _failed_in(Phase.ROOM, proposals)
        or _no_room_in_full(proposals)
        or _failed_in(Phase.STAGE, proposals)
    )


def _failed_in(phase: Phase, proposals: Sequence[Proposal]) -> Refusal | None:
    for rank, each in enumerate(proposals):
        if each.failure is not None and each.failure.phase is phase:
            return Refusal(rank, phase, each.failure.reason)
    return None


def _difference(proposals: Sequence[Proposal]) -> Refusal | None:
    """Refuse ranks that are not at the same save, or own the same ids."""
    first = proposals[0]
    for rank, each in enumerate(proposals):
        if (each.ckpt_id, each.step) != (first.ckpt_id, first.step):
            cause = f"it saves {each.ckpt_id!r} of step {each.step}, rank 0 {first.ckpt_id!r} of step {first.step}"
            return Refusal(rank, Phase.AGREE, f"{cause}: all ranks save the same")
        if each.choice != first.choice:
            cause = "its save_slots, save_where or store is not that of rank 0"
            return Refusal(rank, Phase.AGREE, f"{cause}: give all ranks the same")
    unmatched = frozenset.intersection(*(each.unmatched for each in proposals))
    if unmatched:
        return Refusal(0, Phase.AGREE, ValueError("; ".join(sorted(unmatched))))
    owned = [each.owned for each in proposals]
    problem = (why_shared(owned) if len(proposals) > 1 else None) or why_missing(owned)
    return None if problem is None else Refusal(0, Phase.AGREE, ValueError(problem))


def _no_room_in_full(proposals: Sequence[Proposal]) -> Refusal | None:
    """Refuse a save that does not fit; where there are deltas, only staging shows how much room it needs."""
    if proposals[0].writes_deltas:
        return None
    rooms = [each.room for each in proposals if each.room is not None]
    return _no_room(rooms, [each.n_bytes for each in proposals])


def _no_room(rooms: Sequence[Room], needs: Sequence[int]) -> Refusal | None:
    lacking = shortage(rooms, needs)
    return None if lacking is None else Refusal(lacking[0], Phase.ROOM, lacking[1])


def _is_of_storage(error: Exception) -> bool:
    """Say whether an error is one of the storage, such as a full one."""
    return isinstance(error, OSError) and not isinstance(error, RecckptError)


def _once(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))
