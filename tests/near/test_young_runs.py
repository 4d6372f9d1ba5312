"""A run whose tables grow fast makes checkpoints in place of near saves, ever more seldom, until one is due itself."""

import json

import pytest
from near.test_near_saves import begun
from support.near_runs import NearRun
from support.sweeps import mostly_slow

from recckpt import Deltas
from recckpt.checkpoint.attempt import Attempt
from recckpt.errors import SaveFailedError

HALF = Deltas(max_dirty=0.5, max_chain_bytes=1000)
IN_PLACE = [1, 2, 3, 5, 8, 12, 18]  # each at 1.5 times the step of the one before, or later


def steps_of_checkpoints(run, steps):
    """Make steps that change all rows; return those at which a checkpoint was begun."""
    begun_at = []
    for step in steps:
        before = run.manager.counts.begun
        run.put(_1=float(step), _2=1.5 * step, _3=2.0 * step).step()
        begun_at += [step] * (run.manager.counts.begun - before)
    return begun_at


def test_a_checkpoint_takes_the_place_of_a_near_save_that_is_too_large(tmp_path):
    run = NearRun(tmp_path, deltas=HALF)
    assert steps_of_checkpoints(run, range(1, 20)) == IN_PLACE
    assert run.counts == (0, 0, 12)


@mostly_slow()
@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_one_that_fails_is_tried_again_only_after_as_many_steps(tmp_path, monkeypatch, on_save_error):
    run = NearRun(tmp_path, deltas=HALF, on_save_error=on_save_error)
    assert steps_of_checkpoints(run, range(1, 4)) == [1, 2, 3]
    tried = []

    def failing(*args):
        tried.append(run.manager.global_step)
        raise OSError("the store is away")

    monkeypatch.setattr(Attempt, "commit", failing)
    for step in range(4, 12):
        run.put(_1=float(step), _2=1.5 * step, _3=2.0 * step)
        try:
            run.step()
        except SaveFailedError:
            assert on_save_error == "raise"
    assert tried == [5, 8]


def test_steps_without_a_save_are_counted_from_where_a_run_was_restored(tmp_path):
    begun(tmp_path)
    run = NearRun(tmp_path).restore()
    run.put(_1=3.0).step().save()
    line = json.loads((tmp_path / "runs" / "timeline.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["near"]["gap_steps"]) == (3, 1)
