"""What only one of several ranks meets or knows: all of them go on alike, and none waits for the others."""

import threading
from contextlib import suppress

import pytest
import torch
from support.builders import checkpoints
from support.thread_ranks import on_ranks

from recckpt import CheckpointManager, Saver
from recckpt.errors import LoadConfError, RecckptError, SaveFailedError
from recckpt.policies.when import WhenTrue
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage

SIZE = 2


def table_model(rank):
    table = HashTable(2, name="t", slice=gen_slice(rank, SIZE))
    ids = torch.arange(20)
    table(ids[table.slice.owns(ids)])
    return torch.nn.ModuleDict({"t": table})


def managers(tmp_path, work, *, interval=10**9, model=table_model, **options):
    """Return what ``work(rank, manager)`` returned on each rank, or raised."""

    def on_rank(rank, connect):
        saver = connect(Saver(model(rank), output_dir=str(tmp_path / "run")))
        manager = CheckpointManager(saver, interval, shard_id=rank, shard_num=SIZE, **options)
        try:
            return work(rank, manager)
        except RecckptError as error:
            return error

    return on_ranks(SIZE, on_rank)


def full_on_rank_1(monkeypatch):
    """Let parts of rank 1 fail for as long as the event is set."""
    is_full, create = threading.Event(), LocalStorage.create

    def create_or_fail(self, name):
        if is_full.is_set() and name.rpartition("/")[2].startswith("00001-of") and name.endswith(".arrow"):
            raise OSError(28, "No space left on device", name)
        return create(self, name)

    monkeypatch.setattr(LocalStorage, "create", create_or_fail)
    is_full.set()
    return is_full


def fail_in_the_background(rank, saver, is_full, everybody):
    """Let a save in the background fail, of which rank 0 alone is told."""
    handle = saver.save_async("a", rank, SIZE)
    with suppress(SaveFailedError):
        handle.committed.result()
    if rank == 0:
        with pytest.raises(SaveFailedError):
            handle.wait()
    everybody.wait(60)
    is_full.clear()


@pytest.mark.parametrize("by", ["saver", "manager", "restore"])
def test_a_failure_that_one_rank_was_told_of_is_raised_on_all_by_the_next_save_or_restore(tmp_path, monkeypatch, by):
    is_full, everybody = full_on_rank_1(monkeypatch), threading.Barrier(SIZE)

    def work(rank, manager):
        fail_in_the_background(rank, manager.saver, is_full, everybody)
        calls = {"manager": manager.save, "restore": manager.restore}
        call = calls.get(by, lambda: manager.saver.save("ckpt_0", rank, SIZE))
        with pytest.raises(SaveFailedError, match="saving 'a' failed on rank 1") as caught:
            call()
        return caught.value.ckpt_id, getattr(call(), "ckpt_id", 0)

    assert managers(tmp_path, work) == [("a", 0 if by == "restore" else "ckpt_0")] * SIZE
    assert checkpoints(tmp_path / "run") == ([] if by == "restore" else ["ckpt_0"])


def test_ranks_that_save_different_steps_are_refused(tmp_path):
    def on_rank(rank, connect):
        saver = connect(Saver(table_model(rank), output_dir=str(tmp_path)))
        with pytest.raises(SaveFailedError, match="rank 1: it saves 'c' of step 8, rank 0 'c' of step 7"):
            saver.save("c", rank, SIZE, step=7 + rank)
        with pytest.raises(SaveFailedError, match="rank 1: it saves 'd1' of step None, rank 0 'd0' of step None"):
            saver.save(f"d{rank}", rank, SIZE)
        return saver.save("c", rank, SIZE, step=8).step

    assert on_ranks(SIZE, on_rank) == [8] * SIZE
    assert checkpoints(tmp_path) == ["c"]


@pytest.mark.parametrize("what", ["metrics", "state"])
def test_a_metric_or_state_that_is_none_on_one_rank_fails_the_save_of_all(tmp_path, what):
    def work(rank, manager):
        with pytest.raises(SaveFailedError, match=rf"saving 'ckpt_1' failed on rank 1: ValueError: {what}\['auc'\]"):
            manager.step(**{what: {"auc": 1j if rank else 0.5}})
        manager.step(**{what: {"auc": 0.5}})
        return manager.global_step

    assert managers(tmp_path, work, interval=1) == [2] * SIZE
    assert checkpoints(tmp_path / "run") == ["ckpt_2"]


def test_a_rank_whose_metric_is_none_stays_in_step_and_one_whose_predicate_raises_fails_the_step_of_all(tmp_path):
    def without_a_save(rank, manager):
        if rank == 1:
            with pytest.raises(ValueError, match=r"metrics\['auc'\]: found 'high'"):
                manager.step(metrics={"auc": "high"})
        else:
            manager.step(metrics={"auc": 0.5})
        manager.step()

    def with_a_predicate(rank, manager):
        with pytest.raises(SaveFailedError, match="saving 'ckpt_1' failed on rank 1: KeyError: 'auc'"):
            manager.step(metrics={"auc": 0.9} if rank == 0 else {})
        manager.step(metrics={"auc": 0.9})

    good = WhenTrue(lambda now: now.metrics["auc"] > 0.5)
    for work, interval in ((without_a_save, 2), (with_a_predicate, good)):
        root = tmp_path / work.__name__
        assert managers(root, work, interval=interval) == [None] * SIZE
        assert checkpoints(root / "run") == ["ckpt_2"]


def with_a_new_table_on_rank_0(rank):
    model = table_model(rank)
    if rank == 0:
        model["new"] = HashTable(2, name="new")
    return model


def test_a_bank_that_gives_one_rank_a_table_lets_all_save_that_step(tmp_path):
    bank = Saver(torch.nn.ModuleDict({"new": HashTable(2, name="new")}), output_dir=str(tmp_path / "bank"))
    bank.save("ckpt_9", 0, 1, step=9)
    managers(tmp_path, lambda rank, manager: manager.save())

    def resume(rank, manager):
        manager.load_model_bank([{"path": str(tmp_path / "bank"), "ignore_error": True}])
        return [table.name for table in manager.save().tables], manager.save()

    assert managers(tmp_path, resume, model=with_a_new_table_on_rank_0) == [(["t", "new"], None)] * SIZE


def test_where_the_grace_ends_before_the_save_of_one_rank_does_none_begins_another(tmp_path):
    def work(rank, manager):
        if rank == 1:
            manager.saver.settle = lambda timeout_sec=None: False
        is_saved = manager._autosave._save_within(60.0, None, None)
        if rank == 1:
            del manager.saver.settle
        return is_saved, manager.save().ckpt_id

    assert managers(tmp_path, work) == [(False, "ckpt_0")] * SIZE


def test_a_load_conf_that_is_wrong_on_one_rank_fails_the_restore_of_all(tmp_path):
    managers(tmp_path, lambda rank, manager: (manager.step(), manager.save()))

    def work(rank, manager):
        with pytest.raises(LoadConfError, match="unknown key 'bogus'"):
            manager.restore(load_conf={"bogus": 1} if rank else None)
        return manager.restore()

    assert managers(tmp_path, work) == [1] * SIZE


def saved_once_the_storage_is_back(tmp_path, registered):
    """Let rank 1 not reach the output dir at the first of two saves; return what the first raised on each rank."""

    def on_rank(rank, connect):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1)
        saver = connect(Saver(model, output_dir=str(tmp_path)))
        saver.register_for_checkpointing("o", registered())
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(saver.storage, "check_there", lambda: (_ for _ in ()).throw(OSError(116, "stale handle")))
            with pytest.raises(SaveFailedError) as caught:
                saver.save("a", rank, SIZE)
        saver.save("b", rank, SIZE)
        return caught.value.cause

    return on_ranks(SIZE, on_rank)


class Registered:
    def state_dict(self):
        return {"large": torch.ones(1 << 19)}

    def load_state_dict(self, state):
        pass


def test_ranks_look_at_what_is_large_in_the_same_saves_though_one_could_not_take_its_state(tmp_path, caplog):
    assert saved_once_the_storage_is_back(tmp_path, Registered) == ["OSError: [Errno 116] stale handle"] * SIZE
    assert not caplog.records


def test_a_state_that_all_ranks_ask_for_together_waits_for_no_rank_that_has_failed(tmp_path):
    everybody = threading.Barrier(SIZE, timeout=20)

    class Collective(Registered):
        def state_dict(self):
            everybody.wait()
            return {"n": 1}

    assert saved_once_the_storage_is_back(tmp_path, Collective) == ["OSError: [Errno 116] stale handle"] * SIZE
