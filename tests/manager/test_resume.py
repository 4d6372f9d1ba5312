"""A run that crashes and resumes goes on as if nothing had happened: every bit of everything."""

import random
import shutil
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import warm_python
from support.builders import OPTIMIZERS, Run, flip_bit, state_of, table_state
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, Normal, SparseAdam


@mostly_slow()
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one_in_every_bit(tmp_path, optimizer):
    expected = state_of(Run(tmp_path / "a", interval=5, optimizer=optimizer).train(16))

    Run(tmp_path / "b", interval=5, optimizer=optimizer).train(13)
    resumed = Run(tmp_path / "b", interval=5, optimizer=optimizer, seed=1)
    assert resumed.manager.restore() == 10
    assert state_of(resumed.train(6)) == expected


def test_a_run_resumes_bit_for_bit_time_after_time(tmp_path):
    expected = state_of(Run(tmp_path / "a", interval=5).train(40))
    for seed, stop in enumerate((7, 13, 14, 29, 33)):
        run = Run(tmp_path / "b", interval=5, seed=seed)
        run.train(stop - run.manager.restore())
    last = Run(tmp_path / "b", interval=5, seed=99)
    assert state_of(last.train(40 - last.manager.restore())) == expected


def test_a_run_resumes_from_an_object_store_bit_for_bit(tmp_path, memory_url):
    expected = state_of(Run(tmp_path, interval=5).train(20))
    Run(memory_url, interval=5).train(13)
    resumed = Run(memory_url, interval=5, seed=1)
    assert resumed.manager.restore() == 10
    assert state_of(resumed.train(10)) == expected


def test_saving_leaves_the_course_of_a_run_as_it_is(tmp_path):
    often, never = Run(tmp_path / "a", interval=1).train(12), Run(tmp_path / "b", interval=1000).train(12)
    assert state_of(often) == state_of(never)


def test_the_learning_rate_of_a_scheduler_goes_on_where_it_was(tmp_path):
    def run(seed):
        made = Run(tmp_path, seed=seed)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (made.sparse, made.dense)]
        for name, scheduler in zip(("sparse_lr", "dense_lr"), schedulers, strict=True):
            made.manager.register_for_checkpointing(name, scheduler)
        return made, schedulers

    first, schedulers = run(0)
    first.train(9)
    for scheduler in schedulers:
        scheduler.step()
    first.train(1)
    second, schedulers = run(1)
    assert second.manager.restore() == 10
    assert second.sparse.param_groups[0]["lr"] == first.sparse.param_groups[0]["lr"] < 0.01
    assert [s.last_epoch for s in schedulers] == [1, 1]


IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20), min_size=1, max_size=8, unique=True)


class ResumeMachine(RuleBasedStateMachine):
    """A table and its checkpoints against dicts."""

    def __init__(self):
        super().__init__()
        self.root = tempfile.mkdtemp(dir="/dev/shm")
        self.rows: dict[int, bytes] = {}
        self.saved: list[tuple[int, dict[int, bytes]]] = []  # step, rows; newest last
        self.step = 0
        self.max_keep = 1

    @initialize(max_keep=st.sampled_from([1, 2, None]))
    def begin(self, max_keep):
        self.max_keep = max_keep
        self.new_process()

    def new_process(self):
        self.table = HashTable(3, name="t", initializer=Normal(0.0, 1.0))
        self.optim = SparseAdam([self.table], lr=0.1)
        model = torch.nn.ModuleDict({"t": self.table})
        self.manager = CheckpointManager(Saver(model, self.optim, self.root, max_keep=self.max_keep), 10**9)

    @rule(ids=IDS)
    def train(self, ids):
        (self.table(torch.tensor(ids)) * (self.step + 1)).sum().backward()
        self.optim.step()
        self.manager.step()
        self.step += 1
        self.rows = rows_of(self.table)

    @rule(ids=IDS)
    def erase(self, ids):
        self.table.erase(torch.tensor(ids))
        for i in ids:
            self.rows.pop(i, None)
        self.manager.step()
        self.step += 1

    @rule()
    def save(self):
        held = self.manager.save() is None
        assert not held or (self.step, self.rows) in self.saved
        if not held:
            kept = [(step, rows) for step, rows in self.saved if step != self.step] + [(self.step, dict(self.rows))]
            self.saved = kept if self.max_keep is None else kept[-self.max_keep :]

    @rule()
    def crash_and_restore(self):
        self.new_process()
        self.step, self.rows = self.saved[-1] if self.saved else (0, {})
        self.rows = dict(self.rows)
        assert self.manager.restore() == self.step

    @rule(choice=st.integers(0, 10))
    def go_back(self, choice):
        if self.saved:
            step, rows = self.saved[choice % len(self.saved)]
            assert self.manager.restore(step) == step
            self.step, self.rows = step, dict(rows)

    @invariant()
    def the_table_is_as_the_dict_says(self):
        if hasattr(self, "table"):
            assert rows_of(self.table) == self.rows

    def teardown(self):
        shutil.rmtree(self.root)


def rows_of(table):
    state = table_state(table)
    ids = np.frombuffer(state.pop("id"), np.int64)
    columns = [np.frombuffer(c, np.uint8).reshape(len(ids), -1) for c in state.values() if len(ids)]
    return {int(i): b"".join(c[k].tobytes() for c in columns) for k, i in enumerate(ids)}


TestResumeMachine = ResumeMachine.TestCase
TestResumeMachine.settings = settings(
    max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestResumeMachineAtLength(ResumeMachine.TestCase):
    settings = settings(
        max_examples=200 // SWEEP_STRIDE, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_the_random_generators_come_back_or_are_left_alone(tmp_path):
    Run(tmp_path).train(10)
    wanted = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())

    second = Run(tmp_path, seed=5)
    second.manager.restore()
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == wanted

    third = Run(tmp_path, seed=5)
    before = state_of(third)["rng"]
    third.manager.restore(rng=False)
    assert state_of(third)["rng"] == before


def test_what_is_damaged_is_said_on_stderr_where_a_program_sets_up_no_logging(tmp_path):
    run = Run(tmp_path / "run", interval=5, max_keep=None).train(10)
    run.manager.close()
    flip_bit(next((tmp_path / "run/ckpt_10").rglob("*.arrow")), -600)
    script = tmp_path / "evaluate.py"
    script.write_text("import sys\nfrom support.builders import Run\nprint(Run(sys.argv[1]).manager.restore())\n")
    done = warm_python.run(script, tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert "ckpt_10 is damaged, restoring ckpt_5 instead" in done.stderr
