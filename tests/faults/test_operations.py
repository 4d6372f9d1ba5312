"""T3: an operation of the storage fails; the save says so, the old checkpoint stays, and the next save works.

The k-th operation is failed at the door of the storage, and the k-th system call by the kernel.
"""

import errno
import os
import shutil
from dataclasses import replace
from itertools import product

import pytest
from faults.job import Job, State, check_tidy, restored
from faults.scenes import SCENES
from faults.storage_faults import WHEN, Faults
from faults.tracing import disturbing
from support.sweeps import SWEEP_STRIDE, mostly_slow, pairwise

from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.inspect.verify import verify

CODES = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "ESTALE")
VITAL = ("make_dir", "create", "file.write", "file.close", "put_if_absent")  # a save that fails there has failed
OLD, NEW = State(1), State(2)


class Trial:
    """A process that takes over from one that has saved, and saves while something fails."""

    def __init__(self, url):
        first = Job(url)
        first.advance()
        first.save()
        self.url = url
        self.job = Job.resumed(url, "newest")
        self.faults = Faults(self.job.saver.storage)
        self.job.advance()

    def save(self, number=0, code="EIO", *, background=False, **options):
        """Save while an operation fails; return what is the newest checkpoint then."""
        self.faults.plant(number, getattr(errno, code), **options)
        try:
            self.job.save(background=background)
        except SaveFailedError as error:
            self.check_error(error, code)
            if not isinstance(error, CommitNotDurableError):
                return [OLD]
            return [NEW] if error.is_in_place else [OLD, NEW]
        finally:
            self.log = self.faults.log
            self.faults.plant(0, 0)
        assert not 0 < number <= len(self.log) or self.log[number - 1] not in VITAL, "the fault is not told of"
        return [NEW]

    def check_error(self, error, code):
        assert self.faults.has_struck
        cause = error.__cause__
        assert isinstance(cause, OSError)
        assert cause.errno == getattr(errno, code)
        assert f"{os.strerror(cause.errno)}: '{self.url}" in str(error)

    def check(self, newest):
        """Check what is there after the fault, that saves go on as if nothing had been, and that the next tidies up."""
        _, found = restored(self.url, newest)
        assert verify(str(self.url), threads=1) == []
        self.job.save()  # this step again, if it failed
        if found == NEW:
            self.job.advance()
            self.job.save()
        following, _ = restored(self.url, [State(self.job.manager.global_step)])
        following.advance()
        following.save()
        last = State(following.manager.global_step)
        restored(self.url, [last])
        check_tidy(following.saver.storage, 1, last)


def try_one(figures, url, number, code, **options):
    """Fail one operation; return whether there was one of this number."""
    trial = Trial(url)
    try:
        trial.check(trial.save(number, code, **options))
    except BaseException as error:
        figures.add("T3", lost=1)
        raise AssertionError(f"{code} at operation {number}, {trial.log[number - 1 :][:1]}: {error!r}") from error
    has_struck = len(trial.log) >= number
    figures.add("T3", faults=has_struck, lost=0)
    return has_struck


def sweep(figures, make_url, code, stride=1, first=1, **options):
    number = first
    while try_one(figures, make_url(), number, code, **options):
        number += stride
    assert number > first


@pytest.fixture(params=["local", "memory"])
def make_url(request, ram):
    """Return empty output dirs, one after another."""
    count = iter(range(10_000))
    if request.param == "local":
        return lambda: ram / str(next(count))
    memory_url = request.getfixturevalue("memory_url")
    return lambda: f"{memory_url}/{next(count)}"


@mostly_slow()
def test_each_kind_of_operation_may_fail(make_url, figures):
    trial = Trial(make_url())
    trial.check(trial.save())
    kinds = dict.fromkeys(trial.log)
    assert {"make_dir", "create", "file.write", "file.close", "put_if_absent", "replace", "remove"} <= kinds.keys()
    for number, kind in enumerate(kinds):
        for_ever = (number + ("memory" in str(trial.url))) % 2 == 1
        first, last = trial.log.index(kind), len(trial.log) - trial.log[::-1].index(kind) - 1
        try_one(figures, make_url(), 1 + (first if for_ever else last), CODES[number % len(CODES)], for_ever=for_ever)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_url", "code", "for_ever"),
    pairwise(product(("local", "memory"), CODES, (False, True))),
    indirect=["make_url"],
)
def test_any_operation_may_fail(make_url, figures, code, for_ever):
    first = 1 + 9 * (2 * CODES.index(code) + for_ever) % min(SWEEP_STRIDE, 50)  # each begins elsewhere
    sweep(figures, make_url, code, SWEEP_STRIDE, first, for_ever=for_ever)


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN[1:])
def test_any_operation_may_fail_when_it_is_done_or_half_done(make_url, figures, when):
    sweep(figures, make_url, "EIO", SWEEP_STRIDE, 1 + SWEEP_STRIDE // 2 * (when == "half"), when=when)


@pytest.mark.slow
def test_any_operation_of_a_save_in_the_background_may_fail(make_url, figures):
    sweep(figures, make_url, "EIO", SWEEP_STRIDE, background=True)


# by the kernel

CALLS = ("mkdir", "openat", "newfstatat", "getdents64", "write", "fsync", "close", "link", "unlink", "rename", "rmdir")
KERNEL_CODES = (*CODES, "EMFILE")
VITAL_CALLS = ("mkdir:", "write:", "fsync:", "link:")  # a save of which all of these fail has failed
MOST_CALLS = 1000  # of one name in a save


class Kernel:
    """Fails system calls of the last save of a scene, each time in a copy of what the scene begins with."""

    def __init__(self, worker, ram, name, figures):
        self.worker, self.ram, self.figures, self.scene = worker, ram, figures, SCENES[name]
        self.base = ram / name
        if not self.base.exists():
            self.scene.make(worker, self.base)

    def fail(self, inject, code, **changes):
        """Fail a call; return whether it was made."""
        log = self.ram / "log"
        word = self.save(inject, code, "-o", str(log), *disturbing(inject)[2:], **changes)
        assert word == "failed" or not (inject.startswith(VITAL_CALLS) and inject.endswith("=1+")), f"{inject}: {word}"
        was_made = "(INJECTED)" in log.read_text()
        self.figures.add("T3", faults=was_made, lost=0)
        return was_made

    def save(self, what, code, *options, **changes):
        """Save while something fails, check what is left, and return how the save ended."""
        url = self.ram / "trial"
        shutil.rmtree(url, ignore_errors=True)  # of a trial that failed: each failure is its own
        shutil.copytree(self.base, url)
        outcome = self.worker.run(url, self.scene.max_keep, replace(self.scene.last, **changes), *options)
        try:
            if outcome.word != "saved":
                assert outcome.told["errno"] == getattr(errno, code)
                assert f"failed: {os.strerror(outcome.told['errno'])}: '{url}" in outcome.told["message"]
            self.scene.go_on(url, outcome.word)
        except BaseException as error:
            self.figures.add("T3", lost=1)
            raise AssertionError(f"{what}: {outcome}: {error!r}") from error
        return outcome.word

    def fail_each(self, call, stride, for_ever=""):
        for number, k in enumerate(range(1, MOST_CALLS, stride)):
            code = KERNEL_CODES[(CALLS.index(call) + number) % len(KERNEL_CODES)]
            if not self.fail(f"{call}:error={code}:when={k}{for_ever}", code):
                assert k > 1, f"a save makes no call of {call}"
                return
        raise AssertionError(f"a save has no {MOST_CALLS} calls of {call}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "code", "k"),
    [
        ("write", "ENOSPC", "5"),
        ("write", "ENOSPC", "20+"),
        ("fsync", "EIO", "14+"),
        ("mkdir", "ENOSPC", "1"),
        ("link", "EIO", "4"),
        ("getdents64", "EIO", "1+"),
    ],
)
def test_an_error_of_the_kernel_is_told_and_loses_nothing(worker, shared_ram, figures, call, code, k):
    assert Kernel(worker, shared_ram, "pinned", figures).fail(f"{call}:error={code}:when={k}", code)


CASES = [case for case in product(("first", "pinned"), CALLS, ("", "+")) if case[:2] != ("first", "rmdir")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call", "for_ever"), pairwise(CASES))
def test_any_call_of_the_kernel_may_fail(worker, shared_ram, figures, name, call, for_ever):
    Kernel(worker, shared_ram, name, figures).fail_each(call, SWEEP_STRIDE, for_ever)


@pytest.mark.slow
def test_a_file_that_may_not_grow_further_is_told_of_and_loses_nothing(worker, ram, figures):
    kernel = Kernel(worker, ram, "rotation", figures)
    words = [kernel.save("a limit", "EFBIG", file_limit=limit) for limit in range(0, 16_000, 40 * SWEEP_STRIDE)]
    figures.add("T3", faults=len(words))
    assert words[0] == "failed"
    assert words[-1] == "saved"
