"""T1: a process is killed at a system call of a save; what was acknowledged restores, and the next process goes on."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache, cached_property
from itertools import product

import pytest
from faults.scenes import OFFERS, OFFERS_AND_DOUBTS, SCENES
from faults.tracing import killing
from support.sweeps import SWEEP_STRIDE, mostly_slow, some_of

from recckpt.format import layout
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage

MOST_CALLS = 1000  # of one name in a save
ALL = SCENES | OFFERS_AND_DOUBTS | OFFERS
CALLS = ("link", "mkdir", "openat", "write", "fsync", "close", "unlink", "rename", "rmdir")
SAMPLES = {"openat": 50, "write": 70, "close": 50, "fsync": 9, "unlink": 5}  # one of so many in the default suite


class Sweep:
    """Kills at one call after another, each time in a copy of what a scene begins with."""

    def __init__(self, worker, ram, name, figures, plant=None):
        self.worker, self.ram, self.figures, self.scene = worker, ram, figures, ALL[name]
        self.save = replace(self.scene.last, plant=plant)
        self.base = ram / name
        if not self.base.exists():
            self.scene.make(worker, self.base)

    def kill_at_every(self, call, stride=1, first=1):
        """Kill at the first, and then each ``stride``-th, call, until the save survives; return how many times."""
        for count, k in enumerate(range(first, MOST_CALLS, stride)):
            if self.kill_at(call, k) == "saved":
                return count
        raise AssertionError(f"a save has no {MOST_CALLS} calls of {call}")

    def kill_at_some(self, call, stride, number):
        """Kill at each ``stride``-th call, from one on that follows from the ``number`` of the sweep."""
        words = [self.kill_at(call, k) for k in some_of(self.n_calls[call], stride, number)]
        assert "killed" in words or not words or self.save.threads > 1  # of which any may make the most calls

    @cached_property
    def n_calls(self):
        """How many calls of each name a thread of the save makes, at most: strace counts those of each thread."""
        url, log = self.ram / "undisturbed", self.ram / "log"
        shutil.copytree(self.base, url)
        tracing = "-o", str(log), "-e", f"trace={','.join(CALLS)}"
        assert self.worker.run(url, self.scene.max_keep, self.save, *tracing).word == "saved"
        shutil.rmtree(url)
        n_calls = Counter()
        for (_, call), n in Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE)).items():
            n_calls[call] = max(n, n_calls[call])
        return n_calls

    def kill_at(self, call, k):
        url = self.ram / f"{call}{k}"
        shutil.copytree(self.base, url)
        word = self.worker.run(url, self.scene.max_keep, self.save, *killing(call, k)).word
        assert word in ("saved", "killed"), f"{call} {k}: {word}"
        try:
            self.scene.go_on(url, word)
        except BaseException as error:
            self.figures.add(self.scene.counted("T1"), lost=1)
            raise AssertionError(f"after a kill at {call} {k}: {error}") from error
        self.figures.add(self.scene.counted("T1"), points=word == "killed", lost=0)
        shutil.rmtree(url)
        return word


@pytest.fixture(scope="module")
def sweep(worker, shared_ram, figures):
    return cache(lambda name: Sweep(worker, shared_ram, name, figures))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if scene.deltas])
def test_a_scene_of_deltas_ends_with_one_unless_its_name_says_otherwise(sweep, ram, name):
    scene, url = SCENES[name], ram / "whole"
    shutil.copytree(sweep(name).base, url)
    assert sweep(name).worker.run(url, scene.max_keep, scene.last).word == "saved"
    newest = list_checkpoints(open_storage(str(url))).current[-1].manifest
    assert newest.kind == ("full" if name.startswith("full") or name == "delta again" else "delta")


@mostly_slow()
@pytest.mark.parametrize("call", CALLS)
def test_a_kill_in_a_save_that_rotates_loses_nothing(sweep, call):
    assert sweep("rotation").kill_at_every(call, SAMPLES.get(call, 1)) > 0


@mostly_slow()
@pytest.mark.parametrize("name", [name for name in SCENES if name != "rotation"])
def test_a_kill_at_the_commit_loses_nothing(sweep, name):
    links = 2 if SCENES[name].last.before else 4  # claim, list, INTENT, manifest
    for k in range(1 if name == "takeover" else links, links + 1):
        assert sweep(name).kill_at("link", k) == "killed"


def test_an_offer_that_waits_goes_with_the_next_owner_and_a_kill_meanwhile_loses_nothing(sweep, ram):
    trial, url = sweep("offer waiting"), ram / "whole"
    shutil.copytree(trial.base, url)
    assert len(offers(url)) == 1
    assert trial.worker.run(url, 1, trial.save).word == "saved"
    assert offers(url) == []
    assert trial.kill_at("link", 4) == "killed"  # claim, list, INTENT, manifest


def test_an_offer_is_adopted_and_a_kill_meanwhile_loses_nothing(sweep, ram):
    trial, url = sweep("offer and adoption"), ram / "whole"
    shutil.copytree(trial.base, url)
    assert trial.worker.run(url, 1, trial.save).word == "saved"
    assert [c.ckpt_id for c in list_checkpoints(open_storage(str(url))).committed if c.manifest.supersedes] == [
        "ckpt_2"
    ]
    assert trial.kill_at("link", 7) == "killed"  # claim, list, INTENT and offer, INTENT, manifest, that of the offer


def offers(url):
    return [name for name in list_checkpoints(open_storage(str(url))).uncommitted if layout.is_offer_dir(name)]


SWEEPS = list(
    product([*SCENES, "offer and adoption", "live offer and adoption", "rotation of a delta", *OFFERS], CALLS)
)
SOME = SWEEPS[:: 1 if SWEEP_STRIDE < 20 else 2 if SWEEP_STRIDE < 40 else 4]  # each call, as 9 is odd, and each scene


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), SOME)
def test_a_kill_at_every_call_loses_nothing(sweep, name, call):
    if SWEEP_STRIDE == 1:
        sweep(name).kill_at_every(call)
    else:
        sweep(name).kill_at_some(call, SWEEP_STRIDE, SOME.index((name, call)))
