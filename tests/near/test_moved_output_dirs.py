"""T12: near saves belong to the place of an output dir; what they do where it is moved, linked or copied."""

import shutil

from near.test_near_saves import begun, rows
from near.test_ranks import on_hosts, together, trained
from support.near_runs import NearRun, output_dir

import recckpt
from recckpt import Near
from recckpt.near.near_dir import places

NEAR = "../near"
CHECKPOINT, NEWEST = {1: 1.0}, {1: 1.0, 2: 2.0}


def test_an_output_dir_that_was_moved_goes_on_from_its_checkpoint_and_back_in_its_place_from_its_near_save(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    begun(here, near=NEAR)
    here.rename(there)
    assert rows(NearRun(there, near=NEAR).restore()) == CHECKPOINT
    there.rename(here)
    assert rows(NearRun(here, near=NEAR).restore()) == NEWEST


def test_what_is_trained_where_it_was_moved_to_counts_and_no_near_save_of_before(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    begun(here, near=NEAR)
    here.rename(there)
    NearRun(there, near=NEAR).restore().put(_3=3.0).step().put(_4=4.0).step()
    left = CHECKPOINT | {3: 3.0, 4: 4.0}
    assert rows(NearRun(there, near=NEAR).restore()) == left
    there.rename(here)
    run = NearRun(here, near=NEAR).restore()
    assert rows(run) == CHECKPOINT, "the near saves of both places count no more here"
    run.put(_5=5.0).step().put(_6=6.0).step()
    assert rows(NearRun(here, near=NEAR).restore()) == CHECKPOINT | {5: 5.0, 6: 6.0}


def test_a_link_to_an_output_dir_leads_to_its_near_saves(tmp_path):
    begun(tmp_path / "here", near=NEAR)
    (tmp_path / "link").symlink_to("here")
    assert rows(NearRun(tmp_path / "link", near=NEAR).restore()) == NEWEST


def test_another_output_dir_in_the_place_of_one_that_was_moved_sees_nothing_of_it(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    begun(here, near=NEAR)
    here.rename(there)
    assert rows(NearRun(here, near=NEAR).restore()) == {}
    begun(here, near=NEAR)
    shutil.rmtree(here)
    there.rename(here)
    assert rows(NearRun(here, near=NEAR).restore()) == CHECKPOINT, "those of the other took their place"


def test_hosts_of_a_moved_output_dir_agree_on_its_checkpoint(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    on_hosts(here, ["../a", "../b"], trained)
    here.rename(there)
    assert together(on_hosts(there, ["../a", "../b"], lambda run: rows(run.restore()))) == NEWEST
    assert together(on_hosts(there, ["../a", "../b"], lambda run: rows(run.restore().put(_7=7.0).step()))) == NEWEST | {
        7: 7.0
    }


def test_a_forgetting_names_the_host_of_the_place_before(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    begun(here, near=NEAR)
    here.rename(there)
    [done] = recckpt.rewrite.forget(there / "runs", "t", [2])
    assert [host.path for host in done.near_hosts] == [str(tmp_path / "near")]
    there.rename(here)
    assert rows(NearRun(here, near=NEAR).restore()) == CHECKPOINT
    assert [place.url() for place in places(Near(tmp_path / "near"))] == [output_dir(here).url]
