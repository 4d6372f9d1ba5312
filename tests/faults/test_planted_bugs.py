"""T11: the harnesses themselves. A bug is planted in recckpt, and the harness that is to find it finds it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import (
    test_against_a_dict,
    test_delta_operations,
    test_flips,
    test_full_disk,
    test_interleavings,
    test_operations,
)
from faults.conftest import Figures
from faults.delta_marks_model import MarkRules
from faults.delta_states import Rules
from faults.plants import DELTA_PLANTS, OF_CHAINS, OF_MARKS, PLANTS, WITHOUT, plant, plants_of
from faults.test_delta_operations import TrainedTables, Trainer
from faults.test_full_disk import mount  # noqa: F401, a fixture, as those below
from faults.test_kills import Sweep
from faults.test_operations import Kernel
from faults.test_power_cuts import History, try_all
from live import test_random_saves
from load import test_chains as test_loading_chains
from load.test_chains import make  # noqa: F401
from output_dir import test_chains, test_delta_listing, test_expired_links, test_offers, test_rotation
from output_dir.test_delta_listing import chain  # noqa: F401
from output_dir.test_offers import fence, run  # noqa: F401
from output_dir.test_rotation import replaced  # noqa: F401
from rewrite import test_compaction
from save import test_delta_base, test_deltas
from save.test_deltas import training  # noqa: F401
from sparse.table import test_marks
from support import spec_reader
from support.live_runs import OPTIMIZERS
from support.rank_processes import results, run_script
from support.spec_reader import DamagedError
from support.sweeps import mostly_slow

from recckpt import Deltas
from recckpt.errors import SaveFailedError

slow = pytest.mark.slow
DELTAS = Deltas(max_dirty=1.0, max_chain_bytes=99.0)  # wherever there can be one
between = test_marks.test_what_changes_before_and_during_a_save_is_in_the_delta_after_it
WRONG = (AssertionError, DamagedError)


@pytest.fixture
def unseen():
    """Counts that nobody gets: of a harness that is at work on a bug."""
    return Figures()


def test_each_bug_can_still_be_planted():
    for bug in (bug for name in PLANTS for bug in plants_of(name)):
        assert bug.code != bug.function.__code__, bug


@mostly_slow()
@pytest.mark.parametrize(
    ("bug", "call", "first", "what"),
    [
        ("rotation before the commit", "unlink", 1, "restored step 0, which is none of"),
        ("data before the manifest at a removal", "unlink", 1, "damaged: {'ckpt_1'"),
        ("the index file before the manifest", "link", 4, "the index file names steps .2., and 1 is what restores"),
        pytest.param("the index file in place", "write", 40, "the index file is torn: ''", marks=slow),
    ],
)
def test_a_kill_shows(worker, ram, finding, unseen, bug, call, first, what):
    with finding(f"after a kill at {call} .*{what}"):
        Sweep(worker, ram, "rotation", unseen, bug).kill_at_every(call, first=first)


@mostly_slow()
@pytest.mark.parametrize(
    "bug",
    [
        "no fsync of data",
        "no fsync of the manifest",
        "no fsync of the index file",
        pytest.param("no fsync of directories", marks=slow),
        pytest.param("no fsync of the directory of a checkpoint", marks=slow),
        pytest.param("no fsync of the output dir", marks=slow),
    ],
)
def test_a_power_cut_shows(worker, ram, finding, unseen, bug):
    history = History(worker, ram, "same writer", bug)
    with finding("a power cut after .*left is"):
        try_all(history, unseen, ram, {len(history.ops) - 1}, n_random=0)


@slow
def test_a_write_that_fails_half_way_shows(ram, monkeypatch, finding, unseen):
    plant("an error publishes a file", monkeypatch.setattr)
    url = iter(range(10_000))
    with finding("EIO at operation .*'file.write'"):
        test_operations.sweep(unseen, lambda: ram / str(next(url)), "EIO", when="half")


@slow
def test_a_disk_that_syncs_nothing_shows(worker, ram, finding, unseen):
    kernel = Kernel(worker, ram, "first", unseen)
    with finding("fsync:error=EIO:when=1.: saved"):
        kernel.fail("fsync:error=EIO:when=1+", "EIO", plant="an fsync that fails is passed over")


@slow
def test_a_full_disk_shows(mount, monkeypatch, finding, unseen):  # noqa: F811
    plant("a write that fails is taken for done", monkeypatch.setattr)
    with finding("bytes after writing"):
        test_full_disk.fill_up(mount, unseen)


@slow
@pytest.mark.parametrize(("what", "where"), [("manifests", "manifest.json"), ("files", ".pt"), ("columns", ".arrow")])
def test_flips_show(tmp_path, monkeypatch, finding, unseen, what, where):
    plant(f"checksums of {what} are not compared", monkeypatch.setattr)
    damaged = test_flips.Damaged(tmp_path / "runs", test_flips.SCENES["full"])
    flips = [case for case in damaged.flips(200) if min(case[1]).endswith(where)]
    with finding("UNSEEN by"):
        test_flips.all_are_found(unseen, damaged, flips[:30])


@slow
@pytest.mark.parametrize("bug", ["no fence check before a removal", "claims of earlier writers stay"])
def test_a_writer_that_is_held_up_shows(ram, monkeypatch, finding, unseen, bug):
    plant(bug, monkeypatch.setattr)
    with finding("a checkpoint was touched|the owner keeps all of its checkpoints, and .* are gone"):
        test_interleavings.hold_rotations_up(unseen, str(ram))


@slow
@pytest.mark.parametrize(
    ("bug", "what"),
    [
        ("no fence check after the commit", "was acknowledged, found|is acknowledged too late"),
        ("late commits count", "damaged: .*no such file|a late commit counts"),
    ],
)
def test_a_commit_that_is_held_up_shows(ram, monkeypatch, finding, unseen, bug, what):
    plant(bug, monkeypatch.setattr)
    with finding(what):
        test_interleavings.hold_commits_up(unseen, str(ram))


@slow
@pytest.mark.parametrize("bug", ["order by steps as strings", "order by mtime"])
def test_a_dict_shows(monkeypatch, finding, unseen, bug):
    plant(bug, monkeypatch.setattr)
    with finding("expected"):
        test_against_a_dict.run(unseen, 200, 50, derandomize=True)


class Decayed(torch.optim.Adagrad):
    """An optimizer that changes every row at each step, as its class does not."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight *= 0.99
        return loss


class Renamed(torch.optim.Adagrad):
    """An optimizer that does what its class does."""


@pytest.fixture
def at_random(tmp_path, caplog):
    """Return what runs some marathons of an optimizer, in which nothing writes past the marks."""

    def at_random(rule):
        for seed in range(20):
            test_random_saves.Marathon(tmp_path / str(seed), rule, seed, deltas=DELTAS).go_on(40)
            assert "were not marked" not in caplog.text  # each save looks for that, and holds all rows then

    return at_random


@mostly_slow()
@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ("live rows are not copied aside", "SparseAdam"),
        ("a failed save has read the marks", "sparse Adagrad"),
        ("a state that lies elsewhere is taken for that of before", "sparse Adagrad"),
        ("AdamW changes the rows that Adagrad does", "AdamW"),
        ("AdamW changes the rows that Adagrad does", "Adam"),
    ],
)
def test_saves_at_random_show(monkeypatch, finding, at_random, bug, rule):
    plant(bug, monkeypatch.setattr)
    with finding("assert"):
        at_random(rule)


@pytest.mark.slow
def test_saves_at_random_show_a_subclass_that_is_taken_for_its_class(monkeypatch, finding, at_random, tmp_path):
    plant("a subclass is taken for its class", monkeypatch.setattr)
    monkeypatch.setitem(OPTIMIZERS, "renamed", lambda weights: Renamed(weights, lr=0.1))
    monkeypatch.setitem(OPTIMIZERS, "decayed", lambda weights: Decayed(weights, lr=0.1))
    test_random_saves.Marathon(tmp_path / "renamed", "renamed", 0).go_on(40)
    with finding("assert"):
        at_random("decayed")


def test_a_run_shows_prints_of_one_slot_alone(ram, monkeypatch, finding):
    def saves(url):
        trainer = Trainer(url, 1, TrainedTables)
        for _ in range(3):
            trainer.change()
            trainer.content.model["item"].weight.data[49] += 1
            trainer.save()
            trainer.check()

    saves(ram / "right")
    plant("rows are compared by the sum of Adagrad", monkeypatch.setattr)
    with finding("assert"):
        saves(ram / "wrong")


@pytest.mark.slow
def test_ranks_show_that_each_marks_what_it_looked_up_itself(tmp_path, finding):
    script = Path(test_random_saves.__file__).with_name("ddp_ranks.py")
    run_script(script, tmp_path, 2, "each rank marks what it looked up itself")
    for rule, saved in ((rule, of_rule["saved"]) for rule, of_rule in results(tmp_path, 2)[0].items()):
        if rule in ("sparse Adagrad", "Adagrad", "SparseAdam"):
            with finding("assert"):
                assert all(spec_reader.read(tmp_path / rule, "last-2", t) == rows for t, rows in saved["rows"].items())


@dataclass(frozen=True)
class By:
    """What finds a bug.

    Attributes:
        test: a test, run with the bug.
        given: its parameters that are no fixtures.
        error: what it raises.
    """

    test: Callable[..., object]
    given: Mapping[str, Any] = field(default_factory=dict)
    error: type[Exception] | tuple[type[Exception], ...] = WRONG


def during(before, meanwhile, end="committed"):
    """Return what finds a wrong delta after a save during which a table changes."""
    return By(between, {"before": before, "during": meanwhile, "end": end})


FOUND = {
    "base_is_newest_at_takeover": By(test_delta_base.test_what_another_writer_has_gone_on_from_is_no_base),
    "parent_is_name": By(test_delta_base.test_a_delta_on_what_was_compacted_names_the_delta, error=SaveFailedError),
    "ephemeral_keeps_base": By(test_deltas.test_nothing_stands_on_an_ephemeral_delta),
    "failed_keeps_marks": By(
        test_delta_operations.test_after_a_fault_the_next_save_holds_all_that_has_changed,
        {"habit": "goes on", "stride": 7},
    ),
    "closure": By(test_deltas.test_rotation_leaves_what_a_delta_stands_on, {"max_keep": 1}),
    "keep_own_base": By(test_delta_base.test_a_base_stays_though_no_policy_wants_it),
    "dependents_first": By(test_expired_links.test_the_links_of_what_is_kept_stay_and_do_not_count),
    "superseded_first": By(test_expired_links.test_what_is_superseded_goes_and_the_pin_holds_what_supersedes_it),
    "sync_before_drop": By(test_rotation.test_what_is_superseded_goes_only_after_what_supersedes_it_is_durable),
    "unique_names": By(
        test_compaction.test_an_unfinished_offer_does_not_keep_another_from_being_made, error=FileExistsError
    ),
    "adopt_whole": By(
        test_offers.test_an_offer_that_is_not_whole_is_refused, {"file": "sparse/00000-of-00002.g0.00.arrow"}
    ),
    "adopt_own_epoch": By(test_offers.test_an_offer_of_another_epoch_is_refused),
    "adopt_what_counts": By(test_offers.test_an_offer_of_a_delta_whose_chain_is_broken_is_refused, error=IndexError),
    "keeps_place": By(test_offers.test_an_offer_becomes_what_readers_take),
    "keeps_flags": By(test_offers.test_what_is_compacted_of_an_ephemeral_checkpoint_is_ephemeral),
    "last_whole": By(test_chains.test_a_damaged_one_is_passed_over_for_the_delta),
    "look_again": By(test_delta_listing.test_a_missing_link_is_looked_for_again_before_that_is_damage),
    "marks_kept_until_commit": during("write", "erase", "failed"),
    "second_set": during("write", "write"),
    "second_set_is_told": during("write", "write"),
    "erase_moves_marks": during("write and erase", "erase", "failed"),
    "erase_moves_second": during("write", "write and erase"),
    "tombstones_kept_on_failure": during("erase", "write", "failed"),
    "tombstones_in_both": during("write", "erase"),
    "replaced_kept_on_failure": during("clear", "write", "failed"),
    "replaced_in_both": during("write", "clear"),
    "present_are_not_deleted": By(test_deltas.test_erased_ids_are_deleted_and_those_that_are_back_are_rows),
    "new_slot_replaces": By(test_deltas.test_a_table_that_was_cleared_moved_or_got_a_slot_is_replaced),
    "new_store_replaces": By(test_marks.test_a_store_that_is_no_longer_used_is_not_kept),
    "replaced_is_agreed": By(test_deltas.test_a_table_that_is_replaced_on_one_rank_is_on_all),
    "ephemeral_keeps_marks": By(test_deltas.test_nothing_stands_on_an_ephemeral_delta),
    "marks_know_their_base": By(test_marks.test_marks_since_another_base_are_of_no_use),
    "upserts_beat_deletes": By(
        test_loading_chains.test_an_id_that_has_moved_to_another_shard_has_its_row_there, error=Exception
    ),
}


@mostly_slow()
@pytest.mark.parametrize("rule", FOUND)
def test_a_test_finds_what_keeps_to_a_rule_no_longer(request, figures, monkeypatch, rule):
    by = FOUND[rule]
    asked = [name for name in inspect.signature(by.test).parameters if name not in by.given]
    given = {**by.given, **{name: request.getfixturevalue(name) for name in asked}}
    figures.add("T11", planted=1, found=0)
    plant(rule, monkeypatch.setattr)
    with pytest.raises(by.error):
        by.test(**given)
    figures.add("T11", found=1)


BY_A_POWER_CUT = [
    ("sync_base", "delta in doubt"),
    ("sync_base", "forgetting in doubt"),
    ("synced_before_whole", "offer and adoption"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "scene"), BY_A_POWER_CUT)
def test_a_power_cut_finds_what_keeps_to_a_rule_no_longer(worker, ram, finding, rule, scene):
    history = History(worker, ram, scene, rule)
    with finding("a power cut after .*left is"):
        try_all(history, Figures(), ram, {len(history.ops) - 1}, n_random=0)


@pytest.mark.slow
@pytest.mark.parametrize("scene", [scene for _, scene in BY_A_POWER_CUT])
def test_a_power_cut_where_all_rules_are_kept_to_loses_nothing(worker, ram, figures, scene):
    history = History(worker, ram, scene)
    try_all(history, figures, ram, {len(history.ops) - 1}, n_random=0)


@pytest.mark.slow
def test_a_writer_that_is_held_up_finds_a_removal_without_a_check(ram, monkeypatch, finding):
    plant("check_before_removal", monkeypatch.setattr)
    with finding("a checkpoint was touched|the owner keeps all of its checkpoints, and .* are gone"):
        test_interleavings.hold_rotations_up(Figures(), str(ram))


def test_each_rule_is_planted_and_found_or_has_none_to_plant():
    assert {field.name for field in fields(Rules)} == {*OF_CHAINS, *WITHOUT}
    assert {field.name for field in fields(MarkRules)} == {*OF_MARKS}
    assert {*FOUND, *(rule for rule, _ in BY_A_POWER_CUT), "check_before_removal"} == {*DELTA_PLANTS}
