"""What a rank brings to a save of the manager, which all ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recckpt.format.manifest import StateValue
from recckpt.manager.run_state import Run
from recckpt.manager.step_arguments import Metrics, State, as_state
from recckpt.parallel.ranks import Ranks
from recckpt.save.save_info import SaveInfo


@dataclass(frozen=True)
class AtSave:
    """Where the run of a rank is, and what is kept of it beside the model."""

    step: int
    is_saved: bool  # in a checkpoint that stays
    event_time: float | None
    counted: str
    state: dict[str, StateValue]


def at_save(run: Run, step: int | None, state: State, metrics: Metrics) -> AtSave:
    """Return what this rank brings; ``step`` is that of the caller's own count, None for that of the run.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    at = run.checked_step(step)
    is_saved = run.is_saved and at == run.global_step
    return AtSave(at, is_saved, run.event_time, run.counted, as_state(state, metrics))


def meet(ranks: Ranks, run: Run, step: int | None, state: State, metrics: Metrics) -> tuple[AtSave, bool]:
    """Return what this rank brings, and whether that is in a checkpoint which stays, of all ranks. Collective.

    The run moves to the step of the caller's own count, and to the latest event time of all ranks.
    """
    of_ranks = ranks.on_all(lambda: at_save(run, step, state, metrics))
    own, is_saved = of_ranks[ranks.rank], all(rank.is_saved for rank in of_ranks)
    run.move_to(own.step)
    if not is_saved:
        check_counts(of_ranks, SaveInfo(run.ckpt_id, run.global_step))
        run.note_event(*(rank.event_time for rank in of_ranks))
    return own, is_saved


def check_counts(of_ranks: Sequence[AtSave], info: SaveInfo) -> None:
    """Refuse a save of ranks of which one has ended another window or epoch, though their steps are the same."""
    for rank, its in enumerate(of_ranks):
        if its.counted != of_ranks[0].counted:
            cause = f"it has counted {its.counted}, rank 0 {of_ranks[0].counted}: all count the same"
            raise info.failure(rank, cause)
