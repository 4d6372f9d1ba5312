"""Each file of a near save, damaged in each way: the near save before comes back, and nothing wrong."""

import os
import shutil

import pytest
from near.test_near_saves import begun, rows
from support.builders import flip_bit
from support.near_runs import NearRun
from support.sweeps import SWEEP_STRIDE

BEFORE = {1: 1.0, 2: 2.0}


def damaged(root, damage):
    """Return what is restored where each file of the newest near save in turn is damaged."""
    run = begun(root).put(_3=3.0).erase(100).step()
    newest = run.near_dirs[-1]
    names = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file() and path.name != "INTENT")
    assert len(names) >= 8
    for name in names:
        kept = (newest / name).read_bytes()
        for change in damage(newest / name):
            change()
            restored = NearRun(root).restore()
            assert rows(restored) == BEFORE, name
            (newest / name).write_bytes(kept)
    assert rows(NearRun(root).restore()) == {**BEFORE, 3: 3.0}


def middle(path):
    yield lambda: flip_bit(path, path.stat().st_size // 2)


def every(path):
    n_bytes = path.stat().st_size
    for at in range(0, n_bytes, max(1, 37 * SWEEP_STRIDE)):
        yield lambda at=at: flip_bit(path, at)


def cut(path):
    yield lambda: os.truncate(path, path.stat().st_size - 1)
    yield lambda: os.truncate(path, 0)


def gone(path):
    yield path.unlink


@pytest.mark.parametrize(
    "damage", [middle, *(pytest.param(each, marks=pytest.mark.slow) for each in (every, cut, gone))]
)
def test_damage_of_any_file_is_passed_over(tmp_path, damage):
    damaged(tmp_path, damage)


@pytest.mark.slow
def test_what_is_not_a_file_is_passed_over(tmp_path):
    run = begun(tmp_path).put(_3=3.0).step()
    kept = tmp_path / "kept"
    for path in [path for path in sorted(run.near_dirs[-1].rglob("*")) if path.is_file() and path.name != "INTENT"]:
        path.rename(kept)
        path.mkdir()
        assert rows(NearRun(tmp_path).restore()) == BEFORE, path
        shutil.rmtree(path)
        kept.rename(path)
