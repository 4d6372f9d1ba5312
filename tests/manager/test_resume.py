"""A run takes up where it was left: its newest whole checkpoint, by chains of deltas too, and what a bank adds."""

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
from support.spec_writer import Held, write_compacted, write_delta_of, write_full
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError
from recckpt.sparse import HashTable, Normal, SparseAdam, gen_slice

FULL = {1: (1.0, 1.0), 2: (2.0, 2.0), 3: (3.0, 3.0)}


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


@pytest.mark.parametrize("is_table", [False, True])
def test_a_run_that_goes_back_before_a_step_has_no_gradients_of_it(tmp_path, is_table):
    model = nn.ModuleDict({"words": nn.Embedding(20, 2), "user": HashTable(2, name="user"), "top": nn.Linear(2, 1)})
    optimizers = [
        SparseAdam([model["user"]]),
        torch.optim.Adam([*model["words"].parameters(), *model["top"].parameters()]),
    ]
    tables = {"min_rows": 1} if is_table else None
    manager = CheckpointManager.attach(model, optimizers, output_dir=tmp_path, save_interval=1, tables=tables)
    ids = torch.arange(3)
    manager.step()
    manager.wait_until_finished()
    (model["top"](model["words"](ids) + model["user"](ids)).sum() * torch.nan).backward()
    manager.restore()
    assert [one.grad for one in (*model.parameters(), model["user"])] == [None] * 5


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


def held(rows, vectors, deletes=()):
    return {"t": Held(rows, [(vectors, deletes)])}


@pytest.fixture
def chain(tmp_path):
    """ckpt_1 and ckpt_2, each full, and on the second ckpt_3, ckpt_4 and ckpt_5."""
    ckpt_1 = write_full(tmp_path, "ckpt_1", held(3, FULL), step=1)
    ckpt_2 = write_full(tmp_path, "ckpt_2", held(3, {**FULL, 1: (9.0, 9.0)}), step=2, seq=2)
    ckpt_3 = write_delta_of(ckpt_2, "ckpt_3", held(2, {}, [3]), step=3)
    ckpt_4 = write_delta_of(ckpt_3, "ckpt_4", held(3, {4: (4.0, 4.0)}), step=4)
    ckpt_5 = write_delta_of(ckpt_4, "ckpt_5", held(2, {}, [1]), step=5)
    return {each.directory.name: each for each in (ckpt_1, ckpt_2, ckpt_3, ckpt_4, ckpt_5)}


def part_of(checkpoint):
    [part] = checkpoint.directory.glob("sparse/*.arrow")
    return part


class Resumed:
    """A run that starts, and the base that it is told of."""

    def __init__(self, root, slice=None):
        self.table, self.bases = HashTable(2, name="t", slice=slice), []
        saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(root), max_keep=None)
        saver.loader.on_whole_restore = lambda checkpoint, tables: self.bases.append((checkpoint.ckpt_id, *tables))
        self.saver, self.manager = saver, CheckpointManager(saver, 10)

    @property
    def rows(self):
        return dict(zip(self.table.ids().tolist(), map(tuple, self.table.embeddings().tolist()), strict=True))


def test_the_newest_delta_or_a_step_in_the_middle_is_a_whole_restore_and_a_load_that_breaks_off_is_none(
    tmp_path, chain
):
    run = Resumed(tmp_path)
    assert run.manager.restore() == 5
    assert run.rows == {2: (2.0, 2.0), 4: (4.0, 4.0)}
    assert run.bases == [("ckpt_5", run.table)]
    assert run.manager.restore(3) == 3
    assert run.rows == {1: (9.0, 9.0), 2: (2.0, 2.0)}
    run = Resumed(tmp_path)
    run.saver.load(ckpt_id="ckpt_4")
    run.saver.load(str(tmp_path / "ckpt_3"))
    flip_bit(part_of(chain["ckpt_5"]), 700)
    with pytest.raises(CorruptCheckpointError):
        run.saver.load(ckpt_id="ckpt_5")
    assert [name for name, _ in run.bases] == ["ckpt_4", "ckpt_3"]


@pytest.mark.parametrize(("damaged", "restored"), [("ckpt_5", 4), ("ckpt_4", 3), ("ckpt_3", 2), ("ckpt_2", 1)])
def test_damage_of_a_link_passes_over_all_that_stand_on_it_and_says_which(tmp_path, chain, caplog, damaged, restored):
    flip_bit(part_of(chain[damaged]), 700)
    run = Resumed(tmp_path)
    assert run.manager.restore() == restored
    assert run.bases == [(f"ckpt_{restored}", run.table)]
    what = "ckpt_5 is damaged" if damaged == "ckpt_5" else f"ckpt_5 is based on {damaged}, which is damaged"
    said = [record.message for record in caplog.records if "is damaged" in record.message]
    assert len(said) == 1, "links are read once"
    assert f"{what}, restoring ckpt_{restored} instead: {damaged}/sparse/" in said[0]


def test_where_all_stand_on_what_is_damaged_the_link_is_named(tmp_path, chain):
    for name in ("ckpt_1", "ckpt_2"):
        flip_bit(part_of(chain[name]), 700)
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/sparse/"):
        Resumed(tmp_path).manager.restore()
    with pytest.raises(CorruptCheckpointError, match="ckpt_2/sparse/"):
        Resumed(tmp_path).manager.restore(4)


@pytest.mark.parametrize("damaged", ["the form", "the chain"])
def test_where_a_form_or_the_chain_is_damaged_the_other_is_restored(tmp_path, chain, damaged):
    form = write_compacted(chain["ckpt_4"], {1: (9.0, 9.0), 2: (2.0, 2.0), 4: (4.0, 4.0)})
    flip_bit(part_of(form if damaged == "the form" else chain["ckpt_3"]), 700)
    for step, rows in ((5, {2, 4}), (4, {1, 2, 4})):
        run = Resumed(tmp_path)
        assert run.manager.restore(step if step == 4 else None) == step
        assert run.rows.keys() == rows


@pytest.mark.parametrize("n_rows", [3, 5])
def test_rows_that_no_rank_alone_can_count_are_counted_by_all(tmp_path, chain, n_rows):
    write_delta_of(chain["ckpt_5"], "ckpt_6", held(n_rows, {7: (7.0, 7.0), 8: (8.0, 8.0)}), step=6)

    def restore(rank, connect):
        run = Resumed(tmp_path, slice=gen_slice(rank, 3))
        connect(run.saver)
        manager = CheckpointManager(run.saver, 10, shard_id=rank, shard_num=3)
        with pytest.raises(CorruptCheckpointError, match=f"ckpt_6/manifest.json.*{n_rows} rows, expected 4, as in its"):
            manager.restore(6)
        assert run.bases == []
        return manager.restore(), run.rows, run.bases[0][0]

    found = on_ranks(3, restore)
    assert [(step, base) for step, _, base in found] == [(5, "ckpt_5")] * 3
    assert {id_: row for _, rows, _ in found for id_, row in rows.items()} == {2: (2.0, 2.0), 4: (4.0, 4.0)}


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_rows_in_no_slice_of_any_rank_are_warned_of_and_nothing_counts_from_such_a_restore(tmp_path, n_ranks, caplog):
    source = Resumed(tmp_path)
    source.table.insert(torch.arange(100), torch.ones(100, 2))
    source.saver.save("ckpt_1", step=1)

    def restore(rank, connect):
        run = Resumed(tmp_path, slice=gen_slice(rank, 3))  # and no rank has gen_slice(2, 3)
        connect(run.saver)
        manager = CheckpointManager(run.saver, 10, shard_id=rank, shard_num=n_ranks)
        assert manager.restore() == 1
        if n_ranks == 1:
            run.saver.load()
        return len(run.table), run.bases

    found = on_ranks(n_ranks, restore)
    n_rows = sum(n for n, _ in found)
    assert 0 < n_rows < 100
    assert all(bases == [] for _, bases in found)
    assert caplog.text.count(f"table 't': the ranks of this run hold {n_rows} of its 100 rows") == 1


@pytest.mark.parametrize(
    "conf",
    [
        {"load": ["sparse"]},
        {"exclude": ["dense"]},
        {"hashtable_clear": False},
        {"where": {"ids": [1, 2, 4]}},
        {"on_mismatch": "cast"},
    ],
)
def test_a_load_of_some_or_of_what_is_converted_is_none(tmp_path, chain, conf):
    run = Resumed(tmp_path)
    if "on_mismatch" in conf:
        run.table = HashTable(2, name="t", dtype=torch.float64)
        run.saver.model["t"] = run.table
    run.saver.load(ckpt_id="ckpt_5", load_conf=conf)
    assert run.rows.keys() == {2, 4}
    assert run.bases == []


def test_a_warm_start_is_none_and_a_resume_with_a_bank_that_is_not_needed_is_one(tmp_path, chain):
    cold, own = tmp_path / "cold", tmp_path / "own"
    run = Resumed(cold)
    run.manager.load_model_bank([{"path": str(tmp_path), "load": ["*"]}])
    assert run.rows.keys() == {2, 4}
    assert run.bases == []
    write_full(own, "ckpt_7", held(3, FULL), step=7)
    run = Resumed(own)
    run.manager.load_model_bank([{"path": str(tmp_path), "load": ["*"]}])
    assert run.manager.restore() == 7
    assert run.bases == [("ckpt_7", run.table)]
