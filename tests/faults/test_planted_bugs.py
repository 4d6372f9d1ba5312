"""T11: the harnesses themselves. A bug is planted in recckpt, and the harness that is to find it finds it.

Those of object stores (T5, T6) and of readers (T8) have their plants beside them.
"""

import pytest
from faults import test_against_a_dict, test_flips, test_full_disk, test_interleavings, test_operations
from faults.conftest import Figures
from faults.plants import PLANTS, plant, plants_of
from faults.test_full_disk import mount  # noqa: F401, a fixture
from faults.test_kills import Sweep
from faults.test_operations import Kernel
from faults.test_power_cuts import History, try_all
from support.sweeps import mostly_slow

slow = pytest.mark.slow


@pytest.fixture
def unseen():
    """Counts that nobody gets: of a harness that is at work on a bug."""
    return Figures()


def test_each_bug_can_still_be_planted():
    for bug in (bug for name in PLANTS for bug in plants_of(name)):
        assert bug.code != bug.function.__code__, bug


# T1. Of the calls of a save, the first that could show the bug.


@mostly_slow()
@pytest.mark.parametrize(
    ("bug", "call", "first", "what"),
    [
        ("rotation before the commit", "unlink", 1, "restored step 0, which is none of"),
        ("data before the manifest at a removal", "unlink", 1, "damaged: {'ckpt_1'"),
        ("the index file before the manifest", "link", 4, "the index file names steps .2., and 1 is what restores"),
        pytest.param("the index file in place", "write", 40, "the index file is torn: ''", marks=slow),
    ],
)
def test_a_kill_shows(worker, ram, finding, unseen, bug, call, first, what):
    with finding(f"after a kill at {call} .*{what}"):
        Sweep(worker, ram, "rotation", unseen, bug).kill_at_every(call, first=first)


# T2


@mostly_slow()
@pytest.mark.parametrize(
    "bug",
    [
        "no fsync of data",
        "no fsync of the manifest",
        "no fsync of the index file",
        pytest.param("no fsync of directories", marks=slow),
        pytest.param("no fsync of the directory of a checkpoint", marks=slow),
        pytest.param("no fsync of the output dir", marks=slow),
    ],
)
def test_a_power_cut_shows(worker, ram, finding, unseen, bug):
    history = History(worker, ram, "same writer", bug)
    with finding("a power cut after .*left is"):
        try_all(history, unseen, ram, {len(history.ops) - 1}, n_random=0)


# T3, T4


@slow
def test_a_write_that_fails_half_way_shows(ram, monkeypatch, finding, unseen):
    plant("an error publishes a file", monkeypatch.setattr)
    url = iter(range(10_000))
    with finding("EIO at operation .*'file.write'"):
        test_operations.sweep(unseen, lambda: ram / str(next(url)), "EIO", when="half")


@slow
def test_a_disk_that_syncs_nothing_shows(worker, ram, finding, unseen):
    kernel = Kernel(worker, ram, "first", unseen)
    with finding("fsync:error=EIO:when=1.: saved"):
        kernel.fail("fsync:error=EIO:when=1+", "EIO", plant="an fsync that fails is passed over")


@slow
def test_a_full_disk_shows(mount, monkeypatch, finding, unseen):  # noqa: F811
    plant("a write that fails is taken for done", monkeypatch.setattr)
    with finding("bytes after writing"):
        test_full_disk.fill_up(mount, unseen)


# T7


@slow
@pytest.mark.parametrize(("what", "where"), [("manifests", "manifest.json"), ("files", ".pt"), ("columns", ".arrow")])
def test_flips_show(tmp_path, monkeypatch, finding, unseen, what, where):
    plant(f"checksums of {what} are not compared", monkeypatch.setattr)
    damaged = test_flips.Damaged(tmp_path / "runs", test_flips.SCENES["full"])
    flips = [case for case in damaged.flips(200) if min(case[1]).endswith(where)]
    with finding("UNSEEN by"):
        test_flips.all_are_found(unseen, damaged, flips[:30])


# T9, T10


@slow
def test_a_writer_that_is_held_up_shows(ram, monkeypatch, finding, unseen):
    plant("no fence check before a removal", monkeypatch.setattr)
    with finding("a checkpoint was touched|the owner keeps all of its checkpoints, and .* are gone"):
        test_interleavings.hold_rotations_up(unseen, str(ram))


@slow
@pytest.mark.parametrize(
    ("bug", "what"),
    [
        ("no fence check after the commit", "was acknowledged, found|is acknowledged too late"),
        ("late commits count", "damaged: .*no such file|a late commit counts"),
    ],
)
def test_a_commit_that_is_held_up_shows(ram, monkeypatch, finding, unseen, bug, what):
    plant(bug, monkeypatch.setattr)
    with finding(what):
        test_interleavings.hold_commits_up(unseen, str(ram))


@slow
@pytest.mark.parametrize("bug", ["order by steps as strings", "order by mtime"])
def test_a_dict_shows(monkeypatch, finding, unseen, bug):
    plant(bug, monkeypatch.setattr)
    with finding("expected"):
        test_against_a_dict.run(unseen, 200, 50, derandomize=True)
