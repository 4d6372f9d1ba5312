"""Saves and loads where tensors are made on another device by default: ``meta``, where no value is."""

import pytest
import torch
from support.builders import Run, state_of
from torch import nn

import recckpt
from recckpt import CheckpointManager
from recckpt.checkpointer import make_sync_checkpointer
from recckpt.sparse import HashTable, SparseAdam


@pytest.fixture
def on_meta():
    """Give what makes tensors on ``meta`` by default from then on."""
    before = torch.get_default_device()
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(before)


@pytest.mark.parametrize("deltas", [False, True])
def test_a_run_saves_and_resumes_whatever_the_default_device(tmp_path, on_meta, deltas):
    run, other = Run(tmp_path, deltas=deltas).train(3), Run(tmp_path, seed=1).train(1)
    on_meta()
    run.manager.save()
    torch.set_default_device("cpu")
    run.train(2)
    expected = state_of(run)
    on_meta()
    run.manager.save()
    assert other.manager.restore()
    torch.set_default_device("cpu")
    assert state_of(other) == expected


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.user = nn.Embedding(50, 4, sparse=True), HashTable(4, name="user")
        self.top = nn.Linear(8, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.item(ids), self.user(ids)], -1)).sum()


def pair(path, **options):
    model = Pair()
    live = [torch.optim.Adagrad(model.item.parameters(), 0.1), torch.optim.SGD(model.top.parameters(), 0.1)]
    optimizers = [SparseAdam([model.user], lr=0.1), *live]
    return model, optimizers, CheckpointManager.attach(model, optimizers, output_dir=path, save_interval=1, **options)


def test_attached_runs_with_live_tables_train_save_and_load_on_any_default_device(tmp_path, on_meta):
    model, optimizers, manager = pair(tmp_path)
    other, _, resumed = pair(tmp_path)
    evaluated, ids = Pair(), torch.arange(20)
    on_meta()
    with manager:
        for n in range(3):
            model(ids[: 20 - n]).backward()
            sparse, *others = optimizers
            sparse.step()
            with torch.device("cpu"):  # those of torch make tensors there
                for optimizer in others:
                    optimizer.step()
            model.zero_grad()
            sparse.zero_grad()
            manager.step()
    recckpt.load_into(evaluated, tmp_path)
    assert resumed.restore() == 3
    for loaded in (evaluated, other):
        assert torch.equal(loaded.item.weight, model.item.weight)
        assert torch.equal(loaded.user(ids), model.user(ids))


def test_a_checkpointer_saves_and_loads_on_any_default_device(tmp_path, on_meta):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": [torch.ones(2, dtype=torch.bfloat16)]}
    loaded = {"a": torch.zeros(2, 3), "b": [torch.zeros(2, dtype=torch.bfloat16)]}
    on_meta()
    checkpointer = make_sync_checkpointer()
    checkpointer.save(state, tmp_path / "ckpt")
    assert torch.equal(checkpointer.load(tmp_path / "ckpt")["a"], state["a"])
    checkpointer.load(tmp_path / "ckpt", loaded)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"][0], state["b"][0])
