"""Saves in the background: what they wait for, and to whom their errors go."""

import gc
import os
import sys
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest
import torch
from support.checkpointing import frozen, save
from support.writer_hooks import Failing, Noting, Pausing, notes

from recckpt.checkpointer import make_sync_checkpointer
from recckpt.errors import SaveFailedError


def gone(pid):
    """Say whether a process has ended and has been waited for."""
    return not Path(f"/proc/{pid}").exists()


def test_training_may_change_the_state_once_it_is_staged(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    state = {"w": torch.arange(1000.0), "nested": [torch.ones(3)], "step": 1}
    expected = frozen(state)
    staged, written = checkpointer.save(state, tmp_path, pause=pipe.name)
    staged.result()
    state["w"].zero_()
    state["nested"][0].add_(1)
    state["step"] = 2
    pipe.wait()
    assert [written.done(), written.cancel(), staged.cancel()] == [False] * 3
    pipe.go()
    written.result()
    assert frozen(checkpointer.load(tmp_path)) == expected


def test_a_save_and_a_load_wait_for_the_save_before(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    checkpointer.save({"a": 1}, tmp_path / "c", pause=pipe.name)
    pipe.wait()
    loaded = []
    waiting = threading.Thread(target=lambda: loaded.append(checkpointer.load(tmp_path / "c")))
    waiting.start()  # there is no file before the pipe is opened
    pipe.go()
    waiting.join()
    assert loaded == [{"a": 1}]


def test_saves_are_written_in_the_order_in_which_they_were_asked_for(make, tmp_path):
    checkpointer = make(commit_hook=Noting(tmp_path))
    for step in range(20):
        checkpointer.save({"w": torch.full((100,), float(step))}, tmp_path / "c", step=step)
    assert checkpointer.load(tmp_path / "c")["w"].eq(19).all()
    assert [kwargs["step"] for _, _, _, kwargs in notes(tmp_path)] == [step for step in range(20) for _ in "ab"]


def test_an_error_that_the_future_has_given_is_not_raised_again_and_has_its_cause_and_where_it_was(make, tmp_path):
    checkpointer = make(commit_hook=Failing())
    for look in ("result", "exception"):
        _, written = checkpointer.save({"a": 1}, tmp_path, fail="pre")
        try:
            error = getattr(written, look)()
        except SaveFailedError as raised:
            assert look == "result"
            error = raised
        assert isinstance(error, SaveFailedError)
        assert isinstance(error.__cause__, LookupError)
        assert "writer_hooks.py" in str(error.__cause__.__cause__)
        save(checkpointer, {"a": look}, tmp_path)
        assert checkpointer.load(tmp_path) == {"a": look}
    _, written = checkpointer.save({"a": 1}, tmp_path, fail="unpicklable")
    assert "LocalError: from nowhere" in str(written.exception().__cause__)


def test_an_error_that_nobody_has_seen_is_raised_once_by_the_next_save_or_at_the_close(make, tmp_path):
    checkpointer = make(commit_hook=Failing())
    checkpointer.save({"a": 1}, tmp_path, fail="pre")
    with pytest.raises(SaveFailedError, match="not today"):
        checkpointer.save({"a": 2}, tmp_path)
    assert not (tmp_path / "checkpoint_0.pt").exists()
    save(checkpointer, {"a": 3}, tmp_path)
    assert checkpointer.load(tmp_path) == {"a": 3}
    checkpointer.save({"a": 4}, tmp_path, fail="post")
    with pytest.raises(SaveFailedError, match="not today"):
        checkpointer.close()
    checkpointer.close()


def test_what_a_block_raises_is_not_hidden_by_a_save_that_failed(make, tmp_path, caplog):
    (tmp_path / "file").touch()
    checkpointer = make()
    checkpointer.save({"a": 1}, tmp_path / "file")
    with pytest.raises(KeyError), checkpointer:
        raise KeyError
    assert f"saving '{tmp_path / 'file'}' failed" in caplog.text


def test_a_wait_that_was_too_short_has_not_seen_the_error(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    _, written = checkpointer.save({"a": 1}, tmp_path, pause=pipe.name)
    pid = pipe.wait()
    for look in (written.result, written.exception):
        with pytest.raises(FutureTimeoutError):
            look(timeout=0)
    os.kill(pid, 9)
    with pytest.raises(SaveFailedError, match="SIGKILL"):
        checkpointer.save({"a": 2}, tmp_path)


def test_what_cannot_reach_the_writer_process_is_refused_at_once(make, tmp_path):
    with pytest.raises(ValueError, match="subprocess_init_fn cannot be sent to the writer process"):
        make(subprocess_init_fn=lambda: None)
    checkpointer = make()
    with pytest.raises(ValueError, match="the keyword arguments for the hook cannot be sent"):
        checkpointer.save({"a": 1}, tmp_path, lock=threading.Lock())
    local = type("Local", (), {"__module__": "__main__"})
    sys.modules["__main__"].Local = local
    try:
        with pytest.raises(ValueError, match="is defined in the script that runs; move it to a module"):
            checkpointer.save({"a": 1}, tmp_path, thing=local())
    finally:
        del sys.modules["__main__"].Local
    save(checkpointer, {"a": 1}, tmp_path)


def test_the_memory_of_one_process_is_no_place_for_another_to_write_to(make, memory_url):
    with pytest.raises(
        ValueError, match="the writer process gets a copy, so writes to its memory are lost; use a SyncCheckpointer"
    ):
        make().save({"a": 1}, memory_url)
    with make_sync_checkpointer() as checkpointer:
        checkpointer.save({"a": torch.ones(2)}, memory_url)
        checkpointer.save({"a": torch.zeros(2)}, memory_url)
        assert checkpointer.load(memory_url)["a"].tolist() == [0, 0]
        with pytest.raises(FileNotFoundError):
            checkpointer.load(f"{memory_url}/elsewhere")


def test_a_checkpointer_that_is_forgotten_ends_its_process_and_prints_an_error_nobody_saw(tmp_path, capsys, make):
    checkpointer = make(commit_hook=Failing())
    _, written = checkpointer.save({"a": 1}, tmp_path, fail="pre")
    process = checkpointer._process
    process._writes.finish()  # the write has ended
    pid = process.pid
    make.made.clear()
    del checkpointer, process, written
    gc.collect()
    assert gone(pid)
    assert "LookupError: not today" in capsys.readouterr().err
