"""Whoever mirrors is killed at any point, or finds a full disk: the mirror is whole, and the next pass goes on."""

import errno
import json
import shutil
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from faults.storage_faults import Faults
from faults.store_scene import as_json
from faults.test_full_disk import PAGE, Disk
from support.forgetting import ForgettingRun, fill, ids_at
from support.killed import killed_at
from support.mirrors import check_same, check_whole, directories_of, listing_of
from support.sweeps import SWEEP_STRIDE, some_of
from support.warm_python import Piped

import recckpt
from recckpt import CheckpointManager
from recckpt.errors import RecckptError
from recckpt.policies.keep import All
from recckpt.rewrite.mirroring import Mirror

MOST_POINTS = 4000
GONE = ids_at(5, 7, 50, 200)


def first(run, to):
    """Nothing is in the mirror yet."""


def after_a_rotation(run, to):
    """The run has a new full checkpoint, and not those before."""
    recckpt.rewrite.mirror(run, to)
    trainer = ForgettingRun(run, deltas=False, max_keep=1)
    trainer.saver.load()
    trainer.saver.save("ckpt_5", step=5)


def after_a_compaction(run, to):
    """A delta was compacted, and a delta stands on it."""
    recckpt.rewrite.mirror(run, to)
    recckpt.rewrite.compact(run, adopt=True)
    trainer = ForgettingRun(run)
    trainer.saver.load()
    fill(trainer.user, ids_at(60), 9.0)
    trainer.saver.save("ckpt_5", step=5)


def after_a_forgetting(run, to):
    """All has been written again."""
    recckpt.rewrite.mirror(run, to)
    recckpt.rewrite.forget(run, "user", GONE)


def after_a_forgetting_that_it_has_more_of(run, to):
    """The mirror has checkpoints with the ids that the run has no more."""
    recckpt.rewrite.mirror(run, to)
    trainer = ForgettingRun(run, deltas=False, max_keep=1)
    trainer.saver.load()
    trainer.saver.save("ckpt_5", step=5)
    recckpt.rewrite.mirror(run, to, keep=All())
    recckpt.rewrite.forget(run, "user", GONE)


SCENES = [after_a_forgetting, first, after_a_rotation, after_a_compaction, after_a_forgetting_that_it_has_more_of]


@pytest.mark.parametrize(
    ("scene", "stride"),
    [(first, 211), *(pytest.param(scene, SWEEP_STRIDE, marks=pytest.mark.slow) for scene in SCENES)],
)
def test_a_mirror_that_is_killed_is_whole_and_the_next_pass_goes_on(tmp_path, scene, stride):
    run, to, base = tmp_path / "run", tmp_path / "to", tmp_path / "base"
    ForgettingRun(run).save_chain()
    scene(run, to)
    if to.exists():
        to.rename(base)
    n_points, keep = 0, All() if scene is after_a_forgetting_that_it_has_more_of else None
    for number in range(0, MOST_POINTS, stride):
        if base.exists():
            shutil.copytree(base, to)
        was_killed = killed_at(number, lambda: recckpt.rewrite.mirror(run, to, keep=keep))
        assert check_whole(to).committed or not base.exists(), number
        recckpt.rewrite.mirror(run, to, keep=keep)
        check_same(run, to)
        assert directories_of(to) == directories_of(run), number
        assert recckpt.rewrite.mirror(run, to).copied == (), number
        shutil.rmtree(to)
        n_points += was_killed
        if not was_killed:
            break
    print(f"{scene.__name__}: {n_points} points")  # for docs/reliability.md, with -s
    assert n_points
    assert number < MOST_POINTS - stride


def die_at(run, to, number, when) -> int:
    """Mirror into a storage that answers no request from that of a number on; return how many were made."""
    made = Mirror(run, to, threads=1)
    faults = Faults(made._to)
    faults.plant(number, errno.EIO, for_ever=True, when=when)
    try:
        made.update()
    except (OSError, RecckptError):
        assert faults.has_struck
    return len(faults.log)


class StoreSweep:
    """Deaths at the requests of a mirror into an object store, which has a part of the run already."""

    def __init__(self, run, url):
        self.run, self.url, self._numbers = run, url, count()

    def n_requests(self) -> int:
        return die_at(self.run, self._next(), MOST_POINTS, "before")

    def _next(self) -> str:
        return f"{self.url}-{next(self._numbers)}"

    def check(self, number, when) -> bool:
        to = self._next()
        has_died = die_at(self.run, to, number, when) >= number
        check_whole(to)
        recckpt.rewrite.mirror(self.run, to)
        check_same(self.run, to)
        assert directories_of(to) == directories_of(self.run), number
        assert recckpt.rewrite.mirror(self.run, to).n_bytes == 0
        return has_died


def test_a_death_at_some_requests_to_a_store_in_memory_leaves_a_whole_mirror(tmp_path, memory_url):
    ForgettingRun(tmp_path / "run").save_chain()
    sweep = StoreSweep(tmp_path / "run", memory_url)  # one, which gives each death a place of its own
    for number, when in ((60, "after"), (110, "before")):
        assert sweep.check(number, when)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory_url", "s3_url"])
def test_a_death_at_any_request_to_an_object_store_leaves_a_whole_mirror(request, tmp_path, kind):
    ForgettingRun(tmp_path / "run").save_chain()
    sweep = StoreSweep(tmp_path / "run", request.getfixturevalue(kind))
    stride = SWEEP_STRIDE * (1 if kind == "memory_url" else 9)
    n_requests = sweep.n_requests()
    assert n_requests < MOST_POINTS
    for number, when in enumerate(("before", "after")):
        numbers = some_of(n_requests, stride, 4 * number)
        assert all(sweep.check(at, when) for at in numbers)
        print(f"{kind}, {when}: {len(numbers)} points")  # for docs/reliability.md, with -s
        assert len(numbers) > 0


class Trainer:
    """A run with deltas of which every fourth is compacted, that forgets ids and keeps three checkpoints."""

    def __init__(self, url):
        self.url, self.n_forgotten = url, 0
        self.run = ForgettingRun(url, max_keep=3)
        self.manager = CheckpointManager(self.run.saver, 1)
        fill(self.run.user, ids_at(*range(100)), 0.5)

    def save(self, step):
        fill(self.run.user, ids_at(step, step + 1, 200 + step), float(step))
        if step % 4 == 3:
            recckpt.rewrite.compact(self.url)  # adopted by the save that follows
        self.run.saver.save(f"ckpt_{step}", step=step)
        if step in (11, 21):
            self.manager.forget("user", ids_at(step, 200 + step))
            self.n_forgotten += 1


class Mirrors:
    """Mirrors of one run, in processes that are killed while the run goes on."""

    def __init__(self, run, to, options):
        self.run, self.to, self.options = str(run), str(to), options
        self.process = Piped(Path(__file__).with_name("mirror_worker.py"))
        self.n_killed = 0

    def begin(self, number):
        order = {"run": self.run, "to": self.to, "number": number, "options": self.options}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def end(self) -> str:
        said = json.loads(self.process.stdout.readline())
        self.n_killed += said == "killed"
        return said


@contextmanager
def mirrors(run, to, options):
    made = Mirrors(run, to, options)
    yield made
    made.process.stdin.close()
    made.process.wait(60)


def live(tmp_path, to, options, n_saves, n_kills):
    """Train while mirrors are killed, and check each state that they leave; return how many were."""
    trainer = Trainer(tmp_path / "run")
    trainer.save(0)
    numbers = count(1, 7)
    with mirrors(trainer.url, to, options) as made:
        for step in range(1, n_saves):
            for each in range(n_kills):
                is_last = each == n_kills - 1  # it goes on for longer, or ends: few calls are left where little is new
                made.begin(1 + next(numbers) % (290 if is_last else 30))
                if each == 0:
                    trainer.save(step)  # meanwhile
                said = made.end()
                assert (
                    said == "killed"
                    or said.startswith("copied")
                    or "CheckpointRemovedError" in said
                    or ("an unfinished request" in said)
                ), said
                check_whole(to)
        made.begin(0)
        assert made.end().endswith("damaged 0")
        check_same(trainer.url, to)
        assert directories_of(to) == {link.directory for c in listing_of(trainer.url).current for link in c.links}
        made.begin(0)
        assert made.end() == "copied 0, damaged 0"
    print(f"{made.n_killed} kills")  # for docs/reliability.md, with -s
    return made.n_killed


N_SAVES = 30 if SWEEP_STRIDE < 20 else 14  # with two forgettings, or one, and compactions
KILLS_A_SAVE = max(1, 9 // SWEEP_STRIDE)
KILLS_AT_LEAST = 200 if SWEEP_STRIDE == 1 else N_SAVES // 2 * KILLS_A_SAVE  # not all: some passes have few calls


@pytest.mark.slow
def test_a_run_of_up_to_thirty_saves_is_mirrored_to_a_directory_while_it_runs_and_mirrors_are_killed(tmp_path):
    assert live(tmp_path, tmp_path / "to", None, N_SAVES, KILLS_A_SAVE) >= KILLS_AT_LEAST


@pytest.mark.slow
def test_a_run_of_up_to_thirty_saves_is_mirrored_to_s3_while_it_runs_and_mirrors_are_killed(
    tmp_path, s3_url, s3_options
):
    options = json.loads(as_json(s3_options))
    assert live(tmp_path, s3_url, options, N_SAVES, KILLS_A_SAVE) >= KILLS_AT_LEAST


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def mirrored(run, to) -> bool:
    """Mirror; say whether there was room."""
    try:
        recckpt.rewrite.mirror(run, to)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@pytest.mark.slow
def test_room_that_grows_from_pass_to_pass_is_enough_in_the_end(tmp_path, disk):
    run, to = tmp_path / "run", disk.path / "to"
    ForgettingRun(run).save_chain()
    n_passes = 0
    disk.leave(PAGE)  # a tmpfs of 0 bytes has no limit
    while not mirrored(run, to):
        check_whole(to)
        n_passes += 1
        disk.leave(PAGE * min(SWEEP_STRIDE, 20) * (1 + n_passes))
    assert n_passes > 1
    check_same(run, to)
    assert directories_of(to) == directories_of(run)
    print(f"{n_passes} passes")  # for docs/reliability.md, with -s


def test_a_pass_that_finds_no_room_leaves_a_whole_mirror_and_the_next_goes_on(tmp_path, disk):
    run, to = tmp_path / "run", disk.path / "to"
    ForgettingRun(run).save_chain()
    disk.leave(30 * PAGE)
    assert not mirrored(run, to)
    check_whole(to)
    disk.leave()
    assert mirrored(run, to)
    check_same(run, to)
