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
    """Restore where each file of the newest near save in turn is damaged; return how often."""
    run = begun(root).put(_3=3.0).erase(100).step()
    newest, tried = run.near_dirs[-1], 0
    names = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file() and path.name != "INTENT")
    assert len(names) >= 8
    for name in names:
        kept = (newest / name).read_bytes()
        for change in damage(newest / name, len(kept)):
            change()
            assert rows(NearRun(root).restore()) == BEFORE, f"{name}: {damage.__name__} {tried}"
            (newest / name).write_bytes(kept)
            tried += 1
    assert rows(NearRun(root).restore()) == {**BEFORE, 3: 3.0}
    return tried


def middle(path, n_bytes):
    yield lambda: flip_bit(path, n_bytes // 2)


def flips(path, n_bytes):
    for at in range(0, n_bytes, 4 * SWEEP_STRIDE):
        yield lambda at=at: flip_bit(path, at)


def cuts(path, n_bytes):
    for n_left in {0, n_bytes - 1, *range(1, n_bytes, 16 * SWEEP_STRIDE)}:
        yield lambda n_left=n_left: os.truncate(path, n_left)


def tails(path, n_bytes):
    for n_more in (1, 4096):
        yield lambda n_more=n_more: os.truncate(path, n_bytes + n_more)


def zeros(path, n_bytes):
    yield lambda: path.write_bytes(bytes(n_bytes))


def losses(path, n_bytes):
    yield path.unlink


@pytest.mark.parametrize(
    "damage", [middle, *(pytest.param(each, marks=pytest.mark.slow) for each in (flips, cuts, tails, zeros, losses))]
)
def test_damage_of_any_file_is_passed_over(tmp_path, damage, record_property):
    tried = damaged(tmp_path, damage)
    record_property("figures", {"T3, damage of near saves": {damage.__name__: tried, "wrong": 0}})
    assert tried * SWEEP_STRIDE >= {flips: 4000, cuts: 1000}.get(damage, 0)


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
