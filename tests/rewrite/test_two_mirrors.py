"""Two mirrors write to one place, at any moment: it stays whole, and nothing that the later one has brought is lost."""

import shutil

import pytest
from faults.storage_faults import watch
from support.forgetting import ForgettingRun, fill, ids_at
from support.mirrors import check_same, check_whole, directories_of, ids_of
from support.sweeps import SWEEP_STRIDE

import recckpt
from recckpt.errors import RecckptError
from recckpt.rewrite.mirroring import Mirror

MOST_OPERATIONS = 1000
OTHER = "another `recckpt mirror`, process .* writes to this mirror; this pass writes nothing more there"


class Rival:
    """Another mirror of the same run, which makes a pass before an operation of the first, by its number or name.

    Attributes:
        n_operations: of the first, so far.
        operation: before which it came; "" where it has not.
    """

    def __init__(self, run, to, at, meanwhile):
        self.run, self.to, self.at, self.meanwhile = run, to, at, meanwhile
        self.n_operations, self.operation = 0, ""

    def before(self, operation):
        self.n_operations += 1
        if not self.operation and self.at in (self.n_operations, operation):
            self.operation = operation
            self.meanwhile(self.run)
            recckpt.rewrite.mirror(self.run, self.to)


def nothing_new(run):
    """The run is as it was."""


def a_rotation(run):
    """The run has a new full checkpoint, and not those before."""
    trainer = ForgettingRun(run, deltas=False, max_keep=1)
    trainer.saver.load()
    trainer.saver.save("ckpt_5", step=5)


def a_delta(run):
    """The run has one more delta."""
    trainer = ForgettingRun(run)
    trainer.saver.load()
    fill(trainer.user, ids_at(60), 9.0)
    trainer.saver.save("ckpt_5", step=5)


def a_forgetting(run):
    """All has been written again."""
    recckpt.rewrite.forget(run, "user", ids_at(5, 50))


def attempt(run, to, at, meanwhile) -> bool:
    """Let a rival come before one operation of a pass; say whether the pass had so many."""
    had = directories_of(to)
    made, rival = Mirror(run, to, threads=1), Rival(run, to, at, meanwhile)
    watch(made._to, rival.before)
    try:
        made.update()
    except RecckptError:
        if not rival.operation:
            raise
    if not rival.operation:
        return False
    assert check_whole(to).committed or not had, rival.operation
    assert ids_of(to)[-1] == ids_of(run)[-1], rival.operation
    recckpt.rewrite.mirror(run, to)
    check_same(run, to)
    assert directories_of(to) == directories_of(run), rival.operation
    return True


def test_the_later_goes_on_and_the_earlier_ends_with_an_error_that_names_it(tmp_path):
    run, to = tmp_path / "run", tmp_path / "to"
    ForgettingRun(run).save_chain()
    made, rival = Mirror(run, to, threads=1), Rival(run, to, 50, a_rotation)
    watch(made._to, rival.before)
    with pytest.raises(RecckptError, match=OTHER):
        made.update()
    check_same(run, to)
    assert directories_of(to) == directories_of(run)
    assert made.update().copied == ()


def test_a_manifest_that_comes_late_is_taken_back_where_its_files_are_gone(tmp_path, memory_url):
    ForgettingRun(tmp_path / "run").save_chain()
    assert attempt(tmp_path / "run", memory_url, "put_if_absent ckpt_1/manifest.json", a_rotation)


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("meanwhile", [nothing_new, a_rotation, a_delta, a_forgetting])
def test_at_any_moment(tmp_path, meanwhile, is_new):
    saved, base, run, to = (tmp_path / name for name in ("saved", "base", "run", "to"))
    ForgettingRun(saved).save_chain()
    if not is_new:
        shutil.copytree(saved, run)
        recckpt.rewrite.mirror(run, base)
        trainer = ForgettingRun(saved, deltas=False, max_keep=1)
        trainer.saver.load()
        trainer.saver.save("ckpt_4a", step=4)
    for n_points, at in enumerate(range(1, MOST_OPERATIONS, SWEEP_STRIDE)):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(saved, run)
        if base.exists():
            shutil.copytree(base, to)
        if not attempt(run, to, at, meanwhile):
            print(f"{meanwhile.__name__}, {is_new}: {n_points} points")  # for docs/reliability.md, with -s
            assert n_points > 1
            return
        shutil.rmtree(to)
    raise AssertionError(f"more than {MOST_OPERATIONS} operations")
