"""What a manager says of its near saves when it is made: where they go and when, and what makes none."""

import pytest
import torch
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Near, Saver
from recckpt.policies.when import EverySeconds
from recckpt.sparse import HashTable


def made(root, rank=0, size=1, **options):
    model = nn.ModuleDict({"t": HashTable(2, name="t")})
    model["t"].insert(torch.tensor([1]), torch.ones(1, 2))
    saver = Saver(model, output_dir=str(root / "runs"), deltas=True, near=Near(root / "near"))
    return CheckpointManager(saver, **{"save_interval": 10, **options}, shard_id=rank, shard_num=size)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_near_saves_without_an_interval_are_warned_of(tmp_path, caplog):
    made(tmp_path)
    [warning] = warnings(caplog)
    assert warning.startswith("near= is given and no near_interval: none will be made; give near_interval=20")


def test_one_rank_warns_for_all(tmp_path, caplog):
    on_ranks(2, lambda rank, connect: made(tmp_path, rank, 2))
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("near_interval", "what"),
    [(10, "no near save is made"), (20, "no near save is made"), (15, "few near saves are made")],
)
def test_an_interval_that_is_not_below_that_of_checkpoints_is_warned_of(tmp_path, caplog, near_interval, what):
    manager = made(tmp_path, near_interval=near_interval)
    [warning] = warnings(caplog)
    assert warning.startswith(
        f"near_interval={near_interval} is not below save_interval=10: {what}, since a checkpoint"
    )
    for _ in range(20):
        manager.step()
        manager.saver.near_saves.settle()
    assert (manager.counts.near > 0) == (what != "no near save is made")


@pytest.mark.parametrize(
    "options",
    [
        {"near_interval": 3},
        {"near_interval": EverySeconds(10)},
        {"near_interval": 30, "save_interval": EverySeconds(600)},
    ],
)
def test_other_intervals_are_as_they_should_be(tmp_path, caplog, options):
    made(tmp_path, **options)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("copies", "near_interval", "said"),
    [
        (None, 20, "every 20 steps, copies=1 where there are several hosts"),
        (2, EverySeconds(10), f"(near_interval={EverySeconds(10)!r}), copies=2"),
    ],
)
def test_attach_says_where_near_saves_go_and_when(tmp_path, caplog, copies, near_interval, said):
    caplog.set_level("INFO", "recckpt")
    near = Near(tmp_path / "near", copies=copies)
    model, options = nn.Linear(1, 1), {"save_interval": 100, "near": near, "near_interval": near_interval}
    CheckpointManager.attach(model, output_dir=tmp_path / "runs", **options)
    assert "; save_interval=100, max_keep=2" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(f", near={tmp_path / 'near'} {said}")


def test_attach_says_nothing_of_near_saves_where_there_are_none(tmp_path, caplog):
    caplog.set_level("INFO", "recckpt")
    CheckpointManager.attach(nn.Linear(1, 1), output_dir=tmp_path / "runs", save_interval=100)
    assert "near" not in caplog.messages[-1].replace(str(tmp_path), "")
