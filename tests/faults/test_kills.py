"""T1: a process is killed at a system call of a save; what was acknowledged restores, and the next process goes on."""

import itertools
import os
import shutil

import pytest
from faults.job import NOTHING, restored
from faults.scenes import SCENES, Scene
from faults.tracing import Save, killing

SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "1"))  # the sweeps try every so-manieth point
MOST_CALLS = 1000  # of one name in a save
CALLS = ("mkdir", "openat", "write", "fsync", "close", "link", "unlink", "rename", "rmdir")
SAMPLES = {"openat": 50, "write": 70, "close": 50, "fsync": 9, "unlink": 5}  # one of so many in the default suite


class Sweep:
    """Kills at one call after another, each time in a copy of what a scene begins with."""

    def __init__(self, worker, ram, name, figures):
        self.worker, self.ram, self.figures, self.scene = worker, ram, figures, SCENES[name]
        self.base = ram / name
        if not self.base.exists():
            self.scene.make(worker, self.base)

    def kill_at_every(self, call, stride=1):
        """Kill at the first, and then each ``stride``-th, call, until the save survives; return how many times."""
        for count, k in enumerate(range(1, MOST_CALLS, stride)):
            if self.kill_at(call, k) == "saved":
                return count
        raise AssertionError(f"a save has no {MOST_CALLS} calls of {call}")

    def kill_at(self, call, k):
        url = self.ram / f"{call}{k}"
        shutil.copytree(self.base, url)
        word = self.worker.run(url, self.scene.max_keep, self.scene.last, *killing(call, k)).word
        assert word in ("saved", "killed"), f"{call} {k}: {word}"
        try:
            self.scene.go_on(url, word)
        except BaseException as error:
            self.figures.add("T1", lost=1)
            raise AssertionError(f"after a kill at {call} {k}: {error}") from error
        self.figures.add("T1", points=word == "killed", lost=0)
        shutil.rmtree(url)
        return word


@pytest.fixture(scope="module")
def sweep(worker, shared_ram, figures):
    return lambda name: Sweep(worker, shared_ram, name, figures)


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_in_a_save_that_rotates_loses_nothing(sweep, call):
    assert sweep("rotation").kill_at_every(call, SAMPLES.get(call, 1)) > 0


@pytest.mark.parametrize("name", [name for name in SCENES if name != "rotation"])
def test_a_kill_at_the_commit_loses_nothing(sweep, name):
    links = 2 if name == "same writer" else 4  # claim, list, INTENT, manifest
    for k in range(1 if name == "takeover" else links, links + 1):
        assert sweep(name).kill_at("link", k) == "killed"


def test_a_rotation_before_the_commit_would_be_found(worker, ram, figures):
    scene = SCENES["rotation"]
    planted = Scene(1, (*scene.saves[:-1], (Save((2,), plant="rotation before the commit"), None)), scene.before)
    planted.make(worker, ram / "base")
    for k in itertools.count(1):
        url = ram / str(k)
        shutil.copytree(ram / "base", url)
        word = worker.run(url, 1, planted.last, *killing("unlink", k)).word
        assert word == "killed", "the save has ended, and nothing was found"
        if restored(url, [NOTHING, scene.before])[1] == NOTHING:
            return


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_at_every_call_loses_nothing(sweep, name, call):
    sweep(name).kill_at_every(call, SWEEP_STRIDE)
