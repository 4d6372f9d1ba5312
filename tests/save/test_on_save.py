"""What ``on_save`` is told of saves that are committed, and of those that fail."""

import errno

import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, Saver, is_checkpoint
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.sparse import HashTable
from recckpt.storage.local import LocalStorage


class Breaks:
    """State that cannot be taken."""

    broken = False

    def state_dict(self):
        if self.broken:
            raise RuntimeError("out of order")
        return {}

    def load_state_dict(self, state):
        pass


def saver_of(url, told):
    table = HashTable(2, name="t")
    table(torch.arange(5))
    return Saver(nn.ModuleDict({"t": table}), output_dir=str(url), max_keep=None, on_save=told.append)


def test_a_save_is_told_with_its_path_and_metrics(url):
    told = []
    saver = saver_of(url, told)
    CheckpointManager(saver, 1, async_save=True).step(metrics={"auc": 0.5}, state={"note": "x"})
    saver.settle()
    [info] = told
    assert (info.error, info.metrics, info.step) == (None, {"auc": 0.5}, 1)
    assert is_checkpoint(info.path)


def test_a_save_whose_state_cannot_be_taken_is_told_with_its_error(tmp_path):
    told = []
    saver, part = saver_of(tmp_path, told), Breaks()
    saver.register_for_checkpointing("part", part)
    part.broken = True
    with pytest.raises(RuntimeError, match="out of order") as caught:
        saver.save("a", step=3)
    assert [(info.ckpt_id, info.step, info.error, info.path) for info in told] == [("a", 3, caught.value, "")]
    part.broken = False
    saver.save("b")
    assert [(info.ckpt_id, info.error) for info in told[1:]] == [("b", None)]


def test_a_save_that_is_in_place_is_told_with_its_path_though_it_may_be_lost(tmp_path, monkeypatch):
    told = []
    saver = saver_of(tmp_path, told)

    def fail(storage, name):
        if not name and (tmp_path / "a/manifest.json").exists():
            raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "sync_dir", fail)
        with pytest.raises(CommitNotDurableError, match="'a' is in place") as caught:
            saver.save("a")
    assert [(info.error, info.path) for info in told] == [(caught.value, str(tmp_path / "a"))]
    assert is_checkpoint(told[0].path)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_cannot_be_written_is_told_with_its_error(tmp_path, background, monkeypatch):
    told = []
    saver = saver_of(tmp_path, told)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recckpt.save.save.write", full)
    with pytest.raises(SaveFailedError, match=r"rank 0: OSError: .*No space left"):
        (saver.save_async if background else saver.save)("a").wait()  # type: ignore[union-attr]
    [info] = told
    assert "No space left" in str(info.error)
    assert (info.path, info.n_bytes) == ("", 0)
