"""Whatever is done to a run with live tables, each of its checkpoints is a dict of the rows at its moment."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.live_runs import N_ROWS, OPTIMIZERS, Run, assert_same, read_rows
from support.sweeps import SWEEP_STRIDE

from recckpt import Deltas
from recckpt.errors import CheckpointExistsError
from recckpt.live import live_tables

SEEN = Counter()
TABLES = st.sampled_from(["users", "items"])


class LiveMachine(RuleBasedStateMachine):
    """What runs do; ``saved`` is what a dict knows of their checkpoints."""

    run = None

    @initialize(rule=st.sampled_from(sorted(OPTIMIZERS)))
    def begin(self, rule):
        self.directory = tempfile.TemporaryDirectory(prefix="recckpt-")
        self.rule, self.saved, self.states = rule, {}, {}
        self.run = self.fresh(seed=0)

    def fresh(self, seed):
        """Return another process of the run."""
        url = Path(self.directory.name) / "runs"
        return Run(url, self.rule, seed=seed, deltas=Deltas(max_chain_bytes=99.0), max_keep=None)

    @rule(n_steps=st.integers(1, 3), n_ids=st.integers(1, 5))
    def train(self, n_steps, n_ids):
        self.run.train(n_steps, n_ids)

    @rule(table=TABLES, row=st.integers(0, N_ROWS - 1))
    def write_in_place(self, table, row):
        with torch.no_grad():
            getattr(self.run.model, table).weight[row] += 1

    @rule()
    def load_the_model(self):
        self.run.model.load_state_dict({k: v + 1 for k, v in self.run.model.state_dict().items()})

    @rule()
    def load_the_optimizer(self):
        self.run.row_optim.load_state_dict(self.run.row_optim.state_dict())

    @rule(table=TABLES)
    def freeze_or_unfreeze(self, table):
        weight = getattr(self.run.model, table).weight
        weight.requires_grad_(not weight.requires_grad)

    @rule(n_steps=st.integers(0, 3))
    def save_beside_training(self, n_steps):
        self.save(in_background=True, fails=False, n_steps=n_steps)

    @rule(n_steps=st.integers(0, 2))
    def train_and_save(self, n_steps):
        self.run.train(n_steps)
        self.save(in_background=False, fails=False, n_steps=0)

    @rule(in_background=st.booleans(), fails=st.sampled_from([False, False, True]), n_steps=st.integers(0, 3))
    def save(self, in_background, fails, n_steps):
        ckpt_id, rows, state = f"c{len(self.saved)}", self.run.rows(), self.run.state()
        if fails and self.saved:
            handle = self.run.saver.save_async("c0", step=0)
            self.run.train(n_steps)
            with pytest.raises(CheckpointExistsError):
                handle.wait()
            SEEN["failed saves"] += 1
            return
        save = (self.run.saver.save_async if in_background else self.run.saver.save)(ckpt_id, step=len(self.saved))
        if in_background:
            self.run.train(n_steps)
            save = save.wait()
        self.saved[ckpt_id], self.states[ckpt_id] = rows, state
        assert read_rows(self.run, ckpt_id) == rows
        SEEN.update({"saves": 1, "in the background": in_background, "deltas": save.kind == "delta", "wrong": 0})

    @precondition(lambda self: self.run and self.saved)
    @rule(number=st.integers(0, 99), in_place=st.booleans())
    def restore(self, number, in_place):
        ckpt_id = list(self.saved)[number % len(self.saved)]
        if not in_place:
            self.run.saver.close()
            self.run.tables.close()
            self.run = self.fresh(seed=number)
        self.run.saver.load(ckpt_id=ckpt_id)
        assert self.run.rows() == self.saved[ckpt_id]
        assert_same(self.run.state(), self.states[ckpt_id])
        SEEN["restores"] += 1

    @rule()
    def close_and_attach_anew(self):
        self.run.saver.close()
        self.run.tables.close()
        self.run.train()
        self.run.tables = live_tables(self.run.model, [self.run.row_optim], min_rows=10)
        self.run.saver = self.run.new_saver(self.run.url, deltas=Deltas(max_chain_bytes=99.0), max_keep=None)
        SEEN["attached anew"] += 1

    def teardown(self):
        if self.run is not None:
            self.run.saver.close()
            self.directory.cleanup()
            SEEN["runs"] += 1


def run(n_examples, n_steps, **options):
    some = settings(
        max_examples=n_examples,
        stateful_step_count=n_steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    run_state_machine_as_test(LiveMachine, settings=some)


def test_each_checkpoint_is_a_dict_of_the_rows_of_its_moment():
    run(3, 8, derandomize=True, phases=[Phase.generate])


@pytest.mark.slow
def test_each_checkpoint_of_many_runs_is_a_dict_of_the_rows_of_its_moment(record_property):
    SEEN.clear()
    run(max(1, 300 // SWEEP_STRIDE), 30, derandomize=True, phases=[Phase.generate])
    record_property("figures", {"live tables, machine": dict(SEEN)})
