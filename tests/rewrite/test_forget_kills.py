"""Whoever forgets is killed at any point: nothing else is lost, and what was begun is ended by who comes next."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.delta_runs import rows_of, run_with_chain
from support.forked import in_fork
from support.killed import killed_at
from support.sweeps import SWEEP_STRIDE

import recckpt
from recckpt import CheckpointManager, Saver
from recckpt.inspect.absent import look_for
from recckpt.output_dir.forget_requests import pending, requests
from recckpt.rewrite.forgetting import finish, forget
from recckpt.storage import open_storage

MOST_POINTS = 4000
GONE = [5, 7, 9, 120, 500]
CKPTS = ("ckpt_1", "ckpt_2", "ckpt_3")


def chain(run):
    """A full checkpoint and two deltas."""


def compacted(run):
    """The newest delta was compacted, and the second has an offer."""
    recckpt.rewrite.compact(run.url, adopt=True)
    recckpt.rewrite.compact(run.url, "ckpt_2")


def compacted_twice(run):
    """Both deltas were compacted, so that there are three chains."""
    for ckpt_id in ("ckpt_2", "ckpt_3"):
        recckpt.rewrite.compact(run.url, ckpt_id, adopt=True)


def with_leftovers(run):
    """A save that died, and a copy that a person made."""
    shutil.copytree(f"{run.url}/ckpt_2", f"{run.url}/ckpt_9")
    Path(run.url, "ckpt_9", "manifest.json").unlink()
    shutil.copytree(f"{run.url}/ckpt_1", f"{run.url}/mine")


def begun_before(run):
    """Whoever forgot has died when the first was there anew."""
    assert killed_at(120, lambda: forget(run.url, "item", GONE))
    assert pending(run)


def forget_again(run):
    forget(run.url, "item", GONE)


def go_on(run):
    finish(run.url)
    if not requests(run):  # it died before it was asked
        forget(run.url, "item", GONE)


def restore(run):
    """A trainer starts."""
    from torch import nn

    from recckpt.sparse import HashTable

    saver = Saver(nn.ModuleDict({"item": HashTable(2, name="item")}), output_dir=run.url, max_keep=None)
    CheckpointManager(saver, 1).restore(load_conf={"exclude": ["global_step"]})
    if not requests(run):
        forget(run.url, "item", GONE)


SCENES = [chain, compacted, compacted_twice, with_leftovers, begun_before]
NEXT = [forget_again, go_on, restore]


def check_not_lost(run, before, after, number) -> None:
    """Check that each checkpoint is there, with the ids or without them."""
    for name in CKPTS:
        assert rows_of(run, name) in (before[name], after[name]), (number, name)


def check_ended(run, after, number) -> None:
    for name in CKPTS:
        assert rows_of(run, name) == after[name], (number, name)
    found = look_for(run.url, np.array(GONE), "item")
    assert (found.holding, found.unread, found.pending) == ((), {}, {}), number
    assert found.n_asked == len(GONE)
    assert not pending(run)


@pytest.mark.parametrize(
    ("scene", "stride"),
    [(compacted, 301), *(pytest.param(scene, SWEEP_STRIDE, marks=pytest.mark.slow) for scene in SCENES)],
)
def test_who_is_killed_loses_nothing_and_the_next_one_ends_it(tmp_path, scene, stride):
    first = run_with_chain(tmp_path / "first")
    scene(first)
    before = {name: rows_of(first, name) for name in CKPTS}
    after = {name: {id_: row for id_, row in rows.items() if id_ not in GONE} for name, rows in before.items()}
    n_points = 0
    for number in range(0, MOST_POINTS, stride):
        run = open_storage(str(shutil.copytree(first.url, tmp_path / "run")))
        was_killed = killed_at(number, partial(forget, run.url, "item", GONE))
        check_not_lost(run, before, after, number)
        following = NEXT[number // stride % len(NEXT)]
        said = in_fork(partial(following, run))
        assert said == "None", (number, following.__name__, said)
        check_ended(run, after, number)
        shutil.rmtree(run.url)
        n_points += was_killed
        if not was_killed:
            break
    print(f"{scene.__name__}: {n_points} points")  # for docs/reliability.md, with -s
    assert n_points
    assert number < MOST_POINTS - stride
