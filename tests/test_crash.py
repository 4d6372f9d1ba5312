"""Real faults: a process is killed at a system call of a save, or the kernel fails one; nothing is ever lost."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import checkpoints
from crash_worker import NOT_DURABLE, SAVE_FAILED, Job

NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
STRACE = shutil.which("strace")
SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "1"))  # the sweeps try every so-manieth point


class Worker:
    """The process that forks the children, and the strace that is attached to one of them."""

    def __init__(self):
        here = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, str(here / "crash_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here.parent), **NO_THREADS},
        )
        assert self.process.stdout.readline() == "ready\n"

    def save(self, url, inject, **order):
        """Save in a child under strace, and return its wait status."""
        order["url"] = str(url)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        name = inject.partition(":")[0]
        command = [STRACE, "-f", "-o", "/dev/null", "-e", f"trace={name}", "-e", f"inject={inject}", "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = tracer.stderr.readline()
        os.kill(pid, signal.SIGCONT if "attached" in said else signal.SIGKILL)
        status = int(self.process.stdout.readline())
        _, rest = tracer.communicate()
        if "attached" not in said:
            pytest.skip(f"NO CRASH WAS TESTED, strace may not attach here: {said}{rest}")
        return status

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def worker():
    if STRACE is None:
        pytest.skip("NO CRASH WAS TESTED: strace is not installed")
    worker = Worker()
    yield worker
    worker.close()


def prepare(url, n_saves, max_keep):
    """Make checkpoints of steps 1 to ``n_saves``."""
    job = Job(str(url), max_keep)
    for _ in range(n_saves):
        job.advance()
        job.manager.save()


class Scene:
    """What lies in the output dir before the save that is disturbed.

    Attributes:
        max_keep: of all savers.
        before: the step that restores before the save.
        after: the step that is saved.
    """

    def __init__(self, url, max_keep, n_saves, restore_step=None):
        self.url, self.max_keep, self.restore_step = url, max_keep, restore_step
        self.before = n_saves
        self.after = (n_saves if restore_step is None else restore_step) + 1
        url.mkdir()
        prepare(url, n_saves, max_keep)

    def disturb(self, worker, url, inject, *, threads=False, plant=None):
        """Save with a fault into a copy, and check what is left; return the wait status of the process."""
        shutil.copytree(self.url, url)
        status = worker.save(
            url, inject, max_keep=self.max_keep, restore_step=self.restore_step, threads=threads, plant=plant
        )
        ended = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        saved, failed = ended in (0, NOT_DURABLE), ended == SAVE_FAILED
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert saved or failed or killed, f"{inject}: wait status {status}"
        allowed = {self.after} if saved else {self.before} if failed else {self.before, self.after}

        job = Job(str(url), self.max_keep)
        step = job.manager.restore()
        assert step in allowed, f"{inject}: restored {step}, expected one of {allowed}"
        assert step == 0 or job.is_of_step(step), f"{inject}: the state is not that of step {step}"

        # and it goes on: the same id once more, beside whatever the fault has left, and the one after it
        if step != self.after:
            job.manager.restore(self.restore_step)
            job.advance()
            job.manager.save()
        job.advance()
        job.manager.save()
        again = Job(str(url), self.max_keep)
        assert again.manager.restore() == self.after + 1
        assert again.is_of_step(self.after + 1)
        assert len(checkpoints(url)) == min(self.max_keep, self.after + 1)
        shutil.rmtree(url)
        return status

    def kill_at(self, worker, tmp_path, name, stride=1, plant=None):
        """Kill at the first, and then each ``stride``-th, call; return how many times."""
        for count, k in enumerate(itertools.count(1, stride)):
            if self.disturb(worker, tmp_path / f"{name}{k}", f"{name}:signal=KILL:when={k}", plant=plant) == 0:
                return count
        raise AssertionError


SCENES = {"first": (1, 0), "rotation": (1, 1), "two kept": (2, 2), "again": (2, 2, 1)}
CALLS = ("mkdir", "openat", "write", "fsync", "close", "link", "unlink", "rename", "rmdir")
STRIDES = {"openat": 17, "write": 17, "fsync": 3, "unlink": 3}


def scene(tmp_path, name):
    return Scene(tmp_path / "base", *SCENES[name])


@pytest.mark.parametrize("call", ["mkdir", "openat", "write", "fsync", "link", "unlink", "rename", "rmdir"])
def test_a_kill_in_a_save_that_rotates_loses_nothing(worker, tmp_path, call):
    assert scene(tmp_path, "rotation").kill_at(worker, tmp_path, call, STRIDES.get(call, 1)) > 0


@pytest.mark.parametrize("name", ["first", "two kept", "again"])
def test_a_kill_around_the_commit_loses_nothing(worker, tmp_path, name):
    assert scene(tmp_path, name).kill_at(worker, tmp_path, "link") > 1


@pytest.mark.parametrize("when", [4, 30])
def test_a_kill_while_threads_write_loses_nothing(worker, tmp_path, when):
    scene(tmp_path, "rotation").disturb(worker, tmp_path / "x", f"write:signal=KILL:when={when}", threads=True)


@pytest.mark.parametrize(
    "inject",
    [
        "write:error=ENOSPC:when=3",
        "write:error=ENOSPC:when=20+",
        "write:error=EIO:when=50",
        "fsync:error=EIO:when=1",
        "fsync:error=EIO:when=9",
        "fsync:error=EIO:when=14+",
        "link:error=EIO:when=2",
        "mkdir:error=ENOSPC:when=1",
    ],
)
def test_an_error_of_the_kernel_fails_the_save_and_leaves_the_old_checkpoint(worker, tmp_path, inject):
    status = scene(tmp_path, "rotation").disturb(worker, tmp_path / "x", inject)
    assert os.WEXITSTATUS(status) == SAVE_FAILED


def test_a_rotation_before_the_commit_would_be_found(worker, tmp_path):
    with pytest.raises(AssertionError, match=r"restored 0, expected one of \{1, 2\}"):
        scene(tmp_path, "rotation").kill_at(worker, tmp_path, "unlink", plant="rotation before the commit")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_at_every_call_loses_nothing(worker, tmp_path, name, call):
    scene(tmp_path, name).kill_at(worker, tmp_path, call, SWEEP_STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", ["", "+"])
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("write", "ENOSPC"),
        ("write", "EIO"),
        ("fsync", "EIO"),
        ("openat", "EMFILE"),
        ("link", "EIO"),
        ("mkdir", "ENOSPC"),
    ],
)
@pytest.mark.parametrize("name", SCENES)
def test_an_error_at_every_call_leaves_the_old_checkpoint_or_the_new_one(worker, tmp_path, name, call, error, for_ever):
    place = scene(tmp_path, name)
    for k in range(1, 200, SWEEP_STRIDE * (3 if call == "openat" else 1)):
        inject = f"{call}:error={error}:when={k}{for_ever}"
        if place.disturb(worker, tmp_path / str(k), inject) == 0:
            break
