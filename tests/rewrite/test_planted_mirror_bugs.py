"""Bugs that are planted in the mirror are found by what it is held against."""

import errno
import shutil
from itertools import count

import pytest
from faults.plants import Plant, plants_of
from faults.storage_faults import Faults
from rewrite import test_mirror_of_forgotten, test_mirroring, test_two_mirrors
from rewrite.test_mirror_kills import GONE, after_a_forgetting_that_it_has_more_of, after_a_rotation, first
from support.forgetting import ForgettingRun, files_with
from support.mirrors import check_same, check_whole
from support.sweeps import mostly_slow

import recckpt
from recckpt.errors import RecckptError
from recckpt.policies.keep import All
from recckpt.rewrite.mirroring import Mirror

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
        recckpt.rewrite.mirror(run, to, keep=keep)
        check_same(run, to)
        assert files_with(to, gone) == {}
        if not faults.has_struck:
            return


def new_deaths(tmp_path):
    deaths(first, tmp_path)


def later_deaths(tmp_path):
    deaths(after_a_rotation, tmp_path)


def forgetting_deaths(tmp_path):
    def in_both(run, to):
        after_a_forgetting_that_it_has_more_of(run, to)
        recckpt.rewrite.forget(run, "item", GONE)

    deaths(in_both, tmp_path, All(), GONE)


def rivals(run, to, tmp_path):
    base = shutil.copytree(run, tmp_path / "base")
    for at in range(1, 200, STRIDE):
        shutil.rmtree(run)
        shutil.copytree(base, run)
        try:
            if not test_two_mirrors.attempt(run, to, at, test_two_mirrors.a_rotation):
                return
        except OSError as error:
            raise AssertionError("the mirror goes on in what is another's by now") from error
        shutil.rmtree(to)


COPIER, HOLD = "recckpt.rewrite.mirror_copies:CheckpointCopier", "recckpt.rewrite.mirror_hold:MirrorHold"
CHECK, UPDATE = "recckpt.rewrite.mirror_copies:_check", "recckpt.rewrite.mirroring:Mirror.update"
BEGIN, READ = "self._begin(directory, checkpoint.manifest, data)", "data = read_twice(files, path, read)"
BRING, SELECT = "this.bring(run, there)", "recckpt.rewrite.mirror_selection:select"
PLANTED = {
    "files_are_not_checked": (
        test_mirroring.test_a_damaged_checkpoint_is_never_copied_and_the_others_are,
        Plant(CHECK, "path = layout.join(checkpoint.directory, entry.name)", "return"),
    ),
    "deltas_before_what_they_stand_on": (
        new_deaths,
        Plant(SELECT, "Selection(tuple(missing.values())", "Selection(tuple(missing.values())[::-1]"),
    ),
    "manifest_before_files": (
        new_deaths,
        Plant(f"{COPIER}._copy", BEGIN, f"{BEGIN}, self.to.put_if_absent(f'{{directory}}/{{layout.MANIFEST}}', data)"),
    ),
    "drafts_stay": (
        new_deaths,
        Plant(f"{COPIER}._copy", "if layout.is_draft(name):", "if False:"),
        Plant(
            f"{COPIER}._copy_file",
            READ,
            f"{READ}; directory = checkpoint.directory\n"
            "    _ = directory == 'ckpt_1' or self.to.draft(path + '.0123456789abcdef.tmp').close()",
        ),
    ),
    "removal_before_copies": (
        later_deaths,
        Plant(
            "recckpt.rewrite.mirroring:OnePass.bring",
            "self.run, self.there = run, there",
            "self.run, self.there = run, there; self._select(); self.remove()",
        ),
    ),
    "manifest_goes_last": (later_deaths, *plants_of("data before the manifest at a removal")),
    "marked_before_it_is_gone": (
        forgetting_deaths,
        Plant(UPDATE, BRING, f"(mark_forgotten(self._to, forgotten), {BRING})[1]"),
    ),
    "parts_are_not_checked": (
        test_mirroring.test_every_flipped_byte_of_a_part_is_seen,
        Plant(CHECK, "part = parts.get(entry.name)", "return"),
    ),
    "what_is_removed_is_committed": (
        test_mirroring.test_what_the_run_removes_while_it_is_copied_is_not_there_and_what_came_after_is,
        Plant(f"{COPIER}._commit", "if not has_manifest(self.run, directory):", "if False:"),
    ),
    "no_fence": (rivals, Plant(f"{HOLD}.check", "if now is None:", "return\n    if now is None:")),
    "what_came_late_stays": (
        test_two_mirrors.test_a_manifest_that_comes_late_is_taken_back_where_its_files_are_gone,
        Plant(f"{COPIER}._commit", "if directory in list_checkpoints(self.to).damaged:", "if False:"),
    ),
    "everybody_is_a_mirror": (
        test_mirroring.test_another_run_and_what_is_no_mirror_are_refused_before_anything_changes,
        Plant(f"{HOLD}.look", "there, url = mirror_note(self._to), self._to.url", "return"),
    ),
    "savers_do_not_look_for_a_mirror": (
        test_mirroring.test_a_saver_that_was_made_before_the_mirror_saves_nothing_there,
        Plant("recckpt.output_dir.notes:refuse_mirror", "if note is not None:", "if False:"),
    ),
    "savers_look_for_a_mirror_before_they_claim_alone": (
        test_mirroring.test_a_saver_that_finds_a_mirror_has_come_since_it_looked_leaves_the_place_to_it,
        Plant("recckpt.output_dir.fence:claim_next", "refuse_mirror(storage)  # again", "pass  # again"),
    ),
    "a_mirror_does_not_look_again_for_savers": (
        test_mirroring.test_a_mirror_that_finds_a_saver_has_come_since_it_looked_leaves_the_place_to_it,
        Plant(f"{HOLD}._refuse_writers", "if epochs:", "if False:"),
    ),
    "forgotten_ids_stay": (
        test_mirror_of_forgotten.test_what_the_mirror_alone_has_goes_too,
        Plant(UPDATE, "is_forgotten=not forgotten <= before", "is_forgotten=False"),
    ),
}
HARNESSES = {harness.__name__: harness for harness, *_ in PLANTED.values()}


def hold(harness, tmp_path):
    """Call a harness with what its fixtures would give it."""
    names = harness.__code__.co_varnames[: harness.__code__.co_argcount]
    given = {"tmp_path": tmp_path, "run": tmp_path / "run", "to": tmp_path / "to"}
    given |= {"memory_url": f"memory://{tmp_path}", "name": test_mirroring.KINDS[0]}
    if "run" in names:
        ForgettingRun(given["run"]).save_chain()
    harness(**{name: given[name] for name in names})


@mostly_slow()
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(tmp_path, monkeypatch, name):
    harness, *bugs = PLANTED[name]
    for bug in bugs:
        monkeypatch.setattr(bug.function, "__code__", bug.code)
    with pytest.raises(FOUND):
        hold(harness, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARNESSES)
def test_without_a_bug_nothing_is_found(tmp_path, name):
    hold(HARNESSES[name], tmp_path)
