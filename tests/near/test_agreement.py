"""How ranks agree on near saves: once on training's path as on a delta, and never on one that is left out."""

import threading

import pytest
from near.test_ranks import OTHERS
from support.gate import Gate
from support.near_runs import NearRun, output_dir
from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt.near.one_save import NearSave
from recckpt.output_dir.listing import list_checkpoints
from recckpt.parallel import threads
from recckpt.parallel.threads import run_all
from recckpt.save.job import SparseSaver
from recckpt.sparse import gen_slice

SIZE = 2


class TwoWires(ThreadGroup):
    """A rank whose thread meets those of others on a wire of its own."""

    def __init__(self, rank, path, aside):
        super().__init__(rank, path)
        self._aside = aside

    def twin(self):
        return ThreadGroup(self.rank, self._aside)


class Wires:
    """What ranks send each other on training's path and aside from it, for saves and for near saves."""

    def __init__(self):
        self.near, self.near_aside, self.save, self.save_aside = (Wire(SIZE) for _ in range(4))

    def run(self, root, rank):
        """Return a run whose near saves all stand on the checkpoint of its first step."""
        run = NearRun(root, slice=gen_slice(rank, SIZE), shard_id=rank, shard_num=SIZE, near=f"near-{rank}")
        run.saver.ranks[rank, SIZE] = alone(TwoWires(rank, self.save, self.save_aside))
        run.saver.near_saves.ranks[rank, SIZE] = alone(TwoWires(rank, self.near, self.near_aside))
        return run.put(_1=1.0, **OTHERS).step().put(_2=2.0).step()


def begin(run, rank, step):
    """Begin a near save as the manager does, which has met before on wires of its own."""
    assert run.saver.near_saves.begin(rank, SIZE, step, {})


def on_two(work):
    return run_all(work, range(SIZE), SIZE)


def test_a_near_save_agrees_once_on_the_path_of_training_as_a_delta_does(tmp_path):
    wires = Wires()

    def messages(rank):
        run = wires.run(tmp_path, rank)
        of_near, of_saves = len(wires.near.messages), len(wires.save.messages)
        begin(run.put(_3=3.0), rank, 3)
        run.saver.near_saves.settle()
        handle = run.saver.save_async("ckpt_100", rank, SIZE, step=100)
        handle.wait()
        assert run.counts == (2, 0, 0)
        return wires.near.messages[of_near:], wires.save.messages[of_saves:]

    path_of_near, path_of_delta = on_two(messages)[0]
    assert path_of_near == path_of_delta == ["gather", "broadcast"]
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.kind == "delta"


def test_ranks_at_different_steps_leave_out_the_same_near_saves_and_send_nothing_for_it(tmp_path, monkeypatch):
    wires, everybody = Wires(), threading.Barrier(SIZE)
    gates = []

    def work(rank):
        run = wires.run(tmp_path, rank)
        if everybody.wait(60) == 0:
            gates.append(Gate(monkeypatch, SparseSaver, "save"))
        everybody.wait(60)
        begin(run.put(_3=3.0), rank, 3)
        gates[0].wait()
        everybody.wait(60)
        n_messages = len(wires.near.messages)
        for step in (4,) if rank else (4, 5, 6):
            begin(run, rank, step)
        everybody.wait(60)
        gates[0].open()
        run.saver.near_saves.settle()
        for step in (5, 6) if rank else ():
            begin(run, rank, step)
        everybody.wait(60)
        assert len(wires.near.messages) == n_messages
        everybody.wait(60)
        begin(run.put(_4=4.0), rank, 7)
        run.saver.near_saves.settle()
        return run.counts

    assert on_two(work) == [(3, 0, 3)] * SIZE


@pytest.mark.parametrize("what", ["the thread cannot be started", "the thread fails alone"])
def test_a_rank_that_fails_once_all_have_agreed_makes_no_more_and_training_goes_on(tmp_path, monkeypatch, caplog, what):
    wires, fails, write, start = Wires(), threading.local(), NearSave.write, threads.start

    def failing_start(thread):
        if (
            thread.name == "recckpt-near"
            and getattr(fails, "is_here", False)
            and what == "the thread cannot be started"
        ):
            raise RuntimeError("can't start new thread")
        start(thread)

    def failing_write(save, staged):
        if save.job.ranks.rank == 1 and save.job.info.step == 3 and what == "the thread fails alone":
            raise MemoryError
        write(save, staged)

    monkeypatch.setattr(threads, "start", failing_start)
    monkeypatch.setattr(NearSave, "write", failing_write)

    def work(rank):
        run = wires.run(tmp_path, rank)
        fails.is_here = rank == 1
        run.put(_3=3.0).step()
        if rank == 1:
            wires.near_aside.barrier.abort()  # as a timeout would: rank 0 waits for this one
        run.put(_4=4.0).step().put(_5=5.0).step()
        run.save()
        return run.counts

    assert on_two(work) == [(1, 1, 2)] * SIZE
    assert "no more are made in this process" in caplog.text
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.step == 5
