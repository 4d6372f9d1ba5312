"""T1: all processes of a job on two hosts are killed at calls of a restore, and of the first saves that stand on it."""

import shutil
from itertools import count

import pytest
import torch
from near.test_near_saves import rows
from near.test_ranks import near_names, on_hosts, together, trained
from support.builders import flip_bit
from support.killed import killed_at
from support.near_runs import parts_of
from support.sweeps import HOST_STRIDE

import recckpt

NEWEST = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
GOES_ON = {3: NEWEST, 4: NEWEST | {6: 6.0}, 5: NEWEST | {6: 6.0, 7: 7.0}}
FORGOTTEN = {id_: value for id_, value in GOES_ON[5].items() if id_ in (1, 2)}  # only a checkpoint is left
SAVED = {1: FORGOTTEN, 2: FORGOTTEN | {6: 6.0}, 3: FORGOTTEN | {6: 6.0, 7: 7.0}}


def a_new_host(root):
    """A host has gone with all that it has, and one without anything is there."""
    shutil.rmtree(root / "a")
    return ["new", "b"], GOES_ON


def damage(root):
    """Each host has a damaged file that the other has whole."""
    newest = near_names(root, "a")[-1]
    flip_bit(parts_of(root / "a" / newest)[0])
    flip_bit(parts_of(root / "b" / newest)[-1])
    return ["a", "b"], GOES_ON


def more_ranks(root):
    """The hosts have other numbers of ranks, and there is one more."""
    return ["b", "new", "a"], GOES_ON


def a_forgetting(root):
    """Ids were forgotten meanwhile."""
    recckpt.rewrite.forget(root / "runs", "t", [100])
    return ["a", "b"], SAVED


def life(root, hosts):
    """Restore, make a near save, and save a checkpoint; note what is acknowledged."""
    torch.set_num_threads(1)

    def work(run):
        run.restore()
        for id_, do in ((6, run.step), (7, run.step), (8, run.save)):
            n_made = run.counts[0] + run.manager.counts.begun
            if do == run.step:
                run.put(**{f"_{id_}": float(id_)})
            do()
            if run.counts[0] + run.manager.counts.begun > n_made:
                (root / f"acknowledged-{run.manager.global_step}").touch()

    on_hosts(root, hosts, work)


def check(root, hosts, lives, number):
    acknowledged = max([min(lives), *(int(path.name.rpartition("-")[2]) for path in root.glob("acknowledged-*"))])

    def restored(run):
        run.restore()
        found = run.manager.global_step, rows(run)
        assert run.put(_9=9.0).step().counts[1:] == (0, 0)
        return found

    of_ranks = on_hosts(root, hosts, restored)
    [step] = {step for step, _ in of_ranks}
    assert step >= acknowledged, f"killed at {number}: step {acknowledged} was there, {step} came back"
    assert together(own for _, own in of_ranks) == lives[step], f"killed at {number}: step {step} is not what it was"
    assert together(on_hosts(root, hosts, lambda run: rows(run.restore()))) == lives[step] | {9: 9.0}
    assert not list(root.glob("*/recckpt-near/*/*/*/**/*.tmp")), f"killed at {number}: half of a file stays"
    assert all(len(near_names(root, host)) <= 3 for host in hosts), f"killed at {number}: near saves grow"


def sweep(tmp_path, scene, numbers):
    """Kill at these numbers; return the first for which there was no call, if any."""
    root, begun = tmp_path / "run", tmp_path / "begun"
    root.mkdir()
    on_hosts(root, ["a", "b"], trained)
    hosts, lives = scene(root)
    root.rename(begun)  # a near save belongs to the path of its output dir
    for number in numbers:
        shutil.copytree(begun, root)
        was_killed = killed_at(number, lambda: life(root, hosts))
        check(root, hosts, lives, number)
        shutil.rmtree(root)
        if not was_killed:
            return number
    return None


@pytest.mark.parametrize("number", [45])
def test_a_kill_in_a_restore_loses_nothing_that_was_there(tmp_path, number):
    assert sweep(tmp_path, a_new_host, [number]) is None


@pytest.mark.slow
@pytest.mark.parametrize("scene", [a_new_host, damage, more_ranks, a_forgetting])
def test_no_kill_in_a_restore_loses_anything_that_was_there(tmp_path, scene, record_property):
    n_points = sweep(tmp_path, scene, count(0, HOST_STRIDE)) // HOST_STRIDE
    record_property("figures", {"T1, restores over hosts": {scene.__name__: n_points, "lost": 0}})
    assert n_points * HOST_STRIDE > 100
