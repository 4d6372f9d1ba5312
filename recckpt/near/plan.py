"""Decides for all ranks whether and how a near save begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recckpt.near.moving import writers
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.listing import Checkpoint
from recckpt.save.decide import Phase, Proposal, SavePlan, decide
from recckpt.save.deltas import agreed_kind

_REMEDY = "make room on that host, raise max_bytes if Near sets it, or save checkpoints more often"


@dataclass(frozen=True)
class NearStand:
    intent: Intent  # for the directory, which does not exist yet
    cut: int  # staging number
    seq: int  # sequence number of the next commit
    links: Sequence[Checkpoint]  # its parents, newest first. Rule *staged_base*: as they were at staging.
    stood_in: int = 0  # last step at which a checkpoint was to replace a near save, even if the checkpoint failed

    @property
    def is_of_young_run(self) -> bool:
        """Whether the run has made at least half as many steps since its newest checkpoint as before that checkpoint.

        This limits the number of checkpoints made in place of near saves: each is at 1.5 times the step of the previous
        one or later.
        """
        step, base = self.intent.step, self.links[0].manifest.step
        return step is not None and base is not None and step >= 1.5 * max(base, self.stood_in)


@dataclass(frozen=True)
class NearProposal:
    """What a rank has staged, its host ("" if unknown), and whether it is saving a checkpoint."""

    save: Proposal
    host: str
    is_saving: bool


@dataclass(frozen=True)
class BegunNear:
    intent: Intent  # for the directory on each host
    cut: int  # staging number
    seq: int  # sequence number of the next commit
    hosts: tuple[str, ...]  # the host of each rank
    copies: int  # how many other hosts get a host's files

    def is_first_of_host(self, rank: int) -> bool:
        return self.hosts.index(self.hosts[rank]) == rank


@dataclass(frozen=True)
class NearPlan:
    save: SavePlan
    begun: BegunNear | None  # None if no near save begins
    is_saving: bool  # whether any rank is saving a checkpoint
    is_outgrown: bool = False  # whether no near save begins because a young run needs a new checkpoint first

    @property
    def is_too_large(self) -> bool:
        return self.begun is None and self.save.kind.stand_in is not None and not self.is_outgrown

    @property
    def needs_checkpoint(self) -> bool:
        """Whether no near save begins for lack of a base, and no checkpoint is being saved that could become the base.

        A checkpoint that is being saved becomes the base at a different time on each rank.
        """
        return self.begun is None and not self.is_too_large and not self.is_saving


def decide_near(stand: NearStand | None, copies: int | None, proposals: Sequence[NearProposal]) -> NearPlan:
    """Decide whether and how a near save begins; it may be refused, as any save.

    ``stand`` is None if there is no checkpoint as a base. ``copies=None`` means one copy if there are several hosts.
    """
    saves, is_saving = [each.save for each in proposals], any(each.is_saving for each in proposals)
    failures = [save.failure for save in saves if save.failure is not None]
    if stand is None and not any(failure.phase is Phase.SETTLE for failure in failures):
        return NearPlan(SavePlan(), None, is_saving)
    kind = agreed_kind([save.delta for save in saves])
    if kind.base is None and not failures:  # before checking the space, because a near save never holds all rows
        return NearPlan(SavePlan(kind), None, is_saving, stand is not None and stand.is_of_young_run)
    hosts = tuple(each.host for each in proposals)
    n_copies = min(1 if copies is None else copies, len(set(hosts)) - 1)
    shared = zip(saves, writers(hosts, n_copies), strict=True)
    plan = decide(
        [
            save if save.room is None else replace(save, room=replace(save.room, ranks=here, remedy=_REMEDY))
            for save, here in shared
        ]
    )
    if stand is None or plan.refusal is not None:
        return NearPlan(plan, None, is_saving)
    return NearPlan(plan, BegunNear(stand.intent, stand.cut, stand.seq, hosts, n_copies), is_saving)
