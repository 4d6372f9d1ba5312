"""What a rank does before the ranks agree on a save: it settles the one before, checks its model, and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from recckpt.dense.rank_digests import RankDigest
from recckpt.errors import RecckptError
from recckpt.save.check import check
from recckpt.save.decide import Phase, Proposal, RankFailure, SavePlan, as_text
from recckpt.save.full_or_delta import DeltaProposal, delta_proposal
from recckpt.save.job import Destination, Job, Live
from recckpt.save.room import measured_room
from recckpt.save.stage import Staged, stage
from recckpt.types import SavableTable

State = tuple[Mapping[str, SavableTable], Mapping[str, Any]]  # the tables of a model, and its dense state


@dataclass(frozen=True)
class Preparation:
    """What a rank proposes; and what stays there: the state that it has staged, or the error that it had."""

    proposal: Proposal
    staged: Staged | None = None
    error: Exception | None = None

    def raise_refusal(self, plan: SavePlan, job: Job) -> None:
        """Raise why there is no save, if there is none; as :meth:`recckpt.save.decide.Refusal.raise_on`."""
        refusal, failure = plan.refusal, self.proposal.failure
        if refusal is not None:
            own = self.error if failure is not None and failure.phase is refusal.phase else None
            refusal.raise_on(job.ranks.rank, own, job.info)

    def planned(self, plan: SavePlan) -> Staged:
        """Return what is staged, as it is to be written."""
        if self.staged is None:
            raise self.error or AssertionError("a save that nothing was staged for")
        return self.staged.written_as(plan.kind)


class _Errors:
    """Errors of the phases, kept until all ranks have proposed; the first counts."""

    def __init__(self) -> None:
        self.first: tuple[Phase, Exception] | None = None

    @contextmanager
    def kept(self, phase: Phase) -> Iterator[None]:
        """Keep the error of a block."""
        try:
            yield
        except Exception as error:
            self.first = self.first or (phase, error)

    @property
    def failure(self) -> RankFailure | None:
        """What other ranks have to know of the first."""
        if self.first is None:
            return None
        phase, error = self.first
        return RankFailure(phase, error if phase.is_of_all and isinstance(error, RecckptError) else as_text(error))


def propose(
    live: Live, job: Job, to: Destination, settle: Callable[[], object], closed_on_error: ExitStack
) -> Preparation:
    """Prepare a save on this rank, and propose it; what goes wrong is proposed too.

    Collective where live tables are spread over ranks, so that each knows their settings; otherwise not.

    Args:
        live: what is saved.
        job: the save.
        to: where it goes.
        settle: waits for the save before, and raises its error where it was not raised yet.
        closed_on_error: closes what is staged, unless there is a save.

    Raises:
        RecckptError: the save before has failed, and there is nobody to agree with: no other rank, or one that is lost.
    """
    errors, ranks = _Errors(), job.ranks
    with errors.kept(Phase.SETTLE):
        settle()
    if errors.first is not None and (ranks.size == 1 or ranks.has_lost):
        raise errors.first[1]
    digest = to.digests.begin() if ranks.size > 1 else None  # on all ranks: which saves look at what is large
    proposal = Proposal(job.info.ckpt_id, job.info.step, live.choice, writes_deltas=to.changes is not None)
    parts = room = staged = None
    with errors.kept(Phase.CHECK):
        live.live_tables.share_settings()  # before anything can fail here: the other ranks wait for it
    with errors.kept(Phase.CHECK):
        parts = live.parts
        checked = check(live, *parts, ranks.rank)
        proposal = replace(proposal, owned=checked.owned, unmatched=checked.unmatched, n_bytes=checked.n_bytes)
        with errors.kept(Phase.CONFIRM):
            _confirm_base(job, to)
            with errors.kept(Phase.ROOM):
                room = measured_room(to)
    # Also where this rank has failed: what is saved may be a state that all ranks have to ask for together.
    if parts is not None and (errors.first is None or ranks.size > 1):
        with errors.kept(Phase.STAGE):
            staged = closed_on_error.enter_context(closing(_staged(live, parts, digest, job, to)))
            proposal = replace(
                proposal,
                delta=_delta_proposal(staged, to),
                sharded=staged.sharded.summary,
                digest=staged.digest.summary if staged.digest else 0,
                own_extra=tuple(staged.own_extra),
                io_state=tuple(staged.io_state),
            )
    return Preparation(replace(proposal, room=room, failure=errors.failure), staged, errors.first and errors.first[1])


def _confirm_base(job: Job, to: Destination) -> None:
    """Confirm on rank 0 what a delta would stand on, where that is in doubt, before anything is staged."""
    changes = to.changes
    if job.ranks.rank or changes is None:
        return
    if changes.has_candidate or changes.is_base_gone(to.storage, to.fence):
        changes.confirm(to.storage, to.fence, is_resumed=job.is_resumed)


def _staged(live: Live, parts: State, digest: RankDigest | None, job: Job, to: Destination) -> Staged:
    with job.info.timed("stage"):
        return stage(
            live,
            *parts,
            state=job.state,
            buffers=to.buffers if job.info.background else None,
            rank=job.ranks.rank,
            digest=digest,
            tracker=to.changes.marks if to.changes else None,
        )


def _delta_proposal(staged: Staged, to: Destination) -> DeltaProposal | None:
    if to.changes is None:
        return None
    chain = to.changes.chain(to.fence)
    return delta_proposal(
        to.changes, chain, staged.tables, staged.frozen, choices=staged.choices, layouts=staged.layouts
    )
