"""Saves that fail while training goes on: where that was asked for, and only so often."""

import pytest
import torch
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import RecckptError, SaveFailedError, WriterFencedError
from recckpt.inspect.watch import Watcher
from recckpt.manager import run_state
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies import Tolerate
from recckpt.policies.schedule import SaveCounts
from recckpt.policies.when import EverySeconds
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage


class Disk:
    """A local disk that is full now and then, for the files of some shards."""

    def __init__(self, patch, shard=""):
        self.is_full, self.n_failed, create = False, 0, LocalStorage.create

        def create_or_fail(storage, name):
            if self.is_full and name.rpartition("/")[2].startswith(shard):
                self.n_failed += 1
                raise OSError(28, "No space left on device", name)
            return create(storage, name)

        patch.setattr(LocalStorage, "create", create_or_fail)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def manager_of(root, save_interval=1, **options):
    return CheckpointManager(Saver(nn.Linear(1, 1), output_dir=str(root), max_keep=None), save_interval, **options)


def steps_in(manager):
    return [checkpoint.manifest.step for checkpoint in list_checkpoints(manager.saver.storage).committed]


def train(manager, n_steps):
    for _ in range(n_steps):
        manager.step()
        manager.saver._runner._worker.wait()  # a save in the background has ended


def test_a_rank_whose_last_save_raises_alone_lets_no_other_wait_at_the_end_of_with(tmp_path, monkeypatch):
    def work(rank, connect):
        saver = connect(Saver(nn.Linear(1, 1), output_dir=str(tmp_path)))
        manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=2)
        monkeypatch.setattr(
            manager._autosave, "finish", lambda: raising(SaveFailedError("c", 1, "alone")) if rank else 0
        )
        with manager:
            pass
        return rank

    with pytest.raises(SaveFailedError, match="alone"):
        on_ranks(2, work)


def raising(error):
    raise error


@pytest.mark.parametrize("async_save", [False, True])
def test_training_goes_on_without_the_saves_that_fail_and_says_so(tmp_path, disk, caplog, async_save):
    manager = manager_of(tmp_path, 2, async_save=async_save, on_save_error="warn")
    train(manager, 2)
    disk.is_full = True
    train(manager, 3)
    assert caplog.text.count("training continues; 1 consecutive failures, at 3 it stops") == 1
    assert "saving 'ckpt_4' failed on rank 0: OSError: [Errno 28] No space left on device" in caplog.text
    failed = Watcher(open_storage(str(tmp_path))).look().failed
    assert [(each.ckpt_id, each.step) for each in failed] == [("ckpt_4", 4)]
    disk.is_full = False
    train(manager, 1)
    manager.close()
    assert (manager.global_step, steps_in(manager), manager.counts.failed) == (6, [2, 6], 1)


@pytest.mark.parametrize("async_save", [False, True])
def test_so_many_failures_in_a_row_are_raised_and_a_good_save_begins_to_count_anew(tmp_path, disk, async_save):
    manager = manager_of(tmp_path, async_save=async_save, on_save_error=Tolerate(raise_after=2))
    for is_full, n_steps in ((True, 1), (False, 2), (True, 1)):
        disk.is_full = is_full
        train(manager, n_steps)
    with pytest.raises(SaveFailedError, match="No space left"):
        train(manager, 1 + async_save)
    assert manager.counts.failed == 3
    disk.is_full = False
    train(manager, 2)
    manager.close()
    assert steps_in(manager)[-1] == manager.global_step


def test_what_is_due_by_time_is_tried_again_when_it_is_due_and_not_at_each_step(tmp_path, disk, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])
    manager = manager_of(tmp_path, EverySeconds(10), on_save_error="warn")
    disk.is_full = True
    now[0] = 10.0
    train(manager, 1)
    n_failed = disk.n_failed
    now[0] = 19.0
    train(manager, 5)
    assert (disk.n_failed, manager.counts.failed) == (n_failed, 1)
    now[0] = 20.0
    train(manager, 1)
    assert manager.counts.failed == 2


def test_a_function_gets_the_error_and_may_stop_the_run(tmp_path, disk):
    errors = []

    def stop_at_second(error):
        errors.append(error.step)
        if len(errors) == 2:
            raise KeyError(error.step)

    manager = manager_of(tmp_path, on_save_error=stop_at_second)
    disk.is_full = True
    train(manager, 1)
    with pytest.raises(KeyError, match="2"):
        train(manager, 1)
    assert errors == [1, 2]


def test_calls_that_wait_for_a_save_raise_its_error_all_the_same(tmp_path, disk):
    def failing(root):
        manager = manager_of(root, 2, async_save=True, on_save_error="warn")
        disk.is_full = True
        train(manager, 2)
        return manager

    for number, wait in enumerate(("wait_until_finished", "save", "close")):
        with pytest.raises(SaveFailedError, match="'ckpt_2'"):
            getattr(failing(tmp_path / str(number)), wait)()
    with pytest.raises(SaveFailedError), failing(tmp_path / "block"):
        disk.is_full = False


def test_what_no_later_save_mends_is_raised_at_once_and_each_error_where_nothing_else_was_asked_for(tmp_path, disk):
    manager = manager_of(tmp_path, on_save_error="warn")
    with pytest.raises(ValueError, match="expected a number"):
        manager.step(metrics={"auc": "high"})
    train(manager, 1)
    later = manager_of(tmp_path)
    train(later, 1)  # takes the output dir over
    with pytest.raises(WriterFencedError):
        train(manager, 1)
    disk.is_full = True
    with pytest.raises(SaveFailedError):
        train(later, 1)
    assert later.counts == SaveCounts(begun=1, failed=1)


# several ranks


def on_two_ranks(root, work, **options):
    """Return what ``work(manager, rank)`` returned on each of two ranks, or the recckpt error that it raised."""

    def on_rank(rank, connect):
        table = HashTable(2, name="t", slice=gen_slice(rank, 2))
        ids = torch.arange(20)
        table(ids[table.slice.owns(ids)])
        saver = connect(Saver(nn.ModuleDict({"t": table}), output_dir=str(root), max_keep=None))
        manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=2, **options)
        try:
            return work(manager, rank)
        except RecckptError as error:
            return f"{type(error).__name__} after step {manager.global_step}: {error}"

    return on_ranks(2, on_rank)


def test_ranks_go_on_alike_and_raise_at_the_same_step_whichever_of_them_fails(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, shard="00001-of")

    def work(manager, rank):
        manager.step()
        manager.saver.ranks.of(rank, 2).gather(rank)
        disk.is_full = True
        for _ in range(9):
            manager.step()

    first, second = on_two_ranks(tmp_path, work, on_save_error=Tolerate(raise_after=4))
    assert first == second
    assert first.startswith("SaveFailedError after step 5: saving 'ckpt_5' failed on rank 1: OSError: [Errno 28]")


def test_what_a_function_raises_on_one_rank_stops_all(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, shard="00001-of")
    disk.is_full = True

    def work(manager, rank):
        manager.step()

    def on_save_error(error):
        if next(calls) == 0:
            raise KeyError("stop")

    calls = iter([0, 1])
    errors = on_two_ranks(tmp_path, work, on_save_error=on_save_error)
    assert all("on_save_error failed on rank" in error and "KeyError: 'stop'" in error for error in errors)
