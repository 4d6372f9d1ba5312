"""T8: the near dir of one host of several fills up while a near save is written there; training and others go on."""

import shutil
from itertools import count

import pytest
from faults.test_full_disk import PAGE, Disk
from near.test_moving import saves_on
from near.test_near_saves import OTHERS, rows
from near.test_ranks import on_hosts, together
from support.sweeps import SWEEP_STRIDE

HOSTS = ("a", "b", "c")
FULL = "disk/full"
LEFT = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}


def train(run, root, hosts, disk, room):
    """Make near saves, the second into too little room or just enough; return whether that was made."""
    is_full = run.near_path == root / FULL
    run.put(_1=1.0, **OTHERS).step().put(_2=2.0).step()
    tier = run.saver.near_saves.tier
    make = tier.make

    def take_room(*arguments):  # as another program does, once the room was seen to be there
        disk.leave(**room)
        make(*arguments)

    if is_full:
        tier.make = take_room
    run.put(_3=3.0, _4=4.0).step()
    made, failed, skipped = run.counts
    assert (made + failed, skipped) == (2, 0)
    if run.saver.near_saves.ranks.keys() == {(0, len(hosts))}:  # while the others wait for it at the next one
        assert {host: saves_on(root, host) for host in hosts} == dict.fromkeys(hosts, [2, 3][:made])
    run.save()
    if is_full:
        tier.make = make
        disk.leave()
    if 4 in run.rows:
        run.erase(4)
    run.put(_5=5.0).step()
    assert run.counts == (made + 1, failed, 0)
    return made == 2


def fill(root, disk, log, victim, **room):
    """Fill the near dir of a rank up in a run; return whether the near save was made all the same."""
    log.clear()
    hosts = [FULL if rank == victim else host for rank, host in enumerate(HOSTS)]
    root.mkdir(exist_ok=True)
    disk.leave()
    outcomes = on_hosts(root, hosts, lambda run: train(run, root, hosts, disk, room), copies=2)
    assert len(set(outcomes)) == 1
    failures = [message for message in log.messages if "near save failed" in message]
    assert all("No space left on device" in message for message in failures), failures
    for there in (hosts, [host for host in hosts if host != FULL]):
        assert together(on_hosts(root, there, lambda run: rows(run.restore()))) == LEFT, room
    shutil.rmtree(root / FULL)
    for name in ("runs", *HOSTS):
        shutil.rmtree(root / name, ignore_errors=True)
    return outcomes[0]


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def test_a_host_whose_near_dir_is_full_fails_the_near_save_on_all_and_nothing_else(tmp_path, disk, caplog):
    assert not fill(tmp_path, disk, caplog, victim=1, n_bytes=15 * PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(len(HOSTS)))
@pytest.mark.parametrize(("what", "unit"), [("n_bytes", PAGE), ("n_files", 1)])
def test_a_host_with_any_room_from_none_to_enough_loses_nothing(
    tmp_path, disk, caplog, victim, what, unit, record_property
):
    for number in count(0, SWEEP_STRIDE):
        is_made = fill(tmp_path, disk, caplog, victim, **{what: number * unit})
        if is_made:
            break
    record_property("figures", {"T8, near dirs that fill up": {what: 1 + number // SWEEP_STRIDE, "lost": 0}})
    assert number > 10
