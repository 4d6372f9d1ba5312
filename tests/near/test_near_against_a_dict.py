"""Near saves, checkpoints, deaths, going back, losses and damage in any order: a restore gives what a dict says."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.builders import flip_bit
from support.near_runs import NearRun, parts_of
from support.sweeps import SWEEP_STRIDE

IDS = st.integers(0, 11)


@dataclass
class Saved:
    """What a near save or a checkpoint holds; ``number`` is its place among all."""

    number: int
    rows: dict
    directory: Path | None = None  # of a near save
    is_damaged: bool = False


class Machine(RuleBasedStateMachine):
    @initialize(max_keep=st.sampled_from([1, 2]))
    def begin(self, max_keep):
        self.root, self.max_keep = Path(tempfile.mkdtemp(prefix="recckpt-near-")), max_keep
        self.checkpoints, self.nears, self.number = [], [], 0
        self.run = NearRun(self.root, max_keep=max_keep)
        self.rows = {}
        self.put({100 + n: 0 for n in range(8)})

    def teardown(self):
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    @rule(values=st.dictionaries(IDS, st.integers(1, 99), min_size=1, max_size=4))
    def put(self, values):
        self.run.put(**{f"_{id_}": float(value) for id_, value in values.items()})
        self.rows |= values

    @rule(ids=st.sets(IDS, min_size=1, max_size=3))
    def erase(self, ids):
        self.run.erase(*ids)
        self.rows = {id_: value for id_, value in self.rows.items() if id_ not in ids}

    @rule()
    def step(self):
        before = self.run.manager.counts
        self.run.step()
        after = self.run.manager.counts
        assert not after.near_failed
        if after.near > before.near:
            self.nears = [*self.nears, self.saved(self.run.near_dirs[-1])][-2:]
        elif after.begun > before.begun:
            self.checkpoints.append(self.saved())

    @rule()
    def save(self):
        before = self.run.manager.counts.begun
        self.run.save()
        if self.run.manager.counts.begun > before:
            self.checkpoints.append(self.saved())

    def saved(self, directory=None):
        self.number += 1
        return Saved(self.number, dict(self.rows), directory)

    @rule(dies=st.booleans(), near=st.sampled_from([True, True, False]))
    def restore(self, dies, near):
        if dies:
            self.run = NearRun(self.root, max_keep=self.max_keep)
        if not dies and not self.checkpoints:
            return
        self.run.restore(near=near)
        there = [*self.checkpoints[-1:], *(each for each in self.nears if near and not each.is_damaged)]
        newest = max(there, key=lambda each: each.number, default=None)
        self.rows = dict(newest.rows) if newest else {}
        assert self.run.rows == self.rows

    @precondition(lambda self: self.nears)
    @rule()
    def lose_the_host(self):
        shutil.rmtree(self.root / "near")
        self.nears = []

    @precondition(lambda self: any(not each.is_damaged for each in self.nears))
    @rule(which=st.sampled_from([-1, -1, 0]))
    def damage(self, which):
        near = self.nears[which]
        parts = parts_of(near.directory)
        if parts and not near.is_damaged:
            flip_bit(parts[0], parts[0].stat().st_size // 2)
            near.is_damaged = True


@pytest.mark.parametrize("n_examples", [2, pytest.param(max(2, 400 // SWEEP_STRIDE), marks=pytest.mark.slow)])
def test_a_restore_gives_what_a_dict_says(n_examples):
    run_state_machine_as_test(Machine, settings=settings(max_examples=n_examples, stateful_step_count=25))
