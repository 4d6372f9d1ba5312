"""Near saves beside what else goes on: checkpoints that are committed meanwhile, interrupts, errors of others."""

import sys
from dataclasses import replace

import pytest
from near.test_near_saves import begun, rows
from support.gate import Gate
from support.near_runs import ALL, NearRun

from recckpt.checkpoint.attempt import Attempt
from recckpt.errors import SaveFailedError
from recckpt.save.sparse_saver import SparseSaver


def test_a_checkpoint_that_is_committed_as_a_near_save_begins_does_not_take_its_base_away(tmp_path, monkeypatch):
    run = begun(tmp_path, deltas=replace(ALL, full_every=1)).put(_2=2.5).save()
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = run.put(_3=3.0).saver.save_async("ckpt_100", step=100)
    gate.wait()
    monkeypatch.undo()
    near_dir = run.saver.near_saves.tier.dir
    begin = near_dir.begin
    near_dir.begin = lambda *args: (gate.open(), handle.wait(), begin(*args))[-1]
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
