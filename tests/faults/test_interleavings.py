"""T9: two or three writers on one output dir, held up at each of their operations, overtaken, and let go on.

These are the interleavings of the model (fencing_model.py), with real savers on real storage.
"""

from __future__ import annotations

import os
import re
import signal
from itertools import product

import pytest
from faults.interleaving import Scene, crossed, operations, overtaken
from faults.storage_faults import watch
from faults.trainer import Trainer
from support.sweeps import SWEEP_STRIDE, mostly_slow, pairwise

from recckpt.errors import SaveFailedError, WriterFencedError

FENCED, FAILED = 3, 4  # exit codes


SCRIPTS = ("onward", "back", "named")


@pytest.fixture(params=["local", "memory"])
def root(request, ram):
    """An empty place for output dirs, on each kind of storage."""
    return str(ram) if request.param == "local" else request.getfixturevalue("memory_url")


def sweep(figures, root, script, max_keeps, first_halt, stride):
    """Hold the first writer up before every ``stride``-th operation of its."""
    halt = first_halt
    while overtaken(f"{root}/{halt}", script, max_keeps, halt):
        figures.add("T9", schedules=1, fenced=1, lost=0)
        halt += stride
    assert halt > 2 * stride


@mostly_slow()
@pytest.mark.parametrize(
    ("root", "script"), list(zip(("local", "memory", "local"), SCRIPTS, strict=True)), indirect=["root"]
)
def test_a_writer_that_is_held_up_and_overtaken_is_fenced_and_harms_nothing(figures, root, script):
    sweep(figures, root, script, (2, None), 31 * SCRIPTS.index(script), 61)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_writers_that_are_both_held_up_the_later_goes_on(figures, root, order):
    for number, halts in enumerate([(110, 40), (130, 100)]):
        crossed(f"{root}/{number}", ("onward", "back"), halts, order)
        figures.add("T9", schedules=1, fenced=1, lost=0)


@mostly_slow()
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_of_three_writers_that_are_all_held_up_the_last_goes_on(figures, ram, order):
    crossed(f"{ram}/runs", ("onward", "onward", "back"), (115, 60, 75), order)
    figures.add("T9", schedules=1, fenced=2, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("root", "script", "max_keeps"),
    pairwise(product(("local", "memory"), SCRIPTS, [(1, 1), (2, None), (None, 1)])),
    indirect=["root"],
)
def test_a_writer_is_held_up_before_each_operation(figures, root, script, max_keeps):
    sweep(figures, root, script, max_keeps, 0, SWEEP_STRIDE)


def commits_of(url, max_keep):
    """Return before which operations a lone writer is about to commit."""
    names = operations(url, "onward", max_keep)
    commits = [halt for halt, name in enumerate(names) if re.fullmatch(r"put_if_absent .*/manifest\.json", name)]
    assert len(commits) == 3
    return commits


def hold_rotations_up(figures, root):
    """Hold the first writer up before each operation from its last commit on, so of a rotation."""
    sweep(figures, root, "onward", (1, None), commits_of(f"{root}/alone", 1)[-1], 1)


def hold_commits_up(figures, root, stride=1):
    """Hold the first writer up right before a commit, and the second before every ``stride``-th of what it does then.

    This is where the check after the commit is all that there is: the second has claimed the output dir, and has not
    yet said what is committed, or not yet removed what is not.
    """
    commits = commits_of(f"{root}/alone", 2)
    halts = range(0, len(operations(f"{root}/alone", "onward", None)) // 2, stride)
    for number, (commit, halt) in enumerate(product(commits[1:], halts)):
        crossed(f"{root}/{number}", ("onward", "onward"), (commit, halt), (0, 1))
        figures.add("T9", schedules=1, fenced=1, lost=0)


@pytest.mark.slow
def test_a_commit_is_held_up_while_another_writer_takes_over(figures, root):
    hold_commits_up(figures, root, SWEEP_STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("scripts", [("onward", "onward"), ("onward", "back"), ("named", "named")], ids=str)
def test_two_writers_are_held_up_in_many_places(figures, root, scripts, order):
    for halts in list(product(range(0, 300, 23), range(0, 300, 29)))[::SWEEP_STRIDE]:
        crossed(f"{root}/{halts[0]}/{halts[1]}", scripts, halts, order)
        figures.add("T9", schedules=1, fenced=1, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("scripts", [("onward", "onward", "back"), ("named", "named", "named")], ids=str)
def test_three_writers_are_held_up_in_many_places(figures, ram, scripts, order):
    places = product(range(0, 300, 43), range(0, 300, 47), range(0, 300, 59))
    for number, halts in enumerate(list(places)[::SWEEP_STRIDE]):
        crossed(f"{ram}/{number}", scripts, halts, order)
        figures.add("T9", schedules=1, fenced=2, lost=0)


def train_and_stop(url, halt):
    """Be a process that stops itself before an operation; end with what became of its saves."""
    trainer = Trainer(url, 2)
    left = halt

    def before(operation):
        nonlocal left
        if not operation.startswith("write"):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGSTOP)  # this thread: a stop of the process may reach it later

    watch(trainer.saver.storage, before)
    code = 0
    for _ in range(4):
        try:
            trainer.save()
        except SaveFailedError:
            code = FAILED
        except WriterFencedError:
            os._exit(FENCED)
    os._exit(code)


def in_a_child(work, *args):
    pid = os.fork()
    if pid == 0:
        try:
            work(*args)
        finally:
            os._exit(1)
    return pid


@mostly_slow()
@pytest.mark.parametrize("halt", [40, 130, 165])
def test_a_process_that_is_stopped_and_overtaken_is_fenced_when_it_continues(figures, ram, halt):
    child = in_a_child(train_and_stop, str(ram), halt)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    scene = Scene(str(ram), None)
    scene.begin(0, "back").go()
    files = scene.witness.files()
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FENCED
    assert scene.witness.files() == files
    scene.end()
    figures.add("T9, two processes", stops=1, fenced=1, lost=0)
