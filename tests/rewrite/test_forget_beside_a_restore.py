"""Whoever forgets does it at any step of a trainer that has restored and goes on to save: what is ended stays gone."""

import shutil
from contextlib import suppress

import numpy as np
import pytest
from support.forgetting import ForgettingRun, fill, ids_at
from support.spec_reader import read
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import CheckpointManager, load_into
from recckpt.errors import RecckptError, SaveFailedError, WriterFencedError
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.listing import list_checkpoints
from recckpt.rewrite import compaction as compacting
from recckpt.rewrite import requests as forgetting
from recckpt.rewrite.compaction import compact
from recckpt.rewrite.forgetting import forget
from recckpt.rewrite.requests import forget_as_owner
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

GONE = ids_at(5, 50, 200)
CALLS = ("make_dir", "put_if_absent", "replace", "create", "sync_dir", "remove", "read", "list_dirs", "list_files")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    path = tmp_path_factory.mktemp("chain") / "runs"
    ForgettingRun(path).save_chain()
    return path


@pytest.fixture
def root(tmp_path, chain):
    return shutil.copytree(chain, tmp_path / "runs")


class Meanwhile:
    """Does some work of another process right before a call of the storage."""

    def __init__(self, monkeypatch, number, work):
        self.n_calls, self._number, self._work = 0, number, work
        for name in CALLS:
            monkeypatch.setattr(LocalStorage, name, self._counted(getattr(LocalStorage, name)))

    def _counted(self, real):
        def call(*args):
            self.n_calls += 1
            if self.n_calls == self._number:
                self._work()
            return real(*args)

        return call


def restored(root):
    run = ForgettingRun(root)
    run.manager = CheckpointManager(run.saver, 1)
    run.manager.restore()
    return run


def filled(root):
    """Return a run that has its rows by load_into, and goes on to save."""
    run = ForgettingRun(root)
    load_into(run.model, root)
    run.manager = CheckpointManager(run.saver, 1, step_prefix="again")
    return run


def holding(root):
    """Return the checkpoints that have any of the ids."""
    current = list_checkpoints(open_storage(str(root))).current
    return [c.ckpt_id for c in current if set(GONE) & set(read(root, c.ckpt_id, "user"))]


def by_a_command(root):
    return lambda: forget(str(root), "user", GONE)


def by_the_owner_before(root):
    fence = Fence(open_storage(str(root)), purpose="recckpt forget")
    fence.hold()
    return lambda: forget_as_owner(open_storage(str(root)), fence, "user", np.array(GONE), "an owner")


@pytest.mark.parametrize("begin", [restored, filled])
@mostly_slow("who")
@pytest.mark.parametrize("who", [by_a_command, by_the_owner_before])
@pytest.mark.parametrize("stride", [15, pytest.param(max(1, SWEEP_STRIDE // 10), marks=pytest.mark.slow)])
def test_what_was_forgotten_beside_a_restore_and_the_save_after_it_stays_gone(root, tmp_path, who, stride, begin):
    n_fenced = 0
    for number in range(1, 10_000, stride):
        there = shutil.copytree(root, tmp_path / f"{number}")
        ask = who(there)

        def meanwhile(ask=ask):
            with suppress(WriterFencedError):
                ask()

        with pytest.MonkeyPatch.context() as patched:
            calls = Meanwhile(patched, number, meanwhile)
            try:
                run = begin(there)
                fill(run.user, ids_at(301), 1.0)
                run.manager.step()
            except (SaveFailedError, WriterFencedError):
                n_fenced += 1
        asked = requests(open_storage(str(there)))
        assert not (asked and all(asked.values()) and holding(there)), f"call {number}: it was ended, and came back"
        if asked:
            restored(there).manager.step()
            assert holding(there) == [], f"call {number}: the next owner has not ended it"
        if calls.n_calls < number:
            break
    assert n_fenced
    assert not asked


def test_the_owner_ends_no_request_that_came_after_it_had_read_and_saves_no_more(root):
    run = restored(root)
    late = by_the_owner_before(root)
    run.manager.step()
    with pytest.raises(WriterFencedError):
        late()
    with pytest.raises(WriterFencedError, match="may contain the ids: nothing is saved; restart from"):
        run.manager.forget("item", ids_at(1))
    assert list(requests(open_storage(str(root))).values()) == [False]
    restored(root)
    assert holding(root) == []


def test_a_compaction_during_which_ids_are_forgotten_offers_nothing(root, monkeypatch):
    def asked_meanwhile(*args):
        forget(str(root), "user", GONE)
        return written(*args)

    written = compacting.write_whole
    monkeypatch.setattr(compacting, "write_whole", asked_meanwhile)
    with pytest.raises((RecckptError, OSError)):
        compact(str(root))
    assert list(root.rglob("offer.json")) == []
    assert holding(root) == []


def test_a_compaction_to_elsewhere_during_which_ids_are_forgotten_commits_nothing(root, tmp_path, monkeypatch):
    written = compacting.write_whole

    def asked_at_its_end(*args):
        whole = written(*args)
        forget(str(root), "user", GONE)
        return whole

    monkeypatch.setattr(compacting, "write_whole", asked_at_its_end)
    with pytest.raises(RecckptError, match="ids had to be forgotten while"):
        compact(str(root), out=tmp_path / "out")
    assert list_checkpoints(open_storage(str(tmp_path / "out"))).committed == ()
    monkeypatch.undo()
    compact(str(root), out=tmp_path / "out")
    assert holding(tmp_path / "out") == []


def test_the_requests_that_a_forgetting_ends_are_looked_for_before_it_is_known_which_came_late(root, monkeypatch):
    run = restored(root)
    late = by_the_owner_before(root)
    run.manager.step()
    real = forgetting.pending

    def asked_right_before(storage):
        monkeypatch.setattr(forgetting, "pending", real)
        with suppress(WriterFencedError):
            late()
        return real(storage)

    monkeypatch.setattr(forgetting, "pending", asked_right_before)
    with pytest.raises(WriterFencedError, match="may contain the ids"):
        run.manager.forget("item", ids_at(1))
