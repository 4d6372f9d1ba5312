"""Processes that are killed at any call of the storage: the newest acknowledged save comes back, or a newer one."""

import itertools
import shutil

import pytest
from near.test_near_saves import rows
from support.killed import killed_at
from support.near_runs import NearRun
from support.sweeps import SWEEP_STRIDE

N_STEPS = 4


def value(step):
    return float(10 * step)


def train(root, run, n_steps):
    """Make steps; step n sets the rows n and 0 and erases row n - 2, and is noted once its save is acknowledged."""
    for _ in range(n_steps):
        step = run.manager.global_step + 1
        run.put(**{f"_{step}": value(step), "_0": value(step)})
        if step > 2:
            run.erase(step - 2)
        before = run.counts, run.manager.counts.begun
        run.step()
        assert run.counts[1] == 0
        if (run.counts, run.manager.counts.begun) != before:
            (root / "acknowledged").write_text(str(step))
    return run


def rows_at(step):
    return {0: value(step)} | {n: value(n) for n in (step - 1, step) if n > 0} if step else {}


def first_life(root):
    train(root, NearRun(root).put(**{f"_{id_}": 0.0 for id_ in range(100, 110)}), N_STEPS).save()


def second_life(root):
    train(root, NearRun(root).restore(), 3).save()


def check(root, number):
    run = NearRun(root).restore()
    step, path = run.manager.global_step, root / "acknowledged"
    acknowledged = int(path.read_text()) if path.exists() else 0
    assert step >= acknowledged, f"killed at {number}: step {acknowledged} was acknowledged, {step} came back"
    assert rows(run) == rows_at(step), f"killed at {number}: step {step} is not what it was"
    train(root, run, 2).save()
    assert rows(NearRun(root).restore(near=False)) == rows_at(step + 2), f"killed at {number}: marks were lost"
    assert len(run.near_dirs) <= 2


def sweep(tmp_path, life, numbers):
    root, begun = tmp_path / "run", tmp_path / "begun"
    root.mkdir()
    if life is second_life:
        first_life(root)
    root.rename(begun)  # a near save belongs to the path of its output dir
    for number in numbers:
        shutil.copytree(begun, root)
        was_killed = killed_at(number, lambda: life(root))
        check(root, number)
        shutil.rmtree(root)
        if not was_killed:
            return number
    return None


@pytest.mark.parametrize("number", [61, 130])
def test_a_kill_takes_nothing_that_was_acknowledged(tmp_path, number):
    assert sweep(tmp_path, first_life, [number]) is None


@pytest.mark.slow
@pytest.mark.parametrize("life", [first_life, second_life])
def test_no_kill_takes_anything_that_was_acknowledged(tmp_path, life):
    assert sweep(tmp_path, life, itertools.count(0, SWEEP_STRIDE)) > 100
