"""T4: a real file system fills up while a checkpoint is written; the save says so, and the old checkpoint stays."""

import errno
import os
import subprocess
import tempfile

import pytest
import torch
from faults.job import Job, State, check_index, check_tidy, restored
from support.forked import outcomes
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import Saver
from recckpt.convert import TARGETS, export_checkpoint, import_checkpoint
from recckpt.errors import SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import newest as locate_newest
from recckpt.sparse import HashTable
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


@pytest.fixture
def exported(tmp_path):
    """A checkpoint of 320 kB of rows, and a function that exports it in a child and returns what became of it."""
    table = HashTable(16, name="t")
    table.insert(torch.arange(4 * PAGE // 4), torch.ones(4 * PAGE // 4, 16))
    Saver(torch.nn.ModuleDict({"t": table}), output_dir=str(tmp_path / "run")).save("c")

    def export(to, target, tmp_dir=None):
        def work(to):
            tempfile.tempdir = tmp_dir and str(tmp_dir)
            return str(export_checkpoint(tmp_path / "run", target, to=to).n_bytes)

        [outcome] = outcomes(work, [to])
        return outcome

    return export


@mostly_slow()
@pytest.mark.parametrize("to", TARGETS)
def test_an_export_to_a_disk_that_is_full_says_so_and_leaves_nothing(mount, exported, to):
    disk = mount()
    disk.leave(4 * PAGE)
    outcome = exported(to, disk.path / "out")
    assert outcome.startswith("OSError: [Errno 28] writing failed: No space left on device"), outcome
    assert f"'{disk.path}/out" in outcome
    assert list(disk.path.iterdir()) == []


@mostly_slow()
@pytest.mark.parametrize(
    ("to", "n_pages"), [("dcp", 80), ("dcp", 4), ("embedding", 4)], ids=["the files of torch", "columns", "a matrix"]
)
def test_an_export_whose_directory_for_temporary_files_is_full_names_it(mount, exported, tmp_path, to, n_pages):
    """Neither a signal, as where pages of a mapped file have no room, nor an error of torch."""
    disk = mount()
    disk.leave(n_pages * PAGE)
    outcome = exported(to, tmp_path / "out", disk.path)
    assert outcome.startswith("OSError: [Errno 28] "), outcome
    assert "No space left on device" in outcome
    assert f"'{disk.path}" in outcome
    assert list(disk.path.iterdir()) == []
    assert not (tmp_path / "out").exists()


@mostly_slow()
@pytest.mark.parametrize("where", ["work", "out"])
def test_an_import_into_a_disk_that_is_full_names_the_directory(mount, exported, tmp_path, where):
    exported("parquet", tmp_path / "parquet")
    disk = mount()
    disk.leave(40 * PAGE)
    places = {"out": tmp_path / "out", "work": tmp_path} | {where: disk.path}
    with pytest.raises(OSError, match=f"failed: No space left on device: '{places[where]}") as caught:
        import_checkpoint(tmp_path / "parquet" / "t", places["out"], work_dir=places["work"])
    assert caught.value.errno == errno.ENOSPC
    assert not list(places["out"].glob("*/manifest.json"))


@pytest.mark.slow
def test_a_save_into_any_room_from_none_to_enough_loses_nothing(mount, figures):
    fill_up(mount, figures, SWEEP_STRIDE)


@pytest.mark.slow
def test_a_save_into_any_number_of_files_loses_nothing(mount, figures):
    succeeded = [fill(mount(), figures, n_files=n) for n in range(0, 40, min(SWEEP_STRIDE, 13))]
    assert (succeeded[0], succeeded[-1]) == (False, True)
