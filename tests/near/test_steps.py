"""What steps begin beside checkpoints: near saves, and what waits for gradients that are still to be used."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Deltas, Near, Saver, list_checkpoints
from recckpt.policies.when import EveryEventTime, EverySeconds
from recckpt.sparse import HashTable, SparseAdam

ACCUMULATED = 4


def made(root, rank=0, size=1, interval=None, **options):
    model = nn.ModuleDict({"t": HashTable(2, name="t")})
    model["t"].insert(torch.tensor([1]), torch.ones(1, 2))
    saver = Saver(model, output_dir=str(root / "runs"), deltas=True, near=Near(root / "near", interval))
    return CheckpointManager(saver, **{"save_interval": 10, **options}, shard_id=rank, shard_num=size)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("options", "size", "n_warnings"),
    [
        ({}, 1, 1),
        ({}, 2, 1),  # one rank warns for all
        ({"interval": 3}, 1, 0),
        ({"interval": EverySeconds(10)}, 1, 0),
        ({"interval": 30, "save_interval": EverySeconds(600)}, 1, 0),
    ],
)
def test_near_saves_without_an_interval_are_warned_of(tmp_path, caplog, options, size, n_warnings):
    on_ranks(size, lambda rank, connect: made(tmp_path, rank, size, **options))
    said = "near= has no interval: no near save will be made; give Near(PATH, interval=20)"
    assert [warning.startswith(said) for warning in warnings(caplog)] == [True] * n_warnings


@pytest.mark.parametrize(
    ("interval", "what"),
    [(10, "no near save is made"), (20, "no near save is made"), (15, "few near saves are made")],
)
def test_an_interval_that_is_not_below_that_of_checkpoints_is_warned_of(tmp_path, caplog, interval, what):
    manager = made(tmp_path, interval=interval)
    [warning] = warnings(caplog)
    assert warning.startswith(f"Near(interval={interval}) is not below save_interval=10: {what}, since a checkpoint")
    for _ in range(20):
        manager.step()
        manager.saver.near_saves.settle()
    assert (manager.counts.near > 0) == (what != "no near save is made")


@pytest.mark.parametrize("is_set", [False, True])
def test_near_saves_that_are_due_by_event_time_count_from_the_first_that_is_known(tmp_path, is_set):
    manager = made(tmp_path, interval=EveryEventTime(60), save_interval=1000)
    if is_set:
        manager.event_time = 10.0
    else:
        manager.step(event_time=10.0)
    for time in (50.0, 70.0, 80.0, 130.0):  # a checkpoint takes the place of the first, since there is none yet
        manager.step(event_time=time)
        manager.saver.near_saves.settle()
    assert (manager.counts.begun, manager.counts.near) == (1, 1)


@pytest.mark.parametrize(
    ("near", "said"),
    [
        ({"interval": 20}, "every 20 steps, copies=1 if there are several hosts"),
        ({"copies": 2, "interval": EverySeconds(10)}, f"(interval={EverySeconds(10)!r}), copies=2"),
        (None, ""),
    ],
)
def test_attach_says_where_near_saves_go_and_when(tmp_path, caplog, near, said):
    caplog.set_level("INFO", "recckpt")
    options = {} if near is None else {"near": Near(tmp_path / "near", **near)}
    CheckpointManager.attach(nn.Linear(1, 1), output_dir=tmp_path / "runs", save_interval=100, **options)
    assert "; save_interval=100, max_keep=2" in caplog.messages[-1]
    if said:
        assert caplog.messages[-1].endswith(f", near={tmp_path / 'near'} {said}")
    else:
        assert "near" not in caplog.messages[-1].replace(str(tmp_path), "")


def manager_of(tmp_path, interval=5, saver=None, **options):
    torch.manual_seed(0)
    table = HashTable(4, name="t")
    optim = SparseAdam([table], lr=0.1)
    optim.set_grad_accum_steps(ACCUMULATED)
    saver = Saver(table, optim, str(tmp_path / "run"), max_keep=None, **(saver or {}))
    return table, optim, CheckpointManager(saver, interval, **options)


def train(made, until):
    table, optim, manager = made
    while manager.global_step < until:
        ids = torch.arange(6) + manager.global_step
        (table(ids).square().sum() * (1 + manager.global_step)).backward()
        optim.step(), optim.zero_grad()
        manager.step()
    return table.eval()(torch.arange(40))


def steps_in(tmp_path):
    return [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path / "run"))]


def test_a_resumed_run_has_lost_no_gradients(tmp_path):
    whole = train(manager_of(tmp_path / "whole"), 24)
    train(manager_of(tmp_path), 11)
    again = manager_of(tmp_path)
    assert again[-1].restore() == 8
    assert torch.equal(train(again, 24), whole)
    assert steps_in(tmp_path) == [8, 12, 16, 20]  # due at 5, 10, 15 and 20
    assert again[-1].counts.dropped == 0


def test_a_near_save_is_put_off_too(tmp_path):
    saver = {"near": Near(tmp_path / "near", 3), "deltas": Deltas(max_dirty=1.0)}
    made = manager_of(tmp_path, 8, saver)
    train(made, 11)
    assert made[-1].counts.near == 0  # due at 3, where a checkpoint took its place, and 9
    train(made, 12)
    made[-1].saver.near_saves.settle()
    assert (made[-1].counts.near, steps_in(tmp_path)) == (1, [4, 8])


def test_a_signal_is_answered_after_the_update(tmp_path):
    made = manager_of(tmp_path, 100, save_on_signal="SIGUSR1")
    train(made, 5)
    os.kill(os.getpid(), signal.SIGUSR1)
    train(made, 7)
    assert steps_in(tmp_path) == []
    train(made, 8)
    assert steps_in(tmp_path) == [8]
    made[-1].close()


def test_a_signal_that_no_update_follows_is_followed_at_the_end(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        made = manager_of(tmp_path, 100, save_on_signal="SIGTERM")
        with made[-1]:
            train(made, 5)
            os.kill(os.getpid(), signal.SIGTERM)
            train(made, 6)
            assert made[-1].reached_preemption()
        assert (came, steps_in(tmp_path)) == ([signal.SIGTERM], [6])
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("steps", "n_warnings"), [(6, 1), (8, 0)])
def test_a_save_by_hand_that_loses_gradients_warns_and_one_that_is_put_off_is_made_at_the_close(
    tmp_path, caplog, steps, n_warnings
):
    made = manager_of(tmp_path, 100)
    train(made, steps)
    made[-1].save()
    assert steps_in(tmp_path) == [steps]
    assert (
        sum("the gradients accumulated so far are not saved" in record.message for record in caplog.records)
        == n_warnings
    )
    made = manager_of(tmp_path / "put off")
    train(made, 6)
    made[-1].close()
    assert steps_in(tmp_path / "put off") == [6]
