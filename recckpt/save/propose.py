"""The work of a rank before the ranks agree on a save: settle the previous save, check the model, stage the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from recckpt.dense.sharded import is_sharded, local_bytes
from recckpt.dense.state_copy import RankDigest
from recckpt.errors import RecckptError
from recckpt.format.buckets import Slice
from recckpt.format.layout import is_encodable
from recckpt.live.attached import AttachedTable
from recckpt.save.arguments import check_trained
from recckpt.save.choice import Choice, slots_of_table
from recckpt.save.decide import Owned, Phase, Proposal, RankFailure, Room, SavePlan, WorkRoom, as_text
from recckpt.save.deltas import delta_proposal
from recckpt.save.job import Destination, Job, Live
from recckpt.save.stage import Staged, stage
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.table.store import is_stored
from recckpt.types import RowShare, SavableTable


@dataclass(frozen=True)
class Preparation:
    """The proposal of a rank, with its staged state and its error, which are not sent to other ranks."""

    proposal: Proposal
    staged: Staged | None = None
    error: Exception | None = None

    def raise_refusal(self, plan: SavePlan, job: Job) -> None:
        refusal, failure = plan.refusal, self.proposal.failure
        if refusal is not None:
            own = self.error if failure is not None and failure.phase is refusal.phase else None
            refusal.raise_on(job.ranks.rank, own, job.info)

    def planned(self, plan: SavePlan) -> Staged:
        if self.staged is None:
            raise self.error or AssertionError("no state was staged for this save")
        return self.staged.written_as(plan.kind)


def propose(
    live: Live, job: Job, to: Destination, settle: Callable[[], object], closed_on_error: ExitStack
) -> Preparation:
    """Prepare a save on this rank, and propose it; errors become part of the proposal.

    Collective only if live tables are split over ranks, because then the ranks exchange the settings of the tables.
    ``settle`` waits for the previous save and raises its error. ``closed_on_error`` closes the staged state if no save
    follows.

    Raises:
        RecckptError: the previous save has failed, and no other rank can be reached.
    """
    ranks, changes = job.ranks, to.changes
    errors: list[tuple[Phase, Exception]] = []

    @contextmanager
    def kept(phase: Phase) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            errors.append((phase, error))

    with kept(Phase.SETTLE):
        settle()
    if errors and (ranks.size == 1 or ranks.has_lost):
        raise errors[0][1]
    digest = to.digests.begin() if ranks.size > 1 else None  # on all ranks, in step
    proposal = Proposal(job.info.ckpt_id, job.info.step, live.choice, writes_deltas=changes is not None)
    parts = staged = None
    with kept(Phase.CHECK):
        live.live_tables.share_settings()  # before anything can fail here: the other ranks wait for this exchange
    with kept(Phase.CHECK):
        parts = live.parts
        owned, unmatched, n_bytes = check(live, *parts, ranks.rank)
        proposal = replace(proposal, owned=owned, unmatched=unmatched, n_bytes=n_bytes)
        with kept(Phase.CONFIRM):
            # If necessary, rank 0 confirms the base of a delta before anything is staged.
            if changes is not None and not ranks.rank and changes.is_in_doubt(to.storage, to.fence):
                changes.confirm(to.storage, to.fence, is_resumed=job.is_resumed)
            with kept(Phase.ROOM):
                proposal = replace(proposal, room=measured_room(to))
    # Stage even if this rank has failed: some states can only be taken by all ranks together.
    if parts is not None and (not errors or ranks.size > 1):
        with kept(Phase.STAGE):
            staged = closed_on_error.enter_context(closing(_staged(live, parts, digest, job, to)))
            proposal = _with_staged(proposal, staged, to)
    if errors:
        phase, error = errors[0]
        is_for_all = phase.is_of_all and isinstance(error, RecckptError)
        proposal = replace(proposal, failure=RankFailure(phase, error if is_for_all else as_text(error)))
    return Preparation(proposal, staged, errors[0][1] if errors else None)


def check(
    live: Live, tables: Mapping[str, SavableTable], dense: Mapping[str, Any], rank: int
) -> tuple[Owned, frozenset[str], int]:
    """Check the tables and the dense state of the model of this rank; ValueError if they cannot be saved.

    Returns the owned ids, the options that match no table, and the estimated bytes of a full save of this rank.
    """
    if not is_encodable("".join(dense)):
        name = next(name for name in dense if not is_encodable(name))
        raise ValueError(f"{name!r} of the model cannot be saved: expected a name encodable as UTF-8; rename it")
    check_trained(live.sparse_optim, tables)  # the tables may have changed since the saver was made
    live.choice.check(tables)
    names: dict[Slice | RowShare | None, list[str]] = {}
    for name, table in tables.items():
        own = table.share if isinstance(table, AttachedTable) else getattr(table, "slice", None)
        names.setdefault(own, []).append(name)
    owned = {own: tuple(of_slice) for own, of_slice in names.items()}
    return owned, live.choice.unmatched(tables), estimated_bytes(tables, dense, rank, live.choice)


def _staged(
    live: Live,
    parts: tuple[Mapping[str, SavableTable], Mapping[str, Any]],
    digest: RankDigest | None,
    job: Job,
    to: Destination,
) -> Staged:
    with job.info.timed("stage"):
        return stage(
            live,
            *parts,
            state=job.state,
            buffers=to.buffers if job.info.background else None,
            rank=job.ranks.rank,
            digest=digest,
            freeze=to.changes.freeze if to.changes else None,
        )


def _with_staged(proposal: Proposal, staged: Staged, to: Destination) -> Proposal:
    changes, delta = to.changes, None
    if changes is not None:
        chain = changes.chain(to.fence)
        delta = delta_proposal(
            changes, chain, staged.tables, staged.frozen, choices=staged.choices, layouts=staged.layouts
        )
    return replace(
        proposal,
        delta=delta,
        sharded=staged.sharded.summary,
        digest=staged.digest.summary if staged.digest else 0,
        own_extra=tuple(staged.own_extra),
        io_state=tuple(staged.io_state),
    )


def measured_room(to: Destination) -> Room:
    """Return the free space that this rank sees; OSError if the output dir is gone, or the storage failed."""
    to.storage.check_there()
    work_dir = to.transport.work_dir
    work = WorkRoom(work_dir.url, work_dir.device, work_dir.free_bytes()) if work_dir else None
    return Room(to.storage.url, to.storage.free_bytes(), to.min_free_bytes, work)


def estimated_bytes(tables: Mapping[str, SavableTable], dense: Mapping[str, Any], rank: int, choice: Choice) -> int:
    """Estimate how many bytes a rank writes: its rows, its shards, and on rank 0 the dense state.

    0 for a state that staging will refuse.
    """
    try:
        tensors = [value for value in dense.values() if isinstance(value, Tensor)]
        own = sum(local_bytes(value) if is_sharded(value) else 0 if rank else value.nbytes for value in tensors)
        return own + sum(_rows_bytes(table, choice) for table in tables.values())
    except Exception:
        return 0


def _rows_bytes(table: SavableTable, choice: Choice) -> int:
    """Return the bytes of the rows of a table; 0 if a filter chooses the rows, because their number is unknown yet."""
    slots = slots_of_table(table)
    chosen = None if choice.is_everything else choice.of_table(table).of(table.name, slots)
    if chosen is not None and chosen.where is not None:
        return 0
    row_bytes = 8 + sum(slot.row_bytes for slot in slots) if chosen is None else chosen.row_bytes
    if isinstance(table, AttachedTable):
        return table.n_saved * row_bytes
    return (len(table.store) if is_stored(table) else source_of(table).n_rows) * row_bytes
