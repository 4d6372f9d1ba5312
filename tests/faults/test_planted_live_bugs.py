"""T11 of live tables: what an adapter can get wrong is planted, and runs at random find it.

What only kernels of FBGEMM show is planted in tests/integrations/test_live_fbgemm.py.
"""

from pathlib import Path

import pytest
import torch
from faults.plants import plant
from faults.test_delta_operations import TrainedTables, Trainer
from live import test_random_saves
from support import spec_reader
from support.live_runs import OPTIMIZERS
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow

from recckpt import Deltas

DELTAS = Deltas(max_dirty=1.0, max_chain_bytes=99.0)  # wherever there can be one


class Decayed(torch.optim.Adagrad):
    """An optimizer that changes every row at each step, as its class does not."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight *= 0.99
        return loss


class Renamed(torch.optim.Adagrad):
    """An optimizer that does what its class does."""


@pytest.fixture
def at_random(tmp_path):
    """Return what runs some marathons of an optimizer."""

    def at_random(rule):
        for seed in range(20):
            test_random_saves.Marathon(tmp_path / str(seed), rule, seed, deltas=DELTAS).go_on(40)

    return at_random


@mostly_slow()
@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ("live rows are not copied aside", "SparseAdam"),
        ("a failed save has read the marks", "sparse Adagrad"),
        ("a state that lies elsewhere is taken for that of before", "sparse Adagrad"),
        ("AdamW changes the rows that Adagrad does", "AdamW"),
        ("AdamW changes the rows that Adagrad does", "Adam"),
    ],
)
def test_saves_at_random_show(monkeypatch, finding, at_random, bug, rule):
    plant(bug, monkeypatch.setattr)
    with finding("assert"):
        at_random(rule)


@pytest.mark.slow
def test_saves_at_random_show_a_subclass_that_is_taken_for_its_class(monkeypatch, finding, at_random, tmp_path):
    plant("a subclass is taken for its class", monkeypatch.setattr)
    monkeypatch.setitem(OPTIMIZERS, "renamed", lambda weights: Renamed(weights, lr=0.1))
    monkeypatch.setitem(OPTIMIZERS, "decayed", lambda weights: Decayed(weights, lr=0.1))
    test_random_saves.Marathon(tmp_path / "renamed", "renamed", 0).go_on(40)
    with finding("assert"):
        at_random("decayed")


def test_a_run_shows_prints_of_one_slot_alone(ram, monkeypatch, finding):
    def run(url):
        trainer = Trainer(url, 1, TrainedTables)
        for _ in range(3):
            trainer.change()
            trainer.content.model["item"].weight.data[49] += 1
            trainer.save()
            trainer.check()

    run(ram / "right")
    plant("rows are compared by the sum of Adagrad", monkeypatch.setattr)
    with finding("assert"):
        run(ram / "wrong")


@pytest.mark.slow
def test_ranks_show_that_each_marks_what_it_looked_up_itself(tmp_path, finding):
    script = Path(test_random_saves.__file__).with_name("ddp_ranks.py")
    run_script(script, tmp_path, 2, "each rank marks what it looked up itself")
    for rule, saved in ((rule, of_rule["saved"]) for rule, of_rule in results(tmp_path, 2)[0].items()):
        if rule in ("sparse Adagrad", "Adagrad", "SparseAdam"):
            with finding("assert"):
                assert all(spec_reader.read(tmp_path / rule, "last-2", t) == rows for t, rows in saved["rows"].items())
