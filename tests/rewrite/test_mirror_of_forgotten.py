"""What a run has forgotten goes from its mirrors by their next pass, which a forgetting makes where it is told to."""

import logging
import shutil

import numpy as np
import pytest
from support.builders import tree
from support.forgetting import ForgettingRun, files_with, fill, ids_at
from support.mirrors import check_same, ids_of

import recckpt
from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.inspect.absent import look_for
from recckpt.output_dir.forget_requests import audit, requests
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
        recckpt.rewrite.forget(run, table, ids)


def check_forgotten(to):
    assert files_with(to, GONE) == {}
    found = look_for(str(to), np.array(GONE))
    assert (found.holding, found.unread, found.pending, found.n_asked) == ((), {}, {}, len(GONE))


def test_the_next_pass_brings_what_was_written_again_and_removes_what_it_replaces(run, to):
    recckpt.rewrite.mirror(run, to)
    assert files_with(to, GONE)
    forget(run)
    recckpt.rewrite.mirror(run, to)
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
        recckpt.rewrite.mirror(tmp_path / "run", to, keep=All())
    shutil.copytree(to / "ckpt_1", to / "mine")  # as a person copies it
    recckpt.rewrite.forget(tmp_path / "run", "user", GONE)
    recckpt.rewrite.mirror(tmp_path / "run", to, keep=All())
    assert ids_of(to) == ["ckpt_3"]
    check_forgotten_in_user(to)
    again = ForgettingRun(tmp_path / "run", deltas=False, max_keep=1)
    again.saver.load()
    again.saver.save("ckpt_4", step=4)
    recckpt.rewrite.mirror(tmp_path / "run", to, keep=All())
    assert ids_of(to) == ["ckpt_3", "ckpt_4"]


def check_forgotten_in_user(to):
    found = look_for(str(to), np.array(GONE), "user")
    assert (found.holding, found.unread, found.pending) == ((), {}, {})


def test_what_an_interrupted_copy_left_goes_too(run, to):
    recckpt.rewrite.mirror(run, to)
    (to / "ckpt_2" / layout.MANIFEST).unlink()
    part = to / "ckpt_2" / "sparse" / "00000-of-00001.g0.00.arrow"
    part.rename(f"{part}.{'0' * 16}.tmp")
    forget(run)
    recckpt.rewrite.mirror(run, to)
    check_forgotten(to)


def test_the_draft_of_a_part_is_looked_into(run, to):
    recckpt.rewrite.mirror(run, to)
    part = to / "ckpt_2" / "sparse" / "00000-of-00001.g0.00.arrow"
    shutil.copy(part, f"{part}.{'0' * 16}.tmp")
    n_before = look_for(str(run), np.array(GONE)).n_parts
    assert look_for(str(to), np.array(GONE)).n_parts == n_before + 1


def test_nothing_is_copied_while_ids_wait_to_be_forgotten(run, to):
    request = open_storage(str(run))
    recckpt.rewrite.forget(run, "user", GONE)
    name = next(iter(requests(request)))
    (run / layout.forget_request(name)).write_bytes(b"{}")
    with pytest.raises(RecckptError, match="an unfinished request to forget ids"):
        recckpt.rewrite.mirror(run, to)
    assert not to.exists()


def test_without_the_key_of_the_digests_the_mirror_has_none_either(run, to):
    forget(run)
    recckpt.rewrite.mirror(run, to)
    assert (to / layout.FORGET_KEY).read_bytes() == (run / layout.FORGET_KEY).read_bytes()
    (run / layout.FORGET_KEY).unlink()
    recckpt.rewrite.mirror(run, to)
    assert not (to / layout.FORGET_KEY).exists()


def test_forgetting_makes_a_pass_over_each_mirror_that_is_named(run, to, tmp_path):
    newest, other = tmp_path / "newest", tmp_path / "other"
    for place, keep in ((to, None), (newest, 1), (other, None)):
        recckpt.rewrite.mirror(run, place, keep=keep)
    before = tree(other)
    [done] = recckpt.rewrite.forget(run, "user", GONE, mirrors=[to, str(newest)])
    assert done.mirrors_left == {}
    for place in (to, newest):
        check_forgotten_in_user(place)
        check_same(run, place)
    assert tree(other) == before, "nobody has named it"
    assert recckpt.rewrite.mirror(run, to).copied == ()


def test_a_mirror_gets_no_checkpoints_by_a_forgetting_that_it_did_not_have(tmp_path, to):
    trainer = ForgettingRun(tmp_path / "run", deltas=False)
    for step in (1, 2, 3):
        fill(trainer.user, ids_at(5, step), 1.0)
        trainer.saver.save(f"ckpt_{step}", step=step)
    recckpt.rewrite.mirror(tmp_path / "run", to, keep=1)
    recckpt.rewrite.forget(tmp_path / "run", "user", GONE, mirrors=[to])
    assert ids_of(to) == ["ckpt_3"]
    check_forgotten_in_user(to)


def test_mirrors_that_are_not_reached_are_named_and_the_others_are_reached(run, to, tmp_path, caplog):
    away, none = tmp_path / "away", tmp_path / "none"
    for place in (to, away):
        recckpt.rewrite.mirror(run, place)
    away.rename(tmp_path / "elsewhere")
    none.mkdir()
    with caplog.at_level(logging.WARNING):
        [done] = recckpt.rewrite.forget(run, "user", GONE, mirrors=[away, none, to])
    assert done.mirrors_left == {str(away): f"{away}: does not exist", str(none): f"{none}: found no mirror"}
    assert f"the mirror {away} may still have the ids: {away}: does not exist; its next pass" in caplog.text
    check_forgotten_in_user(to)
    assert not away.exists()
    assert list(none.iterdir()) == [], "no mirror is made"
    (tmp_path / "elsewhere").rename(away)
    recckpt.rewrite.mirror(run, away)
    check_forgotten_in_user(away)


def test_mirrors_that_cannot_be_any_are_refused_before_anything_changes(run, tmp_path):
    before = tree(tmp_path)
    for mirrors, error, what in (
        ("s3://backup", TypeError, r"mirrors is a list of paths or URLs, found 's3://backup': write \['s3://backup'\]"),
        ([run], ValueError, "a mirror must be outside its run"),
        ([run / "inside"], ValueError, "a mirror must be outside its run"),
        (["nosuch://place"], ValueError, "nosuch"),
    ):
        with pytest.raises(error, match=what):
            recckpt.rewrite.forget(run, "user", GONE, mirrors=mirrors)
    assert tree(tmp_path) == before


def test_of_a_mirror_of_a_mirror_the_first_is_named_first(run, to, tmp_path):
    second = tmp_path / "second"
    recckpt.rewrite.mirror(run, to)
    recckpt.rewrite.mirror(to, second)
    [done] = recckpt.rewrite.forget(run, "user", GONE, mirrors=[to, second])
    assert done.mirrors_left == {}
    for place in (to, second):
        check_forgotten_in_user(place)
        check_same(run, place)


def test_a_mirror_that_has_yet_to_forget_brings_nothing_back_into_one_that_has(run, to, tmp_path):
    late = tmp_path / "late"
    for place in (to, late):
        recckpt.rewrite.mirror(run, place)
    for table in ("user", "item"):
        recckpt.rewrite.forget(run, table, GONE, mirrors=[to])
    before = tree(to)
    with pytest.raises(RecckptError, match=f"ids were forgotten in this mirror that {late} may still have"):
        recckpt.rewrite.mirror(late, to)
    assert tree(to) == before
    recckpt.rewrite.mirror(run, late)
    recckpt.rewrite.mirror(late, to)
    check_forgotten(to)
