"""The Adagrad family of RecIS: a run there goes on here, and one from here there, as if it had never moved."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.conversions import write_recis
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.convert import export_checkpoint, import_checkpoint
from recckpt.errors import ConversionError
from recckpt.sparse import HashTable, SparseAdagrad, SparseRowWiseAdagrad, SparseRowWiseAdagradSum

DIM, ROWS = 5, 12
IDS = torch.arange(100, 100 + ROWS)
SETTINGS = {"lr": 0.1, "lr_decay": 0.05, "eps": 1e-10, "weight_decay": 0.01, "initial_accumulator_value": 0.25}


class RecisAdagrad:
    """The optimizer of RecIS on one table, by the description of its rule, in the operations of torch's Adagrad."""

    slot, step_name = "sparse_adagrad_state_sum", "sparse_adagrad_step"
    here = SparseAdagrad

    def __init__(self):
        random = torch.Generator().manual_seed(1)
        self.weights, self.step = torch.randn(ROWS, DIM, generator=random), 0
        self.sums = torch.full(self.shape, SETTINGS["initial_accumulator_value"])

    shape = (ROWS, DIM)

    def add_squares(self, sums, grads):
        return sums.addcmul(grads, grads)

    def update(self, rows, grads):
        self.step += 1
        lr = SETTINGS["lr"] / (1 + (self.step - 1) * SETTINGS["lr_decay"])
        grads = grads.add(self.weights[rows], alpha=SETTINGS["weight_decay"])
        sums = self.sums[rows] = self.add_squares(self.sums[rows], grads)
        self.weights[rows] = self.weights[rows].addcdiv(grads, sums.sqrt() + SETTINGS["eps"], value=-lr)


class RecisRowWiseAdagrad(RecisAdagrad):
    slot, step_name, shape = "sparse_row_wise_adagrad_state_sum", "sparse_row_wise_adagrad_step", (ROWS, 1)
    here = SparseRowWiseAdagrad

    def add_squares(self, sums, grads):
        return sums + (grads * grads).mean(1, keepdim=True)


BOTH = pytest.mark.parametrize("rule", [RecisAdagrad, RecisRowWiseAdagrad])


def batches(first, last):
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        yield torch.randperm(ROWS, generator=random)[:7], torch.randn(7, DIM, generator=random)


class Run:
    """A run here that trains one table as ``RecisAdagrad`` does."""

    def __init__(self, rule, path):
        self.table = HashTable(DIM, name="user")
        self.optimizer = rule.here([self.table], **SETTINGS)
        saver = Saver(nn.ModuleDict({"user": self.table}), self.optimizer, output_dir=path)
        self.manager = CheckpointManager(saver, save_interval=1000)

    def train(self, first, last):
        for rows, grads in batches(first, last):
            (self.table(IDS[rows]) * grads).sum().backward()
            self.optimizer.step()

    @property
    def rows(self):
        """The weights and sums in the order of the ids."""
        order = self.table.ids().argsort()
        return self.table.embeddings()[order], next(iter(self.table.slots.values()))[order]


def train_there(recis, first, last):
    for rows, grads in batches(first, last):
        recis.update(rows, grads)


def write_there(path, recis):
    blocks = {"id": IDS.numpy(), "embedding": recis.weights.numpy(), recis.slot: recis.sums.numpy()}
    return write_recis(path, {"user": blocks}, scalars={recis.step_name: np.array([recis.step])})


@BOTH
def test_a_run_of_recis_trains_on_here_bit_for_bit(tmp_path, rule):
    recis = rule()
    train_there(recis, 0, 10)
    import_checkpoint(write_there(tmp_path / "ckpt_10", recis), tmp_path / "out")
    run = Run(rule, tmp_path / "out")
    run.manager.restore()
    assert run.optimizer.state_dict()["state"] == {"user": {"step": 10}}

    run.train(10, 30)
    train_there(recis, 10, 30)

    weights, sums = run.rows
    assert torch.equal(weights, recis.weights)
    assert torch.equal(sums, recis.sums.view(sums.shape))


@BOTH
def test_a_run_from_here_trains_on_in_recis_bit_for_bit(tmp_path, rule):
    run, recis = Run(rule, tmp_path / "run"), rule()
    run.table.insert(IDS, recis.weights)
    run.train(0, 10)
    run.manager.saver.save("a", step=10)
    export_checkpoint(tmp_path / "run", tmp_path / "recis", to="recis")

    made = tmp_path / "recis/ckpt_10"
    blocks = load_file(made / "model-000000-of-000000.safetensors")
    order = blocks["user.id/part_0_1"].argsort()
    recis.weights = torch.from_numpy(blocks["user.embedding/part_0_1"][order])
    recis.sums = torch.from_numpy(blocks[f"user.{rule.slot}/part_0_1"][order])
    recis.step = blocks[f"{rule.step_name}^ "].item()
    assert (recis.sums.shape, recis.step) == (rule.shape, 10)
    keys = json.loads((made / "tensorkey.json").read_text())
    assert keys[f"user.{rule.slot}/part_0_1"] == f"user@{rule.slot}^00000@65536@65536"

    run.train(10, 30)
    train_there(recis, 10, 30)
    weights, sums = run.rows
    assert torch.equal(weights, recis.weights)
    assert torch.equal(sums, recis.sums.view(sums.shape))


ROW_WISE = "sparse_row_wise_adagrad_"


def row_wise(n_rows, seed=0):
    random = np.random.default_rng(seed)
    ids, embedding = np.arange(n_rows), random.standard_normal((n_rows, 2)).astype("f4")
    return {"id": ids, "embedding": embedding, f"{ROW_WISE}state_sum": random.random((n_rows, 1), dtype="f4")}


def imported(path, tables, **scalars):
    steps = {name: np.array([step]) for name, step in scalars.items()}
    done = import_checkpoint(write_recis(path / "ckpt_1", tables, scalars=steps), path / "out")
    return done.contents.extra.get("sparse_optim", {}), {left.name: left.reason for left in done.contents.left_out}


def test_row_wise_steps_come_table_by_table_also_of_names_that_read_two_ways(tmp_path):
    tables = {name: row_wise(3) for name in ("user", "sum", "Item 2_step")}
    steps = {f"{ROW_WISE}{name}_step": 5 + n for n, name in enumerate(tables)}
    state, left = imported(tmp_path, tables, **steps)
    assert state["state"] == {"user": {"step": 5}, "sum": {"step": 6}, "Item 2_step": {"step": 7}}
    assert not left.keys() & steps.keys()


def test_the_row_wise_optimizer_of_sums_comes_and_goes(tmp_path):
    slot, rows = f"{ROW_WISE}sum_state_sum", row_wise(3)
    rows[slot] = rows.pop(f"{ROW_WISE}state_sum")
    state, _ = imported(tmp_path, {"sum": rows}, **{f"{ROW_WISE}sum_step": 5})
    assert state["slots"] == list(SparseRowWiseAdagradSum.slot_names)
    assert state["state"] == {"sum": {"step": 5}}
    export_checkpoint(tmp_path / "out", tmp_path / "back", to="recis")
    blocks = load_file(tmp_path / "back/ckpt_1/model-000000-of-000000.safetensors")
    order = blocks["sum.id/part_0_1"].argsort()
    assert np.array_equal(blocks[f"sum.{slot}/part_0_1"][order], rows[slot])
    assert blocks[f"{ROW_WISE}sum_step^ "].tolist() == [5]


def test_row_wise_steps_go_table_by_table(tmp_path):
    model = nn.ModuleDict({name: HashTable(2, name=name) for name in ("user", "item", "never")})
    optimizer = SparseRowWiseAdagrad(list(model.values()))
    for table in (model["user"], model["item"], model["item"]):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    Saver(model, optimizer, output_dir=tmp_path / "run").save("a", step=4)
    done = export_checkpoint(tmp_path / "run", tmp_path / "all", to="recis")
    assert f"{ROW_WISE}step" in {left.name for left in done.left_out}
    blocks = load_file(tmp_path / "all/ckpt_4/model-000000-of-000000.safetensors")
    steps = {name.removesuffix("^ "): value.tolist() for name, value in blocks.items() if name.endswith("^ ")}
    assert steps == {f"{ROW_WISE}{name}_step": [n] for name, n in (("user", 1), ("item", 2), ("never", 0))}

    export_checkpoint(tmp_path / "run", tmp_path / "one", to="recis", tables=["item"])
    blocks = load_file(tmp_path / "one/ckpt_4/model-000000-of-000000.safetensors")
    assert blocks[f"{ROW_WISE}step^ "].tolist() == [2], "RecIS has no name of a table where there is one"


def test_what_does_not_come_with_an_optimizer_is_always_listed(tmp_path):
    strange = {**row_wise(3), "sparse_lion_exp_avg": np.ones((3, 2), "f4")}
    plain = {name: row_wise(3)[name] for name in ("id", "embedding")}
    steps = {f"{ROW_WISE}coalesced_abc_step": 9, f"{ROW_WISE}a_step": 4, "sparse_lion_step": 3, "sparse_adam_step": 2}
    state, left = imported(tmp_path, {"a": strange, "b": row_wise(4), "plain": plain}, **steps)
    assert state["state"] == {"a": {"step": 4}, "b": {"step": 9}}
    assert left.keys() == {
        f"{ROW_WISE}coalesced_abc_step",
        "sparse_lion_step",
        "sparse_adam_step",
        "table a, slot sparse_lion_exp_avg",
        "hyper-parameters of the sparse optimizer",
        "torch_rank_weights_embs_table_multi_shard.json",
    }
    assert "start from 9" in left[f"{ROW_WISE}coalesced_abc_step"]


def test_slots_without_a_step_and_steps_without_slots_are_listed(tmp_path):
    _, left = imported(tmp_path / "slots", {"a": row_wise(3)})
    assert "table a, steps" in left
    plain = {name: row_wise(3)[name] for name in ("id", "embedding")}
    state, left = imported(tmp_path / "step", {"a": plain}, sparse_adagrad_step=3)
    assert (state, "sparse_adagrad_step" in left) == ({}, True)


@pytest.mark.parametrize("step", [np.array([1, 2]), np.array([-1]), np.array([1.5]), np.array([np.nan])])
def test_a_step_that_is_no_count_is_refused(tmp_path, step):
    source = write_recis(tmp_path / "ckpt_1", {"a": row_wise(3)}, scalars={f"{ROW_WISE}step": step})
    with pytest.raises(ConversionError, match=f"dense '{ROW_WISE}step': found .*, expected a number of steps"):
        import_checkpoint(source, tmp_path / "out")
