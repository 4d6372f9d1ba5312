"""A save as a whole: what it writes, keeps and refuses, and how often its ranks meet."""

import errno
import json
import logging
from importlib.metadata import version

import pytest
import torch
from support.builders import OPTIMIZERS, ClickModel, Run, checkpoints, tree
from support.thread_ranks import Wire, on_ranks
from torch import nn

from recckpt import Saver
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage


def test_a_save_leaves_the_files_of_the_format_and_nothing_else(tmp_path):
    run = Run(tmp_path, interval=2).train(2)
    assert set(tree(tmp_path)) == {
        ".recckpt",
        ".recckpt/owner",
        ".recckpt/owner/1.json",
        ".recckpt/owner/1.list.json",
        "checkpoint",
        "timeline.jsonl",
        "ckpt_2",
        "ckpt_2/INTENT",
        "ckpt_2/dense",
        "ckpt_2/dense/00000-of-00001.json",
        "ckpt_2/extra.pt",
        "ckpt_2/io_state_0.pt",
        "ckpt_2/manifest.json",
        "ckpt_2/model.pt",
        "ckpt_2/rng_0.pt",
        "ckpt_2/sparse",
        "ckpt_2/sparse/00000-of-00001.g0.00.arrow",
        "ckpt_2/sparse/00000-of-00001.json",
    }
    manifest = list_checkpoints(run.saver.storage).committed[0].manifest
    assert {file.name for file in manifest.files} == {
        name.removeprefix("ckpt_2/")
        for name, data in tree(tmp_path).items()
        if data is not None and name.startswith("ckpt_2/") and not name.endswith(("INTENT", "manifest.json"))
    }


def test_the_manifest_that_is_returned_is_the_one_on_disk(tmp_path):
    model = ClickModel()
    model.users(torch.arange(5))
    saver = Saver(model, OPTIMIZERS["adam"](model.tables), str(tmp_path))
    returned = saver.save("c", step=7, state={"auc": 0.5})
    assert list_checkpoints(saver.storage).committed[0].manifest == returned
    assert (returned.step, returned.seq, returned.state) == (7, 1, {"sparse_lr_0": 0.01, "auc": 0.5})
    assert {table.name: table.rows for table in returned.tables} == {"user/1": 5, "item": 0}
    assert returned.writer["torch"] == version("torch")  # of the wheel: torch may add how it was built
    on_disk = json.loads((tmp_path / "c" / "manifest.json").read_text())
    intent = json.loads((tmp_path / "c" / "INTENT").read_text())
    assert on_disk["save_id"] == intent["save_id"] == returned.save_id


@pytest.mark.parametrize("save", [Saver.save, Saver.save_async])
def test_the_state_of_a_model_is_asked_for_once(tmp_path, monkeypatch, save):
    model, calls = ClickModel(), []
    saver = Saver(model, output_dir=str(tmp_path))
    state_dict = model.state_dict
    monkeypatch.setattr(model, "state_dict", lambda: calls.append(None) or state_dict())
    save(saver, "c")
    saver.close()
    assert len(calls) == 1


def test_a_tensor_whose_name_is_half_a_surrogate_pair_is_refused_before_anything_is_written(tmp_path):
    saver = Saver(nn.ModuleDict({"tower\ud83d": nn.Linear(2, 2)}), None, str(tmp_path))
    with pytest.raises(ValueError, match=r"'tower\\ud83d.weight' of the model cannot be saved: expected a name"):
        saver.save("ckpt_1")
    assert not list(tmp_path.glob("ckpt_*"))
    whole = Saver(nn.ModuleDict({"tower😀": nn.Linear(2, 2)}), None, str(tmp_path))
    whole.save("ckpt_2")
    whole.load("ckpt_2")


def test_checkpoints_are_numbered_in_the_order_of_their_commits(tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path), max_keep=2)
    assert [saver.save(ckpt_id).seq for ckpt_id in ("b", "a", "c")] == [1, 2, 3]
    assert Saver(nn.Linear(1, 1), output_dir=str(tmp_path)).save("d").seq == 4


def test_one_line_is_logged_for_a_save_and_for_a_load_and_one_for_each_checkpoint_that_was_taken_from(tmp_path, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    model = ClickModel()
    model.users(torch.arange(1000))
    saver = Saver(model, output_dir=str(tmp_path))
    saver.save("c")
    saver.load()
    *lines, taken = [record.getMessage() for record in caplog.records]
    assert [line.split(" in ")[0] for line in lines] == [
        "saving c: 1,000 rows, 26.0 kB",
        "loading c: 1,000 rows, 24.0 kB",
    ]
    assert all(line.endswith("B/s)") for line in lines)
    assert taken.startswith(f"{tmp_path}/c: 2 tables, 1,000 rows, 7 tensors, ")


class Fault:
    """Makes the call of a method that has a given number fail; for ever: those after it, too."""

    def __init__(self, patch, owner, method, number, *, for_ever, code=errno.EIO):
        self.calls = 0
        real = getattr(owner, method)

        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == number or (for_ever and self.calls > number):
                raise OSError(code, "injected")
            return real(*args, **kwargs)

        patch.setattr(owner, method, call)


def build(url):
    table = HashTable(2, name="t")
    optim = OPTIMIZERS["adagrad"]([table])
    return table, Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), optim, str(url), concurrency=1)


def test_a_failed_save_keeps_no_room(tmp_path, monkeypatch):
    table, saver = build(tmp_path)
    table(torch.arange(1000))
    with monkeypatch.context() as patch:
        Fault(patch, LocalStorage, "sync_dir", 3, for_ever=True, code=errno.ENOSPC)  # the first of the commit
        with pytest.raises(SaveFailedError, match="injected"):
            saver.save("c")
    assert {name for name in tree(tmp_path) if not name.startswith(".recckpt")} == {
        "c",
        "c/INTENT",
        "c/dense",
        "c/sparse",
        "timeline.jsonl",
    }
    saver.save("c")
    assert checkpoints(tmp_path) == ["c.1"]
    assert not (tmp_path / "c").exists()


def test_a_commit_that_fails_after_the_manifest_is_visible_says_so_and_keeps_the_older_ones(tmp_path, monkeypatch):
    _, saver = build(tmp_path)
    saver.save("old")
    with monkeypatch.context() as patch:
        Fault(patch, LocalStorage, "sync_dir", 4, for_ever=False)  # that of the output dir, the last
        with pytest.raises(CommitNotDurableError, match="'new' is in place, but the storage failed"):
            saver.save("new")
    assert checkpoints(tmp_path) == ["new", "old"]
    saver.save("new", overwrite=True)
    assert checkpoints(tmp_path) == ["new.1"]


def test_a_commit_of_which_the_storage_does_not_tell_what_became_says_that_it_may_be_in_place(tmp_path, monkeypatch):
    _, saver = build(tmp_path)
    saver.save("old")
    put = saver.storage.put_if_absent
    with monkeypatch.context() as patch:

        def fail(name, *_):
            raise OSError(errno.EIO, "injected", name)

        def put_all_but_the_manifest(name, data):
            if name.endswith("manifest.json"):
                patch.setattr(saver.storage, "read", fail)
                fail(name)
            put(name, data)

        patch.setattr(saver.storage, "put_if_absent", put_all_but_the_manifest)
        with pytest.raises(CommitNotDurableError, match="'new' may be in place, but the storage failed") as failure:
            saver.save("new")
    assert not failure.value.is_in_place
    assert checkpoints(tmp_path) == ["old"]
    saver.save("new")
    assert checkpoints(tmp_path) == ["new.1"]


def test_a_failed_tidying_up_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    _, saver = build(tmp_path)
    saver.save("old")
    with monkeypatch.context() as patch:
        Fault(patch, LocalStorage, "remove", 1, for_ever=True)
        Fault(patch, LocalStorage, "replace", 1, for_ever=True)
        saver.save("new")
    assert checkpoints(tmp_path) == ["new", "old"]
    assert "could not remove all of" in caplog.text
    assert "could not bring rotation, index file and timeline up to date" in caplog.text
    saver.save("newer")
    assert checkpoints(tmp_path) == ["newer"]
    assert (tmp_path / "checkpoint").read_text() == "newer\n"


def wire_of_a_save(root, size, **options):
    """Return what was sent for the second save of a job: the first has a directory to take over."""
    wire = Wire(size)

    def on_rank(rank, connect):
        table = HashTable(2, name="t", slice=gen_slice(rank, size))
        ids = torch.arange(100)
        table(ids[table.slice.owns(ids)])
        model = nn.ModuleDict({"t": table, "top": nn.Linear(2, 1, bias=False)})
        with torch.no_grad():
            model["top"].weight.fill_(1)
        saver = connect(Saver(model, output_dir=str(root), concurrency=1, **options))
        saver.save("a", rank, size)
        wire.barrier.wait(60)
        if rank == 0:
            wire.messages.clear()
            wire.n_bytes = 0
        wire.barrier.wait(60)
        saver.save("b", rank, size)

    on_ranks(size, on_rank, wire)
    return wire


@pytest.mark.parametrize("deltas", [False, True])
def test_the_ranks_of_a_save_meet_four_times(tmp_path, deltas):
    wire = wire_of_a_save(tmp_path, 2, deltas=deltas)
    assert wire.messages == ["gather", "broadcast", "broadcast", "gather", "broadcast"]


def test_what_crosses_the_wire_grows_with_the_ranks_and_not_with_their_square(tmp_path):
    sizes = {size: wire_of_a_save(tmp_path / str(size), size).n_bytes for size in (2, 4, 8, 16)}
    a_rank = (sizes[8] - sizes[4]) / 4
    assert (sizes[4] - sizes[2]) / 2 == pytest.approx(a_rank, rel=0.1)
    assert (sizes[16] - sizes[8]) / 8 == pytest.approx(a_rank, rel=0.1)
