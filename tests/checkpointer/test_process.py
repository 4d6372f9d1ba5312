"""The writer process: killed, interrupted, orphaned, and what it has of its parent."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.checkpointing import everything, frozen, save
from support.paths import PYTHONPATH
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.writer_hooks import Pausing, Reporting, fail_to_set_up, linger, notes, set_up

from recckpt.checkpointer import PartlyCommittedError, make_async_checkpointer, make_sync_checkpointer
from recckpt.checkpointer.process import DiedError
from recckpt.errors import ForkedError, SaveFailedError


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


def works(checkpointer, path):
    state = everything()
    save(checkpointer, state, path)
    return frozen(checkpointer.load(path)) == frozen(state)


def test_a_process_that_died_while_idle_is_replaced_and_no_save_fails(make, tmp_path):
    checkpointer = make()
    pids = [checkpointer._process.pid]
    kill(pids[0])  # it may not even have started
    for step in range(3):
        assert works(checkpointer, tmp_path / str(step))
        pids.append(checkpointer._process.pid)
        kill(pids[-1])
    assert works(checkpointer, tmp_path / "last")
    assert len(set(pids)) == 4
    assert all(map(gone, pids))


def test_a_process_that_dies_while_it_writes_fails_that_save_and_no_other(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    save(checkpointer, {"a": "old"}, tmp_path / "c")
    _, written = checkpointer.save({"a": "new"}, tmp_path / "c", pause=pipe.name)
    pid = pipe.wait()
    assert pid == checkpointer._process.pid
    assert len(list((tmp_path / "c").iterdir())) == 2
    kill(pid)
    with pytest.raises(SaveFailedError, match=f"writer process {pid} was ended by SIGKILL; nothing") as caught:
        written.result()
    assert isinstance(caught.value.__cause__, DiedError)
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["checkpoint_0.pt"]
    assert checkpointer.load(tmp_path / "c") == {"a": "old"}
    assert gone(pid)
    assert checkpointer._process.pid != pid  # another one is warm already
    assert works(checkpointer, tmp_path / "c")


def test_what_a_dead_process_left_is_cleared_away_and_nothing_else(make, pipe, tmp_path):
    others = ["checkpoint_0.pt.old", "checkpoint_1.pt.0123456789abcdef.tmp", "deep/checkpoint_0.pt.ab.tmp", "notes.tmp"]
    (tmp_path / "deep").mkdir()
    for name in others:
        (tmp_path / name).touch()
    checkpointer = make(commit_hook=Pausing())
    _, written = checkpointer.save({"a": 1}, tmp_path, pause=pipe.name)
    kill(pipe.wait())
    assert isinstance(written.exception(), SaveFailedError)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(others)


def test_a_process_that_dies_after_the_commit_fails_the_save_and_leaves_the_file(make, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    _, written = checkpointer.save({"a": 1}, tmp_path, die=True)
    with pytest.raises(PartlyCommittedError, match="was ended by SIGKILL"):
        written.result()
    assert checkpointer.load(tmp_path) == {"a": 1}
    assert works(checkpointer, tmp_path)


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_a_whole_file_and_the_next_save_works(make, tmp_path):
    """The moment is a number of switches between processes, not a time."""
    checkpointer, held, n_failed = make(), None, 0
    assert works(checkpointer, tmp_path)
    (tmp_path / "checkpoint_0.pt").unlink()
    kill(checkpointer._process.pid, signal.SIGSTOP)  # however fast the machine is, one is killed before its save
    steps = range(0, 2000, SWEEP_STRIDE)
    last = steps[-1]
    for step in steps:
        state = {"step": step, "w": torch.full((300_000,), float(step))}
        _, written = checkpointer.save(state, tmp_path)
        for _ in range(step):
            os.sched_yield()
        if step == last:
            written.exception()  # however busy the machine is, one is killed after its save
        with suppress(ProcessLookupError, TypeError):  # it is just being replaced
            kill(checkpointer._process.pid)
        failed = written.exception() is not None
        n_failed += failed
        loaded = checkpointer.load(tmp_path) if (tmp_path / "checkpoint_0.pt").exists() else {"step": None}
        assert loaded["step"] in ((held, step) if failed else (step,))
        held = loaded["step"]
        assert held is None or loaded["w"].eq(held).all()
        assert len(list(tmp_path.iterdir())) == (held is not None)
    assert 0 < n_failed < len(steps)
    assert works(checkpointer, tmp_path)


def test_each_writer_process_is_set_up_anew_and_a_failure_of_that_fails_no_later_save(make, tmp_path):
    checkpointer = make(subprocess_init_fn=set_up, subprocess_init_args=(str(tmp_path), "twice"))
    save(checkpointer, {"a": 1}, tmp_path)
    kill(checkpointer._process.pid)
    save(checkpointer, {"a": 2}, tmp_path)
    assert notes(tmp_path) == [["set up", "twice"]] * 2

    checkpointer = make(subprocess_init_fn=fail_to_set_up, subprocess_init_args=(str(tmp_path / "flag"),))
    for _ in range(2):
        _, written = checkpointer.save({"a": 1}, tmp_path)
        with pytest.raises(SaveFailedError, match="LookupError: no flag"):
            written.result()
    (tmp_path / "flag").touch()
    assert works(checkpointer, tmp_path)


def test_a_process_that_is_not_ready_in_time_fails_the_save_and_one_that_does_not_end_is_killed(make, pipe, tmp_path):
    slow = {"subprocess_init_fn": Pausing().pre_commit, "subprocess_init_args": (str(tmp_path), pipe.name)}
    checkpointer = make(**slow, start_timeout_sec=0.1)
    _, written = checkpointer.save({"a": 1}, tmp_path)
    with pytest.raises(SaveFailedError, match=r"was not ready within 0\.1 s"):
        written.result()
    checkpointer = make(subprocess_init_fn=linger, close_timeout_sec=0.1)
    assert works(checkpointer, tmp_path)
    pid = checkpointer._process.pid
    checkpointer.close()
    assert gone(pid)


def test_signals_to_the_trainer_do_not_end_the_writer(make, pipe, tmp_path):
    checkpointer = make(commit_hook=Pausing())
    pid = checkpointer._process.pid
    kill(pid, signal.SIGINT)  # perhaps before it runs a line of ours
    kill(pid, signal.SIGTERM)
    _, written = checkpointer.save({"a": 1}, tmp_path, pause=pipe.name)
    assert pipe.wait() == pid
    kill(pid, signal.SIGINT)
    kill(pid, signal.SIGTERM)
    pipe.go()
    written.result()
    assert checkpointer._process.pid == pid


def test_the_process_has_nothing_of_its_parent_but_what_it_needs(make, tmp_path):
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        checkpointer = make(commit_hook=Reporting(tmp_path))
        save(checkpointer, everything(), tmp_path / "c")
    (found,) = notes(tmp_path)
    heavy = {"torch", "numpy", "numba", "pyarrow", "fsspec", "tqdm", "pytest", "asyncio"}
    assert not heavy & {name.partition(".")[0] for name in found["modules"]}
    assert not [link for link in found["links"] if "secret" in link]
    assert len([link for link in found["links"] if link.startswith("socket:")]) == 1
    assert "/memfd:recckpt-staging (deleted)" in found["links"]
    assert found["ignores"] == [True, True]
    assert found["blocked"] == []
    assert found["session"]
    assert found["threads"] == 2


ORPHAN = """
import os, pickle, sys
from types import SimpleNamespace
from recckpt.checkpointer import RankInfo
from recckpt.checkpointer.process import Child
from recckpt.checkpointer.writer import Setup
from support.writer_hooks import Pausing

assert "torch" not in sys.modules
child = Child(pickle.dumps(Setup(RankInfo(0, 1), Pausing(), None, ())))
child.wait_ready(60)
memory = SimpleNamespace(fd=os.memfd_create("memory"), n_bytes=0)
child.request(sys.argv[1], b"", [], memory, pickle.dumps({"pause": sys.argv[2]}))
print(child.pid, flush=True)
child.receive()
"""


@mostly_slow()
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_process_ends_with_its_parent_and_publishes_nothing_more(pipe, tmp_path, is_idle):
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    script = ORPHAN.replace("child.request(", "0 and child.request(") if is_idle else ORPHAN
    command = [sys.executable, "-c", script, tmp_path / "c", pipe.name]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_idle or pipe.wait() == pid
        parent.kill()
        parent.wait()
        if not is_idle:
            pipe.go()
        assert parent.stdout.read() == ""  # the writer had the other end too
    assert not list((tmp_path / "c").glob("*"))


def test_nothing_is_left_of_checkpointers_that_were_closed(tmp_path):
    def held():
        return len(list(Path("/proc/self/fd").iterdir())), maps("self").count("recckpt-staging")

    save_once(tmp_path)
    before = held()
    pids = [save_once(tmp_path) for _ in range(3)]
    assert held() == before
    assert all(map(gone, pids))


def save_once(path):
    with make_async_checkpointer() as checkpointer:
        save(checkpointer, {"w": torch.ones(10_000)}, path)
        return checkpointer._process.pid


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_fork_of_the_trainer_leaves_the_writer_alone_and_their_memory_has_no_name(make, tmp_path):
    checkpointer = make()
    save(checkpointer, {"w": torch.ones(1_000_000)}, tmp_path)
    pid = checkpointer._process.pid
    for each in ("self", pid):
        assert "/memfd:recckpt-staging (deleted)" in maps(each)
    assert "/dev/shm" not in maps(pid)
    fork = os.fork()
    if fork == 0:
        status = 1
        try:
            with pytest.raises(ForkedError):
                checkpointer.close()
            checkpointer._process._end()  # as at the end of an interpreter
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(fork, 0)[1] == 0
    save(checkpointer, {"a": 2}, tmp_path)
    assert checkpointer._process.pid == pid


def test_a_synchronous_checkpointer_has_no_process(tmp_path):
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with make_sync_checkpointer() as checkpointer:
        save(checkpointer, {"a": 1}, tmp_path)
        assert children.read_text() == before
