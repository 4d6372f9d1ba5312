"""Somebody goes on from a mirror while it is written, at any moment: it refuses, and takes nothing of theirs."""

import shutil
from contextlib import suppress

import pytest
from faults.watched_storage import watch
from support.forgetting import ForgettingRun, fill, ids_at
from support.mirrors import content, listing_of
from support.sweeps import SWEEP_STRIDE

import recckpt
from recckpt.errors import WriterFencedError
from recckpt.inspect.verify import verify
from recckpt.mirroring.mirror import Mirror
from recckpt.storage import open_storage

MOST_OPERATIONS = 1000


class Successor:
    """A trainer that restores from a mirror and saves there, before one of the operations of a mirror's pass.

    Attributes:
        n_operations: of the pass, so far.
        kept: directory -> files of what was there right after it had saved.
    """

    def __init__(self, to, at):
        self.to, self.at, self.n_operations, self.operation = to, at, 0, ""
        self.kept = {}

    def before(self, operation):
        self.n_operations += 1
        if self.n_operations == self.at:
            self.operation = operation
            self.save("ckpt_7")
            storage = open_storage(str(self.to))
            self.kept = {c.directory: content(storage, c.directory) for c in listing_of(self.to).committed}

    def save(self, ckpt_id):
        trainer = ForgettingRun(self.to)
        with suppress(recckpt.errors.CheckpointNotFoundError):  # nothing is there yet
            trainer.saver.load()
        fill(trainer.user, ids_at(77), 7.0)
        trainer.saver.save(ckpt_id, step=7)

    def check(self, may_go):
        """Check that what it found and what it saved is as it was, but for what the mirror was just removing."""
        assert verify(str(self.to)) == [], self.operation
        listing, storage = listing_of(self.to), open_storage(str(self.to))
        assert listing.damaged == {}, self.operation
        for directory, files in self.kept.items():
            if directory not in may_go:
                assert content(storage, directory) == files, (self.operation, directory)
        assert listing.ckpt_ids[-1] == "ckpt_7"
        assert {c.directory for c in listing.committed} <= self.kept.keys(), self.operation
        self.save("ckpt_8")


def first(run, to):
    """All is copied."""
    return set()


def later(run, to):
    """A full checkpoint is new, and what the mirror has goes."""
    recckpt.mirror(run, to)
    trainer = ForgettingRun(run, deltas=False, max_keep=1)
    trainer.saver.load()
    trainer.saver.save("ckpt_5", step=5)
    return {"ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4"}


def attempt(run, to, at, may_go) -> bool:
    """Let a successor take over before one operation of a pass; say whether the pass had so many."""
    made, successor = Mirror(run, to, threads=1), Successor(to, at)
    watch(made._to, successor.before)
    refusal = ""
    try:
        made.update()
    except WriterFencedError as error:
        refusal = str(error)
    assert "it is no mirror" in refusal or successor.n_operations < at, successor.operation
    if successor.n_operations < at:
        return False
    successor.check(may_go)
    with pytest.raises(WriterFencedError, match="no mirror"):
        recckpt.mirror(run, to)
    return True


def test_while_it_copies(tmp_path):
    ForgettingRun(tmp_path / "run").save_chain()
    assert attempt(tmp_path / "run", tmp_path / "to", 50, first(tmp_path / "run", tmp_path / "to"))


@pytest.mark.slow
@pytest.mark.parametrize("scene", [first, later])
def test_at_any_moment(tmp_path, scene):
    run, base, to = tmp_path / "run", tmp_path / "base", tmp_path / "to"
    ForgettingRun(run).save_chain()
    may_go = scene(run, base)
    for n_points, at in enumerate(range(1, MOST_OPERATIONS, SWEEP_STRIDE)):
        if base.exists():
            shutil.copytree(base, to)
        if not attempt(run, to, at, may_go):
            print(f"{scene.__name__}: {n_points} points")  # for docs/reliability.md, with -s
            assert n_points > 1
            return
        shutil.rmtree(to)
    raise AssertionError(f"more than {MOST_OPERATIONS} operations")
