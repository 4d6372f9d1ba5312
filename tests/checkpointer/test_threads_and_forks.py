"""A checkpointer among threads, forks and copies."""

import copy
import pickle

import pytest
import torch
from support.checkpointing import frozen
from support.crowd import crowd
from support.forked import in_fork
from support.sweeps import mostly_slow
from support.writer_hooks import Pausing

from recckpt.checkpointer import make_sync_checkpointer


@mostly_slow()
def test_each_file_holds_the_tensors_of_its_own_save_whatever_other_threads_save(make, kind, tmp_path):
    checkpointer = make(kind)
    n_saves, n_threads = 4, 4

    def state_of(name):
        return {"name": name, "w": torch.full((50_000 + name,), float(name))}

    def save_some(number):
        for name in range(number, n_saves * n_threads, n_threads):
            futures = checkpointer.save(state_of(name), tmp_path / str(name))
            assert futures is None or futures[1].result() is None

    assert crowd(n_threads, save_some) == [None] * n_threads
    for name in range(n_saves * n_threads):
        assert frozen(checkpointer.load(tmp_path / str(name))) == frozen(state_of(name))


@pytest.mark.slow
def test_a_checkpointer_used_in_a_forked_child_is_refused_and_does_not_hang(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    staged, written = checkpointer.save({"a": 1}, tmp_path / "c", pause=pipe.name)
    pipe.wait()
    uses = [
        lambda: checkpointer.save({"a": 2}, tmp_path / "d"),
        lambda: checkpointer.load(tmp_path / "c"),
        checkpointer.close,
        checkpointer.__enter__,
        written.result,
        written.exception,
        staged.result,
    ]
    said = [in_fork(use) for use in uses]
    pipe.go()
    written.result()
    assert all(text.startswith("ForkedError: this ") and "make a new one in the child" in text for text in said)
    assert f"made at {make.__globals__['__file__']}:" in said[0]
    assert checkpointer.load(tmp_path / "c") == {"a": 1}


def test_a_child_reads_and_saves_by_a_checkpointer_of_its_own(make, kind, tmp_path):
    make(kind).save({"a": 1}, tmp_path / "c")

    def work():
        with make_sync_checkpointer() as own:
            own.save({"b": 2}, tmp_path / "d")
            return own.load(tmp_path / "d")

    assert in_fork(work) == "{'b': 2}"


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_checkpointer_cannot_be_copied(make, kind, how):
    with pytest.raises(TypeError, match="Checkpointer cannot be copied or pickled"):
        how(make(kind))
