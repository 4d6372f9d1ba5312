"""A real file system is full while a mirror is written: what is there is whole, and with more room it goes on."""

import errno

import pytest
from faults.test_full_disk import PAGE, Disk
from support.forgetting import ForgettingRun
from support.mirrors import check_same, check_whole, directories_of
from support.sweeps import SWEEP_STRIDE

import recckpt


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def mirrored(run, to) -> bool:
    """Mirror; say whether there was room."""
    try:
        recckpt.mirror(run, to)
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
