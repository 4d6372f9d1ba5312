"""T2: the power fails after any operation of a save; what was acknowledged restores, and the next save works.

What a save does is recorded by strace, from real processes, and is replayed on a model of a disk.
"""

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from faults.disk_model import Disk, cuts, digest, put
from faults.job import NOTHING, State, restored
from faults.scenes import FORGETTING, OFFERS_AND_DOUBTS, SCENES
from faults.tracing import read_log, recording
from support.builders import tree
from support.sweeps import SWEEP_STRIDE, some_of

from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints

FULL = ("first", "rotation", "same writer", "again", "takeover", "takeover in rotation")
DELTAS = ("delta on a delta", "full after deltas", "delta on the second full", "takeover in rotation of deltas")
LIVE = ("live delta on a delta", "full after live deltas", "takeover of live deltas")
HISTORIES = FULL + DELTAS + tuple(OFFERS_AND_DOUBTS) + tuple(FORGETTING) + LIVE
ALL = SCENES | OFFERS_AND_DOUBTS | FORGETTING


class History:
    """All that the processes of a scene did to the output dir, from when it was empty.

    Attributes:
        ops: what they did, in order.
        begins: of each of them, how many operations were done before.
        states: what they saved or were killed at, in order.
    """

    def __init__(self, worker, ram, name, plant=None):
        self.scene = scene = ALL[name]
        self.url, log = ram / "recorded", ram / "log"
        self.url.mkdir()
        self.ops, self.begins, self.states = [], [], [NOTHING]
        for save, kill in scene.saves:
            inject = ("-e", f"inject={kill[0]}:signal=KILL:when={kill[1]}") if kill else ()
            outcome = worker.run(
                self.url,
                scene.max_keep,
                replace(save, before=min(save.before, 0), plant=plant),
                *recording(log),
                *inject,
            )
            assert outcome.word == ("killed" if kill else "saved"), outcome
            self.begins.append(len(self.ops))
            self.ops += read_log(log, self.url, len(self.ops))
            self.states += save.states

    def trials(self, ops, indexes, n_random):
        """Yield the operation that was the last, what is left and what may restore, each state once."""
        disk, chance, seen, acknowledged = Disk(), random.Random(0), set(), NOTHING
        for index, op in enumerate(ops):
            disk.do(op)
            if op.kind == "acknowledged":
                acknowledged = State(*op.state)
            if index not in indexes:
                continue
            allowed = self.states[max(i for i, state in enumerate(self.states) if state == acknowledged) :]
            for left in cuts(disk, chance, n_random):
                key = digest(left), acknowledged
                if key not in seen:
                    seen.add(key)
                    yield op, left, allowed


def check(left, allowed, ram, kind):
    """Check that the newest acknowledged checkpoint, or a later one, restores from what is left, and go on from it."""
    with tempfile.TemporaryDirectory(dir=ram) as directory:
        url = Path(directory)
        put(left, url)
        job, found = restored(url, allowed, **kind)
        listing = list_checkpoints(job.saver.storage)
        assert listing.damaged == {}
        assert not listing.committed or verify(str(url), threads=1) == []
        check_hints(url, allowed)
        job.advance(found.branch)
        job.save()
        restored(url, [State(found.step + 1, found.branch)], **kind)


def check_hints(url, allowed):
    """Check that the index file and the timeline are whole, if they are there."""
    if (url / "checkpoint").exists():
        lines = (url / "checkpoint").read_text().splitlines(keepends=True)
        assert lines[-1] in [f"ckpt_{state.step}\n" for state in allowed], "the index file is torn or stale"
    if (url / "timeline.jsonl").exists():
        for line in (url / "timeline.jsonl").read_text().splitlines():
            json.loads(line)


@pytest.fixture
def record(worker, ram):
    return lambda name: History(worker, ram, name)


def try_all(history, figures, ram, indexes, n_random):
    for op, left, allowed in history.trials(history.ops, indexes, n_random):
        try:
            check(left, allowed, ram, history.scene.kind)
        except BaseException as error:
            figures.add(history.scene.counted("T2"), lost=1)
            raise AssertionError(f"a power cut after {op.kind} {op.path}: {error!r}; left is {sorted(left)}") from error
        figures.add(history.scene.counted("T2"), states=1, lost=0)


def test_the_model_keeps_all_that_the_file_system_keeps(record):
    history, disk = record("takeover"), Disk()
    for op in history.ops:
        disk.do(op)
    assert disk.left() == tree(history.url)
    assert [op.state for op in history.ops if op.kind == "acknowledged"] == [(1, 0), (2, 0)]


@pytest.mark.slow
def test_a_power_cut_in_a_save_loses_nothing(record, figures, ram):
    history = record("takeover")
    steps = [i for i, op in enumerate(history.ops) if op.kind in ("link", "rename", "rmdir", "acknowledged")]
    try_all(history, figures, ram, set(steps[::2]), n_random=0)


def n_shown(name):
    """Return with how many saves of a history one of those before it begins too."""
    return max((n_common(ALL[name], ALL[other]) for other in HISTORIES[: HISTORIES.index(name)]), default=0)


def n_common(scene, other):
    """Return how many saves two histories have in common: of one that is killed, the other may have the whole."""
    if (scene.max_keep, scene.kind) != (other.max_keep, other.kind):
        return 0
    for number, ((save, kill), (theirs, killed)) in enumerate(zip(scene.saves, other.saves, strict=False)):
        if save != theirs or (kill != killed and killed):
            return number
        if kill != killed:
            return number + 1
    return min(len(scene.saves), len(other.saves))


def test_what_an_earlier_history_shows_is_known():
    shown = {name: n_shown(name) for name in HISTORIES if n_shown(name)}
    assert shown.items() >= {"rotation": 1, "takeover in rotation": 2, "delta on the second full": 3}.items()
    assert all(n < len(ALL[name].saves) for name, n in shown.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_a_power_cut_after_any_operation_loses_nothing(record, figures, ram, name):
    history = record(name)
    first = 0 if SWEEP_STRIDE == 1 else history.begins[n_shown(name)]
    some = some_of(len(history.ops) - first, SWEEP_STRIDE, HISTORIES.index(name))
    try_all(history, figures, ram, [first + n - 1 for n in some], n_random=6 if SWEEP_STRIDE == 1 else 2)
