"""What a run has forgotten is forgotten in its mirrors, and a run knows which of them may not have done so."""

import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.builders import tree
from support.forgetting import ForgettingRun, files_with, fill, ids_at
from support.mirrors import check_same, ids_of, listing_of, out_of_reach

import recckpt
from recckpt import CheckpointManager
from recckpt.errors import CorruptCheckpointError, RecckptError, WriterFencedError
from recckpt.format import layout
from recckpt.inspect.absent import look_for
from recckpt.output_dir.forget_requests import audit, requests
from recckpt.output_dir.known_mirrors import known_mirrors, mirrors_behind, note_mirror
from recckpt.policies.keep import All
from recckpt.storage import open_storage

GONE = ids_at(5, 7, 50, 200)
CHAIN = ["ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4"]


@pytest.fixture
def run(tmp_path):
    ForgettingRun(tmp_path / "run").save_chain()
    return tmp_path / "run"


@pytest.fixture
def to(tmp_path):
    return tmp_path / "to"


def forget(run, ids=GONE):
    for table in ("user", "item"):
        recckpt.forget(run, table, ids)


def check_forgotten(to):
    assert files_with(to, GONE) == {}
    found = look_for(str(to), np.array(GONE))
    assert (found.holding, found.unread, found.pending, found.n_asked) == ((), {}, {}, len(GONE))


def test_the_next_pass_brings_what_was_written_again_and_removes_what_it_replaces(run, to):
    recckpt.mirror(run, to)
    assert files_with(to, GONE)
    forget(run)
    recckpt.mirror(run, to)
    check_forgotten(to)
    assert ids_of(to) == CHAIN
    check_same(run, to)
    assert requests(open_storage(str(to))) == requests(open_storage(str(run)))
    assert audit(open_storage(str(to))) == audit(open_storage(str(run)))


def test_what_the_mirror_alone_has_goes_too(tmp_path, to):
    trainer = ForgettingRun(tmp_path / "run", deltas=False, max_keep=1)
    for step in (1, 2, 3):
        fill(trainer.user, ids_at(5, step), 1.0)
        trainer.saver.save(f"ckpt_{step}", step=step)
        recckpt.mirror(tmp_path / "run", to, keep=All())
    shutil.copytree(to / "ckpt_1", to / "mine")  # as a person copies it
    recckpt.forget(tmp_path / "run", "user", GONE)
    recckpt.mirror(tmp_path / "run", to, keep=All())
    assert ids_of(to) == ["ckpt_3"]
    check_forgotten_in_user(to)
    again = ForgettingRun(tmp_path / "run", deltas=False, max_keep=1)
    again.saver.load()
    again.saver.save("ckpt_4", step=4)
    recckpt.mirror(tmp_path / "run", to, keep=All())
    assert ids_of(to) == ["ckpt_3", "ckpt_4"]


def check_forgotten_in_user(to):
    found = look_for(str(to), np.array(GONE), "user")
    assert (found.holding, found.unread, found.pending) == ((), {}, {})


def test_what_an_interrupted_copy_left_goes_too(run, to):
    recckpt.mirror(run, to)
    (to / "ckpt_2" / layout.MANIFEST).unlink()
    part = to / "ckpt_2" / "sparse" / "00000-of-00001.g0.00.arrow"
    part.rename(f"{part}.{'0' * 16}.tmp")
    forget(run)
    recckpt.mirror(run, to)
    check_forgotten(to)


def test_the_draft_of_a_part_is_looked_into(run, to):
    recckpt.mirror(run, to)
    part = to / "ckpt_2" / "sparse" / "00000-of-00001.g0.00.arrow"
    shutil.copy(part, f"{part}.{'0' * 16}.tmp")
    n_before = look_for(str(run), np.array(GONE)).n_parts
    assert look_for(str(to), np.array(GONE)).n_parts == n_before + 1


def test_nothing_is_copied_while_ids_wait_to_be_forgotten(run, to):
    request = open_storage(str(run))
    recckpt.forget(run, "user", GONE)
    name = next(iter(requests(request)))
    (run / layout.forget_request(name)).write_bytes(b"{}")
    with pytest.raises(RecckptError, match="a request to forget ids that is not ended"):
        recckpt.mirror(run, to)
    assert not to.exists()


def test_who_restored_from_a_mirror_before_that_saves_nothing_there(run, to):
    recckpt.mirror(run, to)
    trainer = ForgettingRun(to)
    trainer.saver.load()
    forget(run)
    recckpt.mirror(run, to)
    with pytest.raises(WriterFencedError, match="was called since this process restored"):
        trainer.saver.save("ckpt_5", step=5)


def test_without_the_key_of_the_digests_the_mirror_has_none_either(run, to):
    forget(run)
    recckpt.mirror(run, to)
    assert (to / layout.FORGET_KEY).read_bytes() == (run / layout.FORGET_KEY).read_bytes()
    (run / layout.FORGET_KEY).unlink()
    recckpt.mirror(run, to)
    assert not (to / layout.FORGET_KEY).exists()


def test_a_run_knows_its_mirrors_and_forgetting_reaches_them(run, to, tmp_path):
    for place in (to, tmp_path / "newest"):
        recckpt.mirror(run, place, keep=1 if place != to else None)
    storage = open_storage(str(run))
    assert {(known.url, known.run_url, known.forgotten) for known in known_mirrors(storage)} == {
        (str(place), str(run), frozenset()) for place in (to, tmp_path / "newest")
    }
    forget(run)
    for place in (to, tmp_path / "newest"):
        check_forgotten(place)
        check_same(run, place)
    assert {known.forgotten for known in known_mirrors(storage)} == {frozenset(requests(storage))}
    assert mirrors_behind(storage) == []
    assert recckpt.mirror(run, to).copied == ()


def test_a_mirror_that_is_not_reached_is_named_until_its_next_pass(run, to, tmp_path, caplog):
    recckpt.mirror(run, to)
    to.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING):
        recckpt.forget(run, "user", GONE)
    assert f"the mirror {to} may still have the ids: nothing is there now; its next pass" in caplog.text
    assert [each.url for each in mirrors_behind(open_storage(str(run)))] == [str(to)]
    assert [each.url for each in look_for(str(run), np.array(GONE), "user").mirrors_behind] == [str(to)]
    (tmp_path / "away").rename(to)
    recckpt.mirror(run, to)
    check_forgotten_in_user(to)
    assert look_for(str(run), np.array(GONE), "user").mirrors_behind == ()


def test_a_mirror_of_another_host_or_of_another_copy_of_the_run_is_not_reached(run, to, caplog, tmp_path):
    recckpt.mirror(run, to)
    [known] = known_mirrors(open_storage(str(run)))
    copied = shutil.copytree(run, tmp_path / "copied")  # which has the notes of the run
    (run / known.name).unlink()
    note_mirror(open_storage(str(run)), replace(known, host="elsewhere"))
    before = tree(to)
    with caplog.at_level(logging.WARNING):
        for each in (copied, run):
            recckpt.forget(each, "user", GONE)
    assert f"it is a mirror of {run}, as which this run was known to it" in caplog.text
    assert "it is on the host elsewhere" in caplog.text
    assert tree(to) == before


def test_mirrors_of_mirrors_are_reached_too_in_a_circle_as_well(run, to, tmp_path):
    second, third = tmp_path / "second", tmp_path / "third"
    for source, place in ((run, to), (to, second), (second, third), (third, to), (run, third), (run, to)):
        recckpt.mirror(source, place)
    forget(run)
    for place in (to, second, third):
        check_forgotten(place)
        check_same(run, place)
    assert mirrors_behind(open_storage(str(run))) == []


def test_a_mirror_of_a_mirror_that_is_not_reached_is_named_by_the_run_and_reached_by_the_next_call(
    run, to, tmp_path, caplog
):
    second = tmp_path / "second"
    recckpt.mirror(run, to)
    recckpt.mirror(to, second)
    with out_of_reach(second), caplog.at_level(logging.WARNING):
        recckpt.forget(run, "user", GONE)
    assert f"{to}: the mirror {second} may still have the ids: nothing is there now; its next pass" in caplog.text
    assert [(each.run_url, each.url) for each in mirrors_behind(open_storage(str(run)))] == [(str(to), str(second))]
    recckpt.forget(run, "item", GONE)
    check_forgotten(second)
    assert look_for(str(run), np.array(GONE)).mirrors_behind == ()


def test_a_mirror_that_has_yet_to_forget_brings_nothing_back_into_one_that_has(run, to, tmp_path):
    late = tmp_path / "late"
    for place in (to, late):
        recckpt.mirror(run, place)
    with out_of_reach(late):
        forget(run)
    before = tree(to)
    with pytest.raises(RecckptError, match=f"ids were forgotten there which {late} may still have"):
        recckpt.mirror(late, to)
    assert tree(to) == before
    recckpt.mirror(run, late)
    recckpt.mirror(late, to)
    check_forgotten(to)


def test_behind_a_mirror_that_somebody_went_on_from_all_are_named(run, to, tmp_path, caplog):
    second = tmp_path / "second"
    recckpt.mirror(run, to)
    recckpt.mirror(to, second)
    ForgettingRun(to).saver.save("ckpt_5", step=5)
    before = tree(second)
    with caplog.at_level(logging.WARNING):
        recckpt.forget(run, "user", GONE)
    assert f"{second} may still have the ids: its run is the mirror {to}, which may have them, too" in caplog.text
    assert [each.url for each in mirrors_behind(open_storage(str(run)))] == [str(to), str(second)]
    assert tree(second) == before


def test_where_the_mirrors_of_a_mirror_cannot_be_listed_that_is_said(run, to, tmp_path, caplog):
    recckpt.mirror(run, to)
    recckpt.mirror(to, tmp_path / "second")
    [note] = (to / layout.MIRRORS_DIR).iterdir()
    note.write_text(note.read_text().replace("second", "elsewhere"))
    with caplog.at_level(logging.WARNING):
        recckpt.forget(run, "user", GONE)
    assert f"{run}: mirrors of {to} may still have the ids, and cannot be listed: " in caplog.text
    assert requests(open_storage(str(to))) == requests(open_storage(str(run)))
    [behind] = mirrors_behind(open_storage(str(run)))
    assert (behind.url, "remove it: the next pass of the mirror notes it again" in behind.problem) == (str(to), True)


def test_a_run_that_forgets_by_itself_names_the_mirrors_that_have_yet_to(run, to, caplog):
    recckpt.mirror(run, to)
    trainer = ForgettingRun(run)
    manager = CheckpointManager(trainer.saver, 1)
    manager.restore(load_conf={"exclude": ["global_step"]})
    with caplog.at_level(logging.WARNING):
        manager.forget("user", GONE)
    assert f"its mirrors {to}, and theirs, have the ids until their next pass" in caplog.text
    recckpt.mirror(run, to)
    check_forgotten_in_user(to)


def test_a_mirror_that_cannot_be_noted_says_so(run, to, caplog, monkeypatch):
    def refuse(storage, mirror):
        raise PermissionError(13, "Permission denied", storage.url)

    monkeypatch.setattr("recckpt.mirroring.mirror.note_mirror", refuse)
    with caplog.at_level(logging.WARNING):
        recckpt.mirror(run, to)
    assert "cannot be noted there, so a forgetting does not know of it" in caplog.text
    assert listing_of(to).ckpt_ids == CHAIN


def test_a_damaged_note_is_named(run, to):
    recckpt.mirror(run, to)
    [note] = (run / layout.MIRRORS_DIR).iterdir()
    note.write_text(note.read_text().replace(str(to), "/elsewhere"))
    with pytest.raises(CorruptCheckpointError, match="the next pass of the mirror notes it again"):
        known_mirrors(open_storage(str(run)))
    with pytest.raises(CorruptCheckpointError, match="the next pass of the mirror notes it again"):
        recckpt.forget(run, "user", GONE)
    assert not requests(open_storage(str(run))), "it is refused before anything changes"
    recckpt.mirror(run, to)
    assert known_mirrors(open_storage(str(run)))[0].url == str(to)
    assert json.loads(note.read_text())["url"] == str(to)
