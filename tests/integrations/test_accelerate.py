"""A loop of accelerate saves the model that it has prepared."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, SparseAdamW


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
    assert line.startswith("Adam trains 2 parameters of the model")


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
