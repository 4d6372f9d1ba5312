"""T4: a real file system fills up while a checkpoint is written; the save says so, and the old checkpoint stays."""

import errno
import os
import subprocess

import pytest
import torch
from faults.job import Job, State, check_index, check_tidy, restored
from support.sweeps import SWEEP_STRIDE

from recckpt.errors import SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import newest as locate_newest
from recckpt.storage import open_storage

PAGE = os.sysconf("SC_PAGESIZE")
ROWS = 9000
SIZES = 200
OLD, NEW = State(1), State(2)


class Disk:
    """A tmpfs with no more room than it is told to have."""

    def __init__(self, path):
        self.path = path
        path.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(path)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"NO FULL DISK WAS TESTED, a tmpfs may not be mounted here: {done.stderr}")

    def leave(self, n_bytes=64 << 20, n_files=10_000):
        """Leave so much room beside what is there."""
        found = os.statvfs(self.path)
        size = (found.f_blocks - found.f_bfree) * found.f_frsize + n_bytes
        limits = f"remount,size={size},nr_inodes={found.f_files - found.f_ffree + n_files}"
        subprocess.run(["mount", "-o", limits, str(self.path)], check=True)

    def close(self):
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


class Ballast:
    """Something large to save; once that is asked for, another program takes the room that was seen to be free."""

    def __init__(self):
        self.values = torch.arange(100_000, dtype=torch.float32)
        self.when_asked = lambda: None

    def state_dict(self):
        self.when_asked()
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


@pytest.fixture
def mount(tmp_path):
    """Mount a disk, in place of the one before."""
    mounted = []

    def mount():
        while mounted:
            mounted.pop().close()
        mounted.append(Disk(tmp_path / "disk"))
        return mounted[0]

    yield mount
    while mounted:
        mounted.pop().close()


def fill(disk, figures, **room):
    """Save into too little room, or just enough; return whether the save succeeded."""
    url, ballast = disk.path / "runs", Ballast()
    first = Job(url, rows=ROWS)
    first.saver.register_for_checkpointing("ballast", Ballast())
    first.advance()
    first.save()
    job = Job(url, rows=ROWS)
    job.saver.register_for_checkpointing("ballast", ballast)
    job.manager.restore()
    job.advance()
    ballast.when_asked = lambda: disk.leave(**room)
    try:
        try:
            job.save()
        except SaveFailedError as error:
            check_told(error, url)
            newest = OLD
        else:
            newest = NEW
        storage = open_storage(str(url))
        assert locate_newest(storage).manifest.step == newest.step  # by reading alone: there is no room
        check_index(storage, newest)
        assert verify(str(url), threads=1) == []
        ballast.when_asked = lambda: None
        disk.leave()
        restored(url, [newest], rows=ROWS)
        job.save()
        if newest == NEW:
            job.advance()
            job.save()
        last = State(newest.step + 1)
        restored(url, [last], rows=ROWS)
        check_tidy(job.saver.storage, 1, last)
    except BaseException as error:
        figures.add("T4", lost=1)
        raise AssertionError(f"{room}: {error!r}") from error
    figures.add("T4", sizes=1, lost=0)
    return newest == NEW


def check_told(error, url):
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC, f"told is {error.__cause__!r}"
    assert f"failed: No space left on device: '{url}/" in str(error)


def need(mount, figures):
    """Return how many pages a save needs."""
    enough = 4 * SIZES
    low = 0
    while low < enough:
        tried = (low + enough) // 2
        low, enough = (low, tried) if fill(mount(), figures, n_bytes=tried * PAGE) else (tried + 1, enough)
    return enough


def fill_up(mount, figures, stride=1):
    """Try every ``stride``-th number of pages up to what a save needs, and a few more."""
    enough = need(mount, figures)
    for n in range(enough % stride, enough + 5, stride):
        fill(mount(), figures, n_bytes=n * PAGE)


def test_a_save_with_less_room_than_it_needs_fails_and_loses_nothing(mount, figures):
    outcomes = [fill(mount(), figures, n_bytes=n * PAGE) for n in (0, 3, 60, 150, 400)]
    assert outcomes == [False, False, False, False, True]


def test_a_disk_that_takes_no_more_files_loses_nothing(mount, figures):
    outcomes = [fill(mount(), figures, n_files=n) for n in (0, 7, 40)]
    assert outcomes == [False, False, True]


def test_a_save_that_would_not_fit_is_refused_before_it_begins(mount, tmp_path):
    disk = mount()
    job = Job(disk.path / "runs", rows=ROWS)
    job.advance()
    disk.leave(ROWS * 8)
    with pytest.raises(SaveFailedError, match=f"No space|make room, or lower max_keep: '{disk.path}"):
        job.save()
    assert list((disk.path / "runs").iterdir()) == []
    disk.leave()
    job.save()
    restored(disk.path / "runs", [OLD], rows=ROWS)


@pytest.mark.slow
def test_a_save_into_any_room_from_none_to_enough_loses_nothing(mount, figures):
    fill_up(mount, figures, SWEEP_STRIDE)


@pytest.mark.slow
def test_a_save_into_any_number_of_files_loses_nothing(mount, figures):
    succeeded = [fill(mount(), figures, n_files=n) for n in range(0, 40, min(SWEEP_STRIDE, 13))]
    assert (succeeded[0], succeeded[-1]) == (False, True)
