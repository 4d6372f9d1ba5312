"""The manager: counts steps, saves at intervals, and takes up a run where its newest checkpoint left it."""

import logging
import re
import shutil
from datetime import datetime

import numpy as np
import pytest
import torch
from support.builders import ClickModel, Run, checkpoints, flip_bit, state_of, table_state, tree
from support.sweeps import mostly_slow
from support.thread_ranks import no_others
from torch import nn

from recckpt import CheckpointManager, Saver, find_checkpoint
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadConfError, StateMismatchError
from recckpt.load.conf import Entry
from recckpt.load.open_source import opened
from recckpt.load.problems import Problems
from recckpt.load.source import LocatedCheckpoint
from recckpt.output_dir.listing import list_checkpoints, newest


def small(url, interval=1, max_keep=1):
    """Return a manager of a model of one weight, and the weight."""
    model = nn.Linear(1, 1, bias=False)
    return CheckpointManager(Saver(model, output_dir=str(url), max_keep=max_keep), interval), model.weight.data


def advance(manager, weight, n_steps, value=None):
    """Train so that the weight is the step, or a value."""
    for _ in range(n_steps):
        weight.fill_(manager.global_step + 1 if value is None else value)
        manager.step()


NO_COUNT, NO_FLAG = "must be an int of at least 1, found", "must be True or False, found 'no'"
NO_TIME, TOO_LATE = (
    "event_time must be a number of seconds since 1970, found",
    "beyond the year 5000: divide milli",
)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(({"save_interval": n}, f"save_interval {NO_COUNT} {n!r}") for n in (0, -1, 2.5, "3", True, None)),
        ({"save_at_start": "no"}, f"save_at_start {NO_FLAG}"),
        *(({"async_save": how}, "async_save must be True, False, or .* one of .*, found") for how in ("no", 1, None)),
        *(({"ephemeral": n}, "ephemeral must be below save_interval") for n in (10, 11)),
        ({"ephemeral": 0}, f"ephemeral {NO_COUNT} 0"),
        *(({"on_save_error": what}, "on_save_error must be 'raise', 'warn', a callable") for what in ("ignore", None)),
    ],
)
def test_an_option_that_is_none_is_refused_when_the_manager_is_made(tmp_path, options, text):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=text):
        CheckpointManager(saver, **{"save_interval": 10, **options})
    CheckpointManager(saver, 10, ephemeral=9)
    with pytest.raises(TypeError, match=r"saver must be a recckpt.Saver, found a Linear"):
        CheckpointManager(nn.Linear(1, 1), 1)


@pytest.mark.parametrize(
    ("call", "arguments", "error", "text"),
    [
        *(("restore", {flag: "no"}, ValueError, f"{flag} {NO_FLAG}") for flag in ("rng", "required")),
        *(
            ("restore", {"global_step": step}, TypeError, "global_step must be an int or None, found")
            for step in ("3", True, 3.0, "runs/clicks")
        ),
        ("load_model_bank", {"bank": [], "reload_interval": 0}, ValueError, f"reload_interval {NO_COUNT} 0"),
        *(("step", {"event_time": time}, TypeError, NO_TIME) for time in ("noon", datetime(2026, 1, 1), torch.ones(2))),
        *(
            ("step", {"event_time": t}, ValueError, TOO_LATE)
            for t in (1_790_000_000_000, 1.79e18, torch.tensor(1.79e12))
        ),
    ],
)
def test_a_call_with_what_it_cannot_take_is_refused_and_counts_nothing(tmp_path, call, arguments, error, text):
    manager, _ = small(tmp_path)
    with pytest.raises(error, match=text):
        getattr(manager, call)(**arguments)
    assert manager.global_step == 0
    assert checkpoints(tmp_path) == []
    manager.step(event_time=float("inf"))  # no time at all
    assert manager.global_step == 1


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"state": {"a": b"1"}}, ValueError, r"state\['a'\]: found b'1', expected a name and a number, string"),
        ({"state": {"a": {"b": [object()]}}}, ValueError, r"state\['a'\]\['b'\]\[0\]: a builtins.object cannot"),
        ({"state": {"a": {1: 2}}}, ValueError, r"state\['a'\]\[1\]: expected a name"),
        ({"state": {"a": ENDLESS}}, ValueError, "the value contains itself, or is nested more than 8 deep"),
        ({"state": {1: 2}}, ValueError, r"state\[1\]: expected a name"),
        ({"state": {"a": torch.ones(2)}}, ValueError, r"state\['a'\]: found tensor"),
        ({"state": [1]}, TypeError, r"state must be a mapping of names to values, or None, found \[1\]"),
        ({"metrics": [1]}, TypeError, r"metrics must be a mapping of names to values, or None, found \[1\]"),
        ({"metrics": []}, TypeError, r"metrics must be a mapping"),
        ({"metrics": {"auc": "high"}}, ValueError, r"metrics\['auc'\]: found 'high', expected a number"),
        ({"metrics": {"auc": "0.5"}}, ValueError, r"metrics\['auc'\]: found '0.5', expected a number"),
        ({"metrics": {"auc": b"2"}}, ValueError, r"metrics\['auc'\]: found b'2', expected a number"),
        *(
            ({"metrics": {"auc": value}}, ValueError, r"metrics\['auc'\]: found .*, expected a number")
            for value in (None, [0.5], 10**400, torch.ones(2))
        ),
    ],
)
def test_a_step_with_a_state_or_metric_that_cannot_be_saved_is_refused_at_once_and_does_not_count(
    tmp_path, given, error, text
):
    manager, _ = small(tmp_path, interval=100)
    with pytest.raises(error, match=text):
        manager.step(**given)
    assert manager.global_step == 0
    with pytest.raises(error, match=text):
        manager.save(**given)
    assert checkpoints(tmp_path) == []


def test_what_is_kept_with_a_checkpoint_may_be_nested_and_comes_back_as_it_was(tmp_path):
    manager, _ = small(tmp_path)
    metrics = {"auc": np.float32(0.5), "by_day": [0.5, None, float("nan")]}
    manager.step(state={"eval": metrics, "files": ("a", "b"), "loss": torch.tensor(0.5)})
    expected = {"eval": {"auc": 0.5, "by_day": [0.5, None, "nan"]}, "files": ["a", "b"], "loss": 0.5}
    info = find_checkpoint(str(tmp_path), 1)
    assert {name: value for name, value in info.state.items() if name in expected} == expected
    assert find_checkpoint(str(tmp_path), "latest", state={"files": ["a", "b"]}) == info
    assert small(tmp_path)[0].restore() == 1


def test_steps_are_counted_and_saved_at_multiples_of_the_interval(tmp_path):
    manager, weight = small(tmp_path, interval=3, max_keep=None)
    for step in range(1, 11):
        advance(manager, weight, 1)
        assert manager.global_step == step
        assert len(checkpoints(tmp_path)) == step // 3
    assert checkpoints(tmp_path) == ["ckpt_3", "ckpt_6", "ckpt_9"]
    assert manager.save_interval == 3


def test_a_run_may_be_saved_at_any_step_with_what_is_to_be_kept_with_it(tmp_path, monkeypatch):
    manager, weight = small(tmp_path, interval=9, max_keep=None)
    with monkeypatch.context() as patch:
        patch.setattr(manager.saver, "save", lambda *a, **k: (_ for _ in ()).throw(OSError("disk")))
        with pytest.raises(OSError, match="disk"):
            manager.save()
    assert manager.save().ckpt_id == "ckpt_0", "a failed save is tried again on the same step"
    advance(manager, weight, 7)
    manifest = manager.save(state={"auc": 0.7})
    assert (manifest.ckpt_id, manifest.step, manifest.state) == ("ckpt_7", 7, {"auc": 0.7})
    for step in (8, 9):
        manager.step(state={"auc": step / 10, "phase": "warm"})
    advance(manager, weight, 9)
    kept = [found.manifest.state for found in list_checkpoints(manager.saver.storage).committed]
    assert kept == [{}, {"auc": 0.7}, {"auc": 0.9, "phase": "warm"}, {}]
    manager.register_for_checkpointing("a", 1)
    manager.register_io_state("b", ClickModel())
    with pytest.raises(ValueError, match="registered already"):
        manager.saver.register_for_checkpointing("a", 1)
    with pytest.raises(ValueError, match="registered already"):
        manager.saver.register_io_state("b", ClickModel())


def test_saving_twice_on_one_step_is_one_checkpoint(tmp_path, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    manager, weight = small(tmp_path, interval=5)
    advance(manager, weight, 5)
    before = tree(tmp_path)
    assert manager.save() is None
    assert tree(tmp_path) == before
    assert "ckpt_5 is already saved" in caplog.text
    restored, _ = small(tmp_path, interval=5)
    restored.restore()
    assert restored.save() is None
    assert tree(tmp_path) == before


# rotation


@mostly_slow()
@pytest.mark.parametrize("max_keep", [1, 2, 3, None])
def test_the_newest_checkpoints_are_kept_also_over_restarts(tmp_path, max_keep):
    for expected in (4, 8, 12):
        manager, weight = small(tmp_path, interval=2, max_keep=max_keep)
        manager.restore()
        advance(manager, weight, expected - manager.global_step)
    every = [f"ckpt_{step}" for step in range(2, 13, 2)]
    kept = every if max_keep is None else every[-max_keep:]
    assert set(checkpoints(tmp_path)) == set(kept)
    assert (tmp_path / "checkpoint").read_text().splitlines() == kept
    if max_keep is not None:
        assert {path.name for path in tmp_path.iterdir()} == {*kept, "checkpoint", ".recckpt", "timeline.jsonl"}, (
            "nothing is left of the others"
        )


def test_a_smaller_max_keep_after_a_restart_removes_the_surplus_in_the_order_they_were_made(tmp_path):
    advance(*small(tmp_path, max_keep=None), 5)
    manager, weight = small(tmp_path, max_keep=2)
    manager.restore()
    advance(manager, weight, 1)
    assert checkpoints(tmp_path) == ["ckpt_5", "ckpt_6"]
    manager.saver.save("best")
    assert checkpoints(tmp_path) == ["best", "ckpt_6"]
    advance(manager, weight, 1)
    assert checkpoints(tmp_path) == ["best", "ckpt_7"]


def test_nothing_that_others_wrote_is_removed(tmp_path):
    manager, weight = small(tmp_path)
    advance(manager, weight, 1)
    for name in ("notes.txt", "ckpt_1/notes.txt", "ckpt_0/file", "ckpt_9/model.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    advance(manager, weight, 2)
    assert checkpoints(tmp_path) == ["ckpt_3"]
    mine = {name for name, data in tree(tmp_path).items() if data == b"mine"}
    assert mine == {"notes.txt", "ckpt_1/notes.txt", "ckpt_0/file", "ckpt_9/model.pt"}


def test_a_checkpoint_that_was_moved_or_copied_by_hand_stays(tmp_path):
    manager, weight = small(tmp_path)
    advance(manager, weight, 1)
    (tmp_path / "ckpt_1").rename(tmp_path / "best")
    advance(manager, weight, 1)
    shutil.copytree(tmp_path / "ckpt_2", tmp_path / "z")
    assert [found.directory for found in list_checkpoints(manager.saver.storage).current] == ["best", "ckpt_2"]
    advance(manager, weight, 2)
    assert checkpoints(tmp_path) == ["best", "ckpt_4", "z"]
    assert [manager.restore(step) for step in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize("max_keep", [1, 2])
def test_a_checkpoint_of_an_abandoned_branch_is_superseded(tmp_path, max_keep):
    manager, weight = small(tmp_path, interval=10, max_keep=None)
    advance(manager, weight, 30)
    manager, weight = small(tmp_path, interval=10, max_keep=max_keep)
    assert manager.restore(10) == 10
    advance(manager, weight, 10, value=-20.0)  # step 20 once more, another one
    last, weight = small(tmp_path, interval=10)
    assert last.restore() == 20, "the newest is the one that was saved last, not the one of the highest step"
    assert weight.item() == -20
    assert ("ckpt_30" in checkpoints(tmp_path)) == (max_keep == 2)
    advance(manager, weight, 10, value=-30.0)
    again, weight = small(tmp_path, interval=10)
    assert again.restore() == 30


# the index file


@mostly_slow()
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00garbage", b"ckpt_999\n", b"../../etc\n", b"ckpt_1"])
def test_the_index_file_is_a_hint_that_the_next_save_rebuilds(tmp_path, content):
    manager, weight = small(tmp_path, max_keep=2)
    advance(manager, weight, 3)
    index = tmp_path / "checkpoint"
    assert index.read_text() == "ckpt_2\nckpt_3\n"
    index.unlink()
    if content is not None:
        index.write_bytes(content)
    restored, weight = small(tmp_path, max_keep=2)
    assert restored.restore() == 3
    assert weight.item() == 3
    advance(restored, weight, 1)
    assert index.read_text() == "ckpt_3\nckpt_4\n"


# restore


def test_where_there_is_nothing_a_run_starts_from_0_and_says_so_unless_there_has_to_be_something(tmp_path, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    manager, _ = small(tmp_path)
    assert manager.restore() == 0
    assert [(r.levelname, "no checkpoint to restore" in r.getMessage()) for r in caplog.records] == [("INFO", True)]
    assert manager.global_step == 0
    with pytest.raises(CheckpointNotFoundError, match="found no committed checkpoint to restore"):
        manager.restore(required=True)
    with pytest.raises(CheckpointNotFoundError, match="'ckpt_7'; there are no checkpoints"):
        manager.restore(7)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path):
    manager, weight = small(tmp_path, max_keep=None)
    advance(manager, weight, 2)
    (tmp_path / "ckpt_2" / "manifest.json").unlink()
    restored, weight = small(tmp_path, max_keep=None)
    assert restored.restore() == 1
    advance(restored, weight, 1)
    assert checkpoints(tmp_path) == ["ckpt_1", "ckpt_2.2"], "the leftover's name is not used again"
    assert small(tmp_path)[0].restore() == 2


def test_any_step_that_is_kept_can_be_restored(tmp_path):
    manager, weight = small(tmp_path, max_keep=None)
    advance(manager, weight, 12)
    for step in (3, 12, 1):
        assert manager.restore(step) == manager.global_step == step
        assert weight.item() == step
    with pytest.raises(CheckpointNotFoundError, match=r"'ckpt_13'; there are .*'ckpt_12'"):
        manager.restore(13)
    assert (manager.global_step, weight.item()) == (1, 1)


DAMAGED = {
    "manifest.json": "manifest.json",
    "model.pt": "model.pt",
    "extra.pt": "extra.pt",
    "io_state_0.pt": "io_state_0.pt",
    "rng_0.pt": "rng_0.pt",
    "catalog": "sparse/00000-of-00001.json",
    "part": "sparse/00000-of-00001.g0.00.arrow",
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """An output dir of two processes, each with a checkpoint, and the state of the first and the second."""
    root = tmp_path_factory.mktemp("two") / "runs"
    expected = state_of(Run(root, interval=5, max_keep=2).train(5))
    Run(root, interval=5, max_keep=2).manager.restore()
    longer = Run(root, interval=5, max_keep=2)
    longer.manager.restore()
    return root, expected, state_of(longer.train(5))


@mostly_slow("file")
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_newest_checkpoint_is_passed_over_with_an_error_that_names_it(
    two_checkpoints, tmp_path, caplog, file, how
):
    root, expected, longer = two_checkpoints
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "ckpt_10" / DAMAGED[file]
    if how == "flip":
        flip_bit(path)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    if (file, how) == ("manifest.json", "gone"):
        return  # then it is none: the test above
    damaged = tree(tmp_path)

    run = Run(tmp_path, interval=5, max_keep=2, seed=3).train(0)
    run.model.users.insert(torch.tensor([12345]), torch.ones(1, 4))
    assert run.manager.restore() == 5
    assert state_of(run) == expected
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert DAMAGED[file] in error
    assert "ckpt_10" in error
    assert "found" in error
    assert "expected" in error
    assert tree(tmp_path) == damaged

    before = state_of(run)
    with pytest.raises(CorruptCheckpointError, match=DAMAGED[file]):
        run.manager.restore(10)
    assert state_of(run) == before

    run.train(5)  # and its step is saved once more
    assert state_of(run) == longer
    assert Run(tmp_path, interval=5, seed=4).manager.restore() == 10


def test_a_damaged_checkpoint_is_neither_removed_nor_counted_and_where_all_are_the_restore_raises(tmp_path):
    manager, weight = small(tmp_path / "some", max_keep=2)
    advance(manager, weight, 2)
    flip_bit(tmp_path / "some" / "ckpt_2" / "manifest.json")
    advance(manager, weight, 2)
    assert checkpoints(tmp_path / "some") == ["ckpt_2", "ckpt_3", "ckpt_4"]
    root = tmp_path / "all"
    advance(*small(root, max_keep=None), 2)
    for file in ("model.pt", "manifest.json"):
        for step in (1, 2):
            flip_bit(root / f"ckpt_{step}" / file)
        with pytest.raises(CorruptCheckpointError, match=re.escape(file)):
            small(root)[0].restore()


def test_a_checkpoint_that_does_not_fit_the_model_is_no_reason_to_take_an_older_one(tmp_path):
    manager, weight = small(tmp_path, max_keep=None)
    advance(manager, weight, 1)
    model = nn.Linear(2, 1)
    Saver(model, output_dir=str(tmp_path), max_keep=None).save("ckpt_2", step=2)
    before = weight.item()
    with pytest.raises(StateMismatchError, match="'weight'"):
        manager.restore()
    assert weight.item() == before
    assert manager.global_step == 1


def test_a_restore_takes_what_load_conf_says(tmp_path):
    source = Run(tmp_path, interval=5).train(5)
    run = Run(tmp_path, interval=5, seed=1)
    dense = state_of(run)["dense"]
    assert run.manager.restore(load_conf={"load": ["sparse", "sparse_opt"]}) == 5
    assert table_state(run.model.items) == table_state(source.model.items)
    assert state_of(run)["dense"] == dense
    assert run.stream.position == 0
    with pytest.raises(LoadConfError):
        run.manager.restore(load_conf={"load": ["spars"]})


def test_a_checkpoint_without_a_step_counts_from_0_and_says_so(tmp_path, caplog):
    manager, weight = small(tmp_path)
    advance(manager, weight, 3)
    Saver(nn.Linear(1, 1, bias=False), output_dir=str(tmp_path)).save("final")
    assert small(tmp_path)[0].restore() == 0
    assert "final was saved without a step" in caplog.text


def test_random_states_are_left_alone_when_the_number_of_ranks_is_another(tmp_path):
    advance(*small(tmp_path), 1)
    manager = CheckpointManager(Saver(nn.Linear(1, 1, bias=False), output_dir=str(tmp_path)), 1)
    torch.manual_seed(1)
    before = torch.get_rng_state()

    def load(shard_num):
        source = LocatedCheckpoint(
            Entry(strict=True, is_own=True), manager.saver.storage, newest(manager.saver.storage)
        )
        live = manager.saver.loader.live_state(0, shard_num)
        with opened([source], live.needs) as sources:
            manager.saver.loader.load_sources(live, sources, Problems(), meetings=no_others(), rng=True)

    load(2)
    assert torch.equal(torch.get_rng_state(), before)
    load(1)
    assert not torch.equal(torch.get_rng_state(), before)
