"""T5 and T7: a job on two hosts halts at a call of its storage, and is overtaken, or ids are forgotten meanwhile."""

import shutil
import threading
from contextlib import suppress
from itertools import count

import numpy as np
import pytest
from near.test_near_saves import OTHERS, rows
from near.test_ranks import on_hosts, together
from support.killed import Halt
from support.near_runs import output_dir
from support.sweeps import HOST_STRIDE

import recckpt
from recckpt import Near
from recckpt.errors import SaveFailedError, WriterFencedError
from recckpt.inspect.absent import look_for
from recckpt.near.near_dir import NearDir

HOSTS = ("a", "b")
STEPS = 3, 4, 5
FORGOTTEN = 30


def rows_at(step):
    """Return what the first job has at a step."""
    return {0: float(step), FORGOTTEN: 1.0} | {number: float(number) for number in (step - 1, step) if number > 1}


def begin(run):
    """Make a checkpoint and a near save."""
    run.put(_0=1.0, _30=1.0, **OTHERS).step().put(_0=2.0, _2=2.0).step()


class First:
    """A job of two ranks that goes on from there, and counts what it was told is safe."""

    def __init__(self, halt):
        self.halt, self.acknowledged, self._together = halt, [2], threading.Barrier(len(HOSTS))

    def train(self, run):
        """Make near saves and a checkpoint, until this job is told that it is overtaken."""
        run.restore()
        for step in STEPS:
            run.put(**{"_0": float(step), f"_{step}": float(step)})
            if step > 3 and step - 2 in run.rows:
                run.erase(step - 2)
            before = run.counts[0]
            try:
                run.step()
            except WriterFencedError:
                break
            if run.counts[0] > before:
                self.acknowledged.append(step)
            if step == STEPS[0]:  # it holds the output dir: who is held up before that takes it over in the end
                self._together.wait(60)
                self.halt.begin()
                self._together.wait(60)
        try:
            run.save()
            self.acknowledged.append(run.manager.global_step)
        except (WriterFencedError, SaveFailedError):
            pass


class Second:
    """A job that takes the output dir over, and trains or dies."""

    def __init__(self, root):
        self.root, self.restored, self.left = root, None, None

    def _restored(self, run):
        run.restore()
        return run.manager.global_step, rows(run)

    def hold(self):
        """Restore, take over and die."""

        def work(run):
            found, near = self._restored(run), run.saver.near_saves
            [key] = near.ranks
            near.tier.hold_together(near.ranks[key], lambda: run.fence.hold_once(is_resumed=True))
            return found

        self._note(on_hosts(self.root, HOSTS, work))

    def train(self):
        """Restore, take over and make two near saves."""

        def work(run):
            found = self._restored(run)
            run.put(_20=20.0).step().put(_21=21.0).step()
            assert run.counts == (2, 0, 0)
            return *found, rows(run), run.manager.global_step

        of_ranks = on_hosts(self.root, HOSTS, work)
        self._note([each[:2] for each in of_ranks])
        self.left = of_ranks[0][3], together(own for *_, own, _ in of_ranks)

    def _note(self, of_ranks):
        [self.restored] = {step for step, _ in of_ranks}
        assert together(own for _, own in of_ranks) == rows_at(self.restored)


def restored(root):
    of_ranks = on_hosts(root, HOSTS, lambda run: (run.restore().manager.global_step, rows(run)))
    [step] = {step for step, _ in of_ranks}
    return step, together(own for _, own in of_ranks)


def overtaken(root, number, deed):
    """Hold the first job up at a call while another does its deed; return whether there was such a call."""
    second = Second(root)
    with pytest.MonkeyPatch.context() as patch:
        first = First(Halt(patch, number, lambda: getattr(second, deed)()))
        on_hosts(root, HOSTS, first.train)
    step, found = restored(root)
    if not first.halt.has_halted:
        assert (step, found) == (STEPS[-1], rows_at(STEPS[-1]))
    elif deed == "train":
        assert max(first.acknowledged) <= second.restored, f"{number}: {first.acknowledged}, {second.restored}"
        assert (step, found) == second.left, f"{number}: the successor had {second.left}"
    else:
        assert step >= max(first.acknowledged), f"{number}: {step} came back, {first.acknowledged} were acknowledged"
        assert found == rows_at(step), f"{number}: step {step} is not what it was"
    return first.halt.has_halted


def forgotten(root, number, _):
    """Hold a job up at a call while ids are forgotten; return whether there was such a call.

    A host comes back with the files of that moment once the job is over.
    """

    def forget():
        with suppress(shutil.Error):  # files that another rank renames or removes meanwhile
            shutil.copytree(root / "b", root / "old")
        recckpt.rewrite.forget(root / "runs", "t", [FORGOTTEN])

    with pytest.MonkeyPatch.context() as patch:
        first = First(Halt(patch, number, forget))
        on_hosts(root, HOSTS, first.train)
    if not first.halt.has_halted:
        return False
    shutil.rmtree(root / "b")
    (root / "old").rename(root / "b")
    step, found = restored(root)
    assert FORGOTTEN not in found, f"{number}: step {step} has the id"
    kept = {id_: value for id_, value in rows_at(step).items() if id_ != FORGOTTEN}
    assert found == kept, f"{number}: step {step} is not what it was"
    if number % 2:
        NearDir.of(Near(root / "b"), output_dir(root).url).clear()
    on_hosts(root, HOSTS, lambda run: run.restore().put(_9=9.0).save().put(_8=8.0).step())
    for host in "ab":
        assert look_for(str(root / host), np.array([FORGOTTEN])).holding == (), f"{number}: {host} has the id"
    assert restored(root)[1] == kept | {8: 8.0, 9: 9.0}
    return True


def sweep(tmp_path, numbers, scene, deed):
    root, begun = tmp_path / "run", tmp_path / "begun"
    root.mkdir()
    on_hosts(root, HOSTS, begin)
    root.rename(begun)  # a near save belongs to the path of its output dir
    for number in numbers:
        shutil.copytree(begun, root)
        if not scene(root, number, deed):
            return number
        shutil.rmtree(root)
    return None


SCENES = {"train": overtaken, "hold": overtaken, "forget": forgotten}


@pytest.mark.parametrize(("deed", "number"), [("train", 70), ("forget", 91)])
def test_who_is_overtaken_in_a_near_save_takes_nothing_away_and_adds_nothing(tmp_path, deed, number):
    assert sweep(tmp_path, [number], SCENES[deed], deed) is None


@pytest.mark.slow
@pytest.mark.parametrize("deed", SCENES)
def test_who_is_overtaken_at_any_call_takes_nothing_away_and_adds_nothing(tmp_path, deed, record_property):
    n_points = sweep(tmp_path, count(0, HOST_STRIDE), SCENES[deed], deed) // HOST_STRIDE
    record_property("figures", {f"T5 and T7 of hosts, {deed}": {"points": n_points, "lost": 0}})
    assert n_points * HOST_STRIDE > 200
