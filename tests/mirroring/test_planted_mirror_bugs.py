"""Bugs that are planted in the mirror are found by what it is held against."""

import errno
import shutil
from itertools import count

import pytest
from faults.storage_faults import Faults
from mirroring import test_mirror, test_mirror_is_continued, test_mirror_of_forgotten
from mirroring.test_mirror_kills import GONE, after_a_forgetting_that_it_has_more_of, after_a_rotation, first
from support.forgetting import ForgettingRun, files_with
from support.mirrors import check_same, check_whole, out_of_reach
from support.sweeps import mostly_slow

import recckpt
from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.mirroring import copying, files_beside, hold, mirror, one_pass, selection
from recckpt.mirroring.mirror import Mirror
from recckpt.policies.keep import All

FOUND = (AssertionError, RecckptError, pytest.fail.Exception)
STRIDE = 3  # of deaths


def deaths(scene, tmp_path, keep=None, gone=()):
    """Let mirrors die at one operation after another, and check what they leave, and what the next makes of it."""
    run, base, to = tmp_path / "run", tmp_path / "base", tmp_path / "to"
    ForgettingRun(run).save_chain()
    scene(run, base)
    for number in count(1, STRIDE):
        shutil.rmtree(to, ignore_errors=True)
        if base.exists():
            shutil.copytree(base, to)
        made = Mirror(run, to, keep=keep, threads=1)
        faults = Faults(made._to)
        faults.plant(number, errno.EIO, for_ever=True)
        try:
            made.update()
        except (OSError, RecckptError):
            assert faults.has_struck
        assert check_whole(to).committed or not base.exists(), number
        recckpt.mirror(run, to, keep=keep)
        check_same(run, to)
        assert files_with(to, gone) == {}
        if not faults.has_struck:
            return


def new_deaths(tmp_path):
    deaths(first, tmp_path)


def later_deaths(tmp_path):
    deaths(after_a_rotation, tmp_path)


def forgetting_deaths(tmp_path):
    deaths(after_a_forgetting_in_both, tmp_path, All(), GONE)


def after_a_forgetting_in_both(run, to):
    after_a_forgetting_that_it_has_more_of(run, to)
    with out_of_reach(to):
        recckpt.forget(run, "item", GONE)


def saved(tmp_path):
    ForgettingRun(tmp_path / "run").save_chain()
    return tmp_path / "run", tmp_path / "to"


def damage(tmp_path):
    test_mirror.test_a_damaged_checkpoint_is_never_copied_and_the_others_are(*saved(tmp_path), test_mirror.KINDS[0])


def flips(tmp_path):
    test_mirror.test_every_flipped_byte_of_a_part_is_seen(*saved(tmp_path))


def removals(tmp_path):
    test_mirror.test_what_the_run_removes_while_it_is_copied_is_not_there_and_what_came_after_is(
        tmp_path, tmp_path / "to"
    )


def epochs(tmp_path):
    test_mirror.test_the_claim_of_a_mirror_stays_above_that_of_its_run(*saved(tmp_path))


def others(tmp_path):
    test_mirror.test_another_run_and_what_is_no_mirror_are_refused_before_anything_changes(*saved(tmp_path), tmp_path)


def takeovers(tmp_path):
    run, to = saved(tmp_path)
    for at in (20, 60, 100):
        try:
            assert test_mirror_is_continued.attempt(run, to, at, set())
        except OSError as error:
            raise AssertionError("the mirror has copied what is not in it for readers") from error
        shutil.rmtree(to)


def kept_ids(tmp_path):
    test_mirror_of_forgotten.test_what_the_mirror_alone_has_goes_too(tmp_path, tmp_path / "to")


def manifest_before_files(patch):
    real = copying.CheckpointCopier._begin

    def begin(self, directory, record, data):
        real(self, directory, record, data)
        self.to.put_if_absent(layout.join(directory, layout.MANIFEST), data)

    patch.setattr(copying.CheckpointCopier, "_begin", begin)


def deltas_before_what_they_stand_on(patch):
    real = selection.Selection.__init__

    def backwards(self, missing, *rest):
        real(self, missing[::-1], *rest)

    patch.setattr(selection.Selection, "__init__", backwards)


def files_are_not_checked(patch):
    patch.setattr(copying, "_check", lambda *args: None)


def parts_are_not_checked(patch):
    real = copying._check
    patch.setattr(
        copying, "_check", lambda data, c, entry, parts: layout.is_part(entry.name) or real(data, c, entry, parts)
    )


def what_is_removed_is_committed(patch):
    real = copying.has_manifest
    patch.setattr(copying, "has_manifest", lambda storage, name: storage.url.endswith("/run") or real(storage, name))


def removal_before_copies(patch):
    real = one_pass.OnePass.bring

    def bring(self, run, there):
        self.run, self.there = run, there
        self._select()
        self.remove()
        return real(self, run, self.there)

    patch.setattr(one_pass.OnePass, "bring", bring)


def manifest_goes_last(patch):
    def remove(storage, checkpoint, concurrency):
        for file in (*checkpoint.manifest.files, None):
            storage.remove(layout.join(checkpoint.directory, file.name if file else layout.MANIFEST))
        storage.remove(layout.join(checkpoint.directory, layout.INTENT))
        storage.remove_empty_dirs(checkpoint.directory)
        return True

    patch.setattr(one_pass.rotation, "remove", remove)


def no_fence(patch):
    patch.setattr(hold.MirrorHold, "check", lambda self: None)


def everybody_is_a_mirror(patch):
    patch.setattr(hold.MirrorHold, "look", lambda self, origin, there: None)
    patch.setattr(hold.MirrorHold, "_claims", lambda self: [])


def epochs_of_the_mirror_alone(patch):
    real = hold.MirrorHold.take

    def take(self, origin):
        if self._claim is None:
            real(self, origin)

    patch.setattr(hold.MirrorHold, "take", take)


def forgotten_ids_stay(patch):
    real = mirror.OnePass
    patch.setattr(mirror, "OnePass", lambda *args, is_forgotten: real(*args, is_forgotten=False))


def marked_before_it_is_gone(patch):
    real = one_pass.OnePass.bring

    def bring(self, run, there):
        files_beside.mark_forgotten(self._copier.to, mirror.requests(self._copier.run))
        return real(self, run, there)

    patch.setattr(one_pass.OnePass, "bring", bring)


def drafts_stay(patch):
    patch.setattr(copying.drafts, "is_draft", lambda name: False)
    patch.setattr(copying.CheckpointCopier, "_copy_file", _copy_and_leave_a_draft(copying.CheckpointCopier._copy_file))


def _copy_and_leave_a_draft(real):
    def copy(self, checkpoint, files, parts, advance, entry):
        path = layout.join(checkpoint.directory, f"{entry.name}.{'0' * 16}.tmp")
        self.to.draft(path).close()
        real(self, checkpoint, files, parts, advance, entry)
        if checkpoint.directory == "ckpt_1":
            self.to.remove(path)

    return copy


PLANTED = [
    (files_are_not_checked, damage),
    (deltas_before_what_they_stand_on, new_deaths),
    (manifest_before_files, new_deaths),
    (drafts_stay, new_deaths),
    (removal_before_copies, later_deaths),
    (manifest_goes_last, later_deaths),
    (marked_before_it_is_gone, forgetting_deaths),
    (parts_are_not_checked, flips),
    (what_is_removed_is_committed, removals),
    (no_fence, takeovers),
    (everybody_is_a_mirror, others),
    (epochs_of_the_mirror_alone, epochs),
    (forgotten_ids_stay, kept_ids),
]


@mostly_slow()
@pytest.mark.parametrize(("plant", "harness"), PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found(tmp_path, monkeypatch, plant, harness):
    plant(monkeypatch)
    with pytest.raises(FOUND):
        harness(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("harness", dict.fromkeys(harness for _, harness in PLANTED), ids=lambda each: each.__name__)
def test_without_a_bug_nothing_is_found(tmp_path, harness):
    harness(tmp_path)
