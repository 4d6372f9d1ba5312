"""A loop of accelerate saves the model that it has prepared."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from recckpt import CheckpointManager, Saver, list_checkpoints
from recckpt.sparse import HashTable, JointOptimizer, SparseAdamW


def make(output_dir, *, registered=True):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    table = HashTable(4, name="t")
    plain = nn.ModuleDict({"t": table, "top": nn.Linear(4, 1)})
    model, dense = accelerator.prepare(plain, torch.optim.Adam(plain["top"].parameters(), lr=0.1))
    sparse = SparseAdamW([table], lr=0.1)
    saver = Saver(accelerator.unwrap_model(model), sparse, str(output_dir))
    if registered:
        saver.register_for_checkpointing("dense_optim", dense)
    return accelerator, model, dense, sparse, CheckpointManager(saver, 5)


def train(made, steps):
    accelerator, model, dense, sparse, manager = made
    while manager.global_step < steps:
        ids = torch.arange(8) + manager.global_step
        loss = model["top"](model["t"](ids)).square().mean()
        accelerator.backward(loss)
        dense.step(), sparse.step()
        dense.zero_grad(), sparse.zero_grad()
        manager.step()
    return model["t"](torch.arange(30)), model["top"].weight


def test_a_loop_of_accelerate_resumes_bit_for_bit(tmp_path):
    whole = train(make(tmp_path / "whole"), 20)
    train(make(tmp_path / "ended"), 13)
    again = make(tmp_path / "ended")
    assert again[-1].restore() == 10
    assert all(map(torch.equal, whole, train(again, 20)))


def test_a_prepared_optimizer_is_missing_once_where_it_is_not_registered_and_never_where_it_is(tmp_path, caplog):
    train(make(tmp_path / "all"), 10)
    assert [record.getMessage() for record in caplog.records if "train" in record.getMessage()] == []
    train(make(tmp_path / "less", registered=False), 15)
    (line,) = (record.getMessage() for record in caplog.records if "train" in record.getMessage())
    assert line.startswith("2 parameters of the model ('top.weight', 'top.bias') train")


def attached(output_dir):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    plain = nn.ModuleDict({"t": HashTable(4, name="t"), "top": nn.Linear(4, 1)})
    dense = torch.optim.Adam(plain["top"].parameters(), lr=0.1)
    made = plain, DataLoader(torch.arange(80), batch_size=4), dense, SparseAdamW([plain["t"]], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(dense, 5)
    model, loader, dense, sparse, schedule = accelerator.prepare(*made, schedule)
    optimizers = [dense, sparse]
    manager = CheckpointManager.attach(
        model, optimizers, schedulers=schedule, loader=loader, output_dir=output_dir, save_interval=5
    )
    return accelerator, model, optimizers, schedule, loader, manager


def train_attached(made, steps):
    accelerator, model, optimizers, schedule, loader, manager = made
    seen = []
    with manager:
        for ids in loader:
            seen += ids.tolist()
            accelerator.backward(model["top"](model["t"](ids)).square().mean())
            for each in (*optimizers, schedule):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            manager.step()
            if manager.global_step == steps:
                break
    return seen, model["t"].eval()(torch.arange(80)), model["top"].weight, schedule.get_last_lr()


def test_all_that_accelerate_has_prepared_is_attached_and_resumed(tmp_path):
    seen, *whole = train_attached(attached(tmp_path / "whole"), 15)
    begun, *_ = train_attached(attached(tmp_path / "ended"), 8)
    again = attached(tmp_path / "ended")
    assert again[-1].restore() == 8
    went_on, *resumed = train_attached(again, 15)
    assert begun + went_on == seen
    assert all(map(torch.equal, whole[:2], resumed[:2]))
    assert whole[2] == resumed[2]


def accumulating(output_dir):
    torch.manual_seed(0)
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, dataloader_config=config)
    plain = nn.ModuleDict({"t": HashTable(4, name="t"), "top": nn.Linear(4, 1)})
    optimizers = torch.optim.Adam(plain["top"].parameters(), lr=0.1), SparseAdamW([plain["t"]], lr=0.1)
    loader = DataLoader(torch.arange(96), batch_size=4)
    model, loader, dense, sparse = accelerator.prepare(plain, loader, *optimizers)
    manager = CheckpointManager.attach(
        model, [dense, sparse], loader=loader, output_dir=output_dir, save_interval=5, max_keep=None
    )
    return accelerator, model, dense, sparse, loader, manager


def train_accumulating(made, steps):
    accelerator, model, dense, sparse, loader, manager = made
    for ids in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model["top"](model["t"](ids)).square().mean() * (1 + manager.global_step))
            dense.step(), sparse.step()
            dense.zero_grad(), sparse.zero_grad()
        manager.step()
        if manager.global_step == steps:
            break
    manager.wait_until_finished()
    return model["t"].eval()(torch.arange(96)), model["top"].weight


def test_a_save_is_put_off_to_the_end_of_the_window_of_accelerate(tmp_path):
    whole = train_accumulating(accumulating(tmp_path / "whole"), 24)
    train_accumulating(accumulating(tmp_path / "ended"), 11)
    again = accumulating(tmp_path / "ended")
    assert again[-1].restore() == 8  # due at 5
    assert all(map(torch.equal, whole, train_accumulating(again, 24)))
    assert [one.step for one in list_checkpoints(str(tmp_path / "ended"))] == [8, 12, 16, 20]


@pytest.mark.parametrize("joint", [False, True])
def test_optimizers_that_accelerate_has_prepared_are_not_said_to_be_missing(tmp_path, joint):
    accelerator = Accelerator(cpu=True)
    plain = nn.ModuleDict({"t": HashTable(4, name="t"), "top": nn.Linear(4, 1)})
    optimizers = [torch.optim.Adam(plain["top"].parameters(), lr=0.1), SparseAdamW([plain["t"]], lr=0.1)]
    prepared = [accelerator.prepare(one) for one in ([JointOptimizer(*optimizers)] if joint else optimizers)]
    model = accelerator.prepare(plain)
    manager = CheckpointManager.attach(model, prepared, output_dir=tmp_path / "run", save_interval=1, async_save=False)
    accelerator.backward(model["top"](model["t"](torch.arange(8))).square().mean())
    for optimizer in prepared:
        optimizer.step()
    manager.step()
    training = json.loads((tmp_path / "run/ckpt_1/manifest.json").read_text())["training"]
    assert training == {"optimizers": {"dense_optim": ["Adam"]}}


def shuffled(output_dir, seed, seedable, *, restored=None):
    """Train to step 7, in epochs of three, from a checkpoint or anew; return the batches and weights."""
    torch.manual_seed(seed)
    loaders = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders)
    plain = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
    data = DataLoader(torch.arange(20.0).unsqueeze(1), batch_size=7, shuffle=True)
    model, dense, loader = accelerator.prepare(plain, torch.optim.Adam(plain.parameters()), data)
    where = {
        "output_dir": str(output_dir),
        "save_interval": 1 if restored is None else 100,
        "max_keep": None,
        "async_save": False,
    }
    manager = CheckpointManager.attach(model, dense, loader=loader, **where)
    if restored is not None:
        manager.restore(restored)
    batches = []
    while manager.global_step < 7:
        for batch in loader:
            model(batch).sum().backward()
            dense.step(), dense.zero_grad()
            batches.append(batch.flatten().tolist())
            manager.step()
            if manager.global_step == 7:
                break
    return batches, [parameter.tolist() for parameter in plain.parameters()]


@pytest.mark.parametrize("seedable", [False, True])
def test_a_shuffling_loader_that_accelerate_has_prepared_resumes_bit_for_bit_at_each_step(tmp_path, seedable):
    batches, weights = shuffled(tmp_path / "whole", 0, seedable)
    for step in range(1, 7):
        resumed, again = shuffled(tmp_path / "whole", 7, seedable, restored=step)
        assert (resumed, again) == (batches[step:], weights), step
