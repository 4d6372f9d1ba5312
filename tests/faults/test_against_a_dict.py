"""T10: whatever is done to an output dir, in whatever order, restoring gives what a dict says."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from faults.checked_dir import CheckedDir
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.sweeps import SWEEP_STRIDE

NUMBERS = st.integers(0, 99)
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def machine(figures):
    """Return the class of what hypothesis does to an output dir."""

    class Machine(RuleBasedStateMachine):
        it: CheckedDir | None = None

        @initialize(local=st.booleans(), max_keep=st.sampled_from([1, 1, 2]), deltas=st.booleans())
        def begin(self, local, max_keep, deltas):
            self.temporary = Path(tempfile.mkdtemp(prefix="recckpt-", dir=RAM))
            in_memory = f"memory://stateful-{uuid4().hex}/runs"  # test_planted_bugs imports this module again
            url = str(self.temporary / "runs") if local else in_memory
            self.it = CheckedDir(url, max_keep, deltas=deltas)

        @invariant()
        def readers_get_what_was_saved(self):
            if self.it is not None:
                self.it.check()

        @rule(named=st.sampled_from(["", "", "", "best", "last"]))
        def save(self, named):
            self.it.save(named)

        @rule(operations=st.integers(0, 330))
        def die_while_saving(self, operations):
            self.it.die_while_saving(operations)

        @rule(how=st.sampled_from(["restart", "take_over", "change_times"]))
        def go_on(self, how):
            getattr(self.it, how)()

        @precondition(lambda self: self.it.deltas)
        @rule()
        def offer(self):
            self.it.offer()

        @precondition(lambda self: self.it.steps)
        @rule(number=NUMBERS)
        def go_back(self, number):
            self.it.go_back(number)

        @precondition(lambda self: self.it.versions)
        @rule(number=NUMBERS)
        def load_by_id(self, number):
            self.it.load_by_id(number)

        @precondition(lambda self: self.it.steps)
        @rule(number=NUMBERS)
        def pin(self, number):
            self.it.pin(number)

        @rule(number=NUMBERS)
        def unpin(self, number):
            self.it.unpin(number)

        @rule(max_keep=st.sampled_from([1, 2, 3, None]))
        def keep(self, max_keep):
            self.it.keep(max_keep)

        @precondition(lambda self: self.it.can_be_damaged)
        @rule(number=NUMBERS, how=st.sampled_from(["flip", "cut", "remove"]))
        def damage_the_newest(self, number, how):
            self.it.damage_the_newest(number, how)

        def teardown(self):
            if self.it is not None:
                figures.add("T10", examples=1, lost=0, **self.it.done)
                shutil.rmtree(self.temporary)

    return Machine


def run(figures, examples, steps, **options):
    some = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],  # to make a failing one shorter would take an hour
        suppress_health_check=list(HealthCheck),
        **options,
    )
    run_state_machine_as_test(machine(figures), settings=some)


@pytest.fixture(autouse=True)
def quiet():
    """Do without the warnings of the damage that is done."""
    logging.getLogger("recckpt").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("recckpt").setLevel(logging.NOTSET)


def test_restoring_gives_what_a_dict_says(figures):
    run(figures, 4, 12, derandomize=True)


@pytest.mark.slow
def test_restoring_gives_what_a_dict_says_after_many_things(figures):
    run(figures, max(1, 200 // SWEEP_STRIDE), 50)
