"""Near saves beside what else goes on: checkpoints that are committed meanwhile, interrupts, errors of others."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from near.test_near_saves import begun, rows
from near.test_ranks import OTHERS, on_near_ranks
from support.gate import Gate
from support.near_runs import ALL, NearRun

from recckpt.checkpoint.attempt import Attempt
from recckpt.errors import SaveFailedError, WriterFencedError
from recckpt.parallel import threads
from recckpt.save.job import SparseSaver


@pytest.mark.parametrize("moment", ["named", "made"])
def test_a_checkpoint_that_is_committed_as_a_near_save_begins_does_not_take_its_base_away(
    tmp_path, monkeypatch, moment
):
    run = begun(tmp_path, deltas=replace(ALL, full_every=1)).put(_2=2.5).save()
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = run.put(_3=3.0).saver.save_async("ckpt_100", step=100)
    gate.wait()
    monkeypatch.undo()
    tier = run.saver.near_saves.tier
    beginner = tier if moment == "named" else tier.dir
    begin = beginner.begin
    beginner.begin = lambda *args: (gate.open(), handle.wait(), begin(*args))[-1]
    run.put(_4=4.0).step()
    assert run.counts == (2, 0, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.5, 3: 3.0, 4: 4.0}


def test_rotation_sees_the_base_of_a_near_save_at_each_moment_of_its_acknowledgement(tmp_path):
    tier = begun(tmp_path).saver.near_saves.tier
    tier.begin(1, "f" * 32, 3, "the base")
    seen = []

    def look(frame, event, arg):
        if frame.f_code is tier.acknowledge.__func__.__code__:
            seen.append("the base" in tier.bases((1, tier._cut - 1)))
            return look
        return None

    sys.settrace(look)
    try:
        tier.acknowledge()
    finally:
        sys.settrace(None)
    assert len(seen) > 3
    assert all(seen)


def test_an_interrupt_as_the_thread_starts_leaves_no_near_save_of_what_training_changes_then(tmp_path, monkeypatch):
    run = begun(tmp_path)
    gate, start = Gate(monkeypatch, SparseSaver, "save"), threads.start

    def interrupted(thread):
        start(thread)
        if thread.name == "recckpt-near":
            raise KeyboardInterrupt

    run.put(_3=3.0)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.manager.step()
    run.put(_3=7.0, _2=7.0)
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "recckpt-near":
            thread.join()
    assert run.counts == (1, 0, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
    run.restore().put(_4=4.0).step()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 4: 4.0}


def test_one_that_is_due_while_one_is_under_way_is_left_out_before_anything_is_looked_at(tmp_path, monkeypatch):
    run = begun(tmp_path)
    gate = Gate(monkeypatch, SparseSaver, "save")
    run.put(_3=3.0).manager.step()
    gate.wait()

    def unreadable():
        raise OSError("no descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(run.saver.near_saves.tier.dir, "host", unreadable)
        run.manager.step()
    gate.open()
    run.saver.near_saves.settle()
    assert run.counts == (2, 0, 1)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_close_waits_for_a_near_save_though_the_checkpoint_before_has_failed(tmp_path, monkeypatch):
    run = begun(tmp_path)

    def failing(*args):
        raise OSError("the store is away")

    monkeypatch.setattr(Attempt, "commit", failing)
    run.saver.save_async("ckpt_100", step=100).committed.exception()
    near, settled = run.saver.near_saves, []
    monkeypatch.setattr(near, "settle", lambda: settled.append(True))
    with pytest.raises(SaveFailedError):
        run.saver.close()
    assert settled


def test_all_ranks_raise_at_once_where_one_knows_that_it_is_fenced(tmp_path):
    def fenced(run):
        run.put(_1=1.0, **OTHERS).step()
        near = run.saver.near_saves
        if near.ranks.keys() == {(0, 2)}:
            near._fenced = WriterFencedError("taken over")  # its thread ends before those of the others
        with pytest.raises(WriterFencedError, match="taken over"):
            run.manager.step()
        return True

    assert on_near_ranks(tmp_path, 2, fenced) == [True, True]


def test_no_checkpoint_is_made_in_place_of_one_while_not_all_ranks_have_ended_the_one_before(tmp_path):
    def between(run):
        run.put(_1=1.0, **OTHERS).step()
        near, changes = run.saver.near_saves, run.saver._to.changes
        is_late, before = near.ranks.keys() == {(1, 2)}, changes.base
        run.put(_2=2.0).saver.save("ckpt_100", *next(iter(near.ranks)), step=100)
        after, runner = changes.base, near._runner
        if is_late:
            changes.base, near._runner = before, SimpleNamespace(is_running=True)
        run.step()
        changes.base, near._runner = after, runner
        run.put(_3=3.0).step()
        return run.counts, run.manager.counts.begun

    assert on_near_ranks(tmp_path, 2, between) == [((1, 0, 1), 1)] * 2


def test_while_ids_cannot_be_forgotten_near_saves_fail_and_no_checkpoints_are_made_in_their_place(
    tmp_path, monkeypatch, caplog
):
    def failing(*args):
        raise OSError("unreadable")

    begun(tmp_path)
    run = NearRun(tmp_path).restore()
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.rewrite.requests.finish_pending", failing)
        run.put(_3=3.0).step().put(_4=4.0).step()
    assert (run.counts, run.manager.counts.begun) == ((0, 2, 0), 0)
    assert (
        len([r for r in caplog.records if "near save failed: " in r.message and "to forget ids is" in r.message]) == 1
    )
    assert run.step().counts == (1, 2, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
