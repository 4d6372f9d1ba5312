"""Following a run: each committed checkpoint once, whatever rotation, overwrites, forms and the store do meanwhile."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.builders import flip_bit
from support.paths import SUPPORT
from support.rotating_run import Run, check_rows
from support.sweeps import mostly_slow
from support.warm_python import Piped
from torch import nn

import recckpt
from recckpt import CheckpointManager, CheckpointReader, Deltas, Saver
from recckpt.errors import CheckpointNotFoundError, FormatVersionError
from recckpt.inspect import follow as following
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import HashTable
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.objects import ObjectStorage


def run_at(url, kind="full", max_keep=None):
    run = Run(str(url), kind)
    run.saver.max_keep = max_keep
    return run


class SmallSteps:
    """A run of which each step changes a row: what it saves are deltas."""

    def __init__(self, url):
        self.table = HashTable(2, name="t")
        deltas = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)
        saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(url), max_keep=None, deltas=deltas)
        self.saver, self.manager = saver, CheckpointManager(saver, 1)

    def save(self):
        step = self.manager.global_step + 1
        ids = torch.arange(20) if step == 1 else torch.tensor([20 + step])
        self.table.insert(ids, torch.full((len(ids), 2), float(step)))
        self.manager.step()


def train(run, n_steps=1):
    for _ in range(n_steps):
        run.save()
    return run


def there(url, **options):
    """Return the steps of what is there."""
    return [checkpoint.manifest.step for checkpoint in recckpt.follow(url, timeout_sec=0, **options)]


@pytest.fixture
def waits(monkeypatch):
    """What is done, one after another, each time that a follower waits; then it has waited long enough."""
    todo, now = [], [0.0]

    def sleep(seconds):
        now[0] += 1000.0
        if todo:
            todo.pop(0)()
            now[0] -= 1000.0

    monkeypatch.setattr(following, "sleep", sleep)
    monkeypatch.setattr(following, "monotonic", lambda: now[0])
    return todo


def followed(url, timeout_sec=100, **options):
    return [checkpoint.manifest.step for checkpoint in recckpt.follow(url, timeout_sec=timeout_sec, **options)]


def test_what_is_there_comes_first_and_what_is_committed_later_as_it_comes(url, waits):
    run = train(run_at(url), 2)
    waits += [lambda: train(run), lambda: None, lambda: train(run, 2)]
    assert followed(url) == [1, 2, 3, 4, 5]


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path, waits):
    waits += [lambda: None, lambda: train(run_at(tmp_path / "run"))]
    assert followed(tmp_path / "run") == [1]


def test_a_path_where_nothing_comes_is_named_in_the_log(tmp_path, waits, caplog):
    assert followed(tmp_path / "mistyped") == []
    assert "mistyped: nothing came:" in caplog.text
    assert not (tmp_path / "mistyped").exists()


def test_what_rotation_removes_before_its_turn_is_left_out(url):
    run = train(run_at(url, max_keep=2), 2)
    checkpoints = recckpt.follow(url, timeout_sec=0)
    assert next(checkpoints).manifest.step == 1
    train(run, 3)
    assert [checkpoint.manifest.step for checkpoint in checkpoints] == [4, 5]


def test_on_a_local_disk_a_checkpoint_is_read_to_its_end_though_rotation_removes_it(tmp_path):
    run = train(run_at(tmp_path, max_keep=1))
    checkpoint = next(recckpt.follow(tmp_path, timeout_sec=0))
    train(run, 2)
    assert not Path(checkpoint).exists()
    rows = {id_: row for batch in checkpoint.table("t") for id_, row in zip(*map(list, batch.columns[:2]), strict=True)}
    check_rows(1, {id_.as_py(): row.as_py() for id_, row in rows.items()})


@mostly_slow()
@pytest.mark.parametrize(("after", "steps"), [(None, [1, 2, 3, 2]), (2, [3, 2])])
def test_a_step_that_is_saved_again_comes_again_also_behind_what_was_done(url, waits, after, steps):
    run = train(run_at(url), 3)
    assert there(url, after=after) == [step for step in (1, 2, 3) if step > (after or 0)]

    def go_back():
        run.manager.restore(1)
        train(run)

    waits.append(go_back)
    assert followed(url, after=after) == steps


def test_an_output_dir_that_was_made_anew_is_followed_from_its_beginning(tmp_path, waits):
    train(run_at(tmp_path / "run"), 2)

    def make_anew():
        shutil.rmtree(tmp_path / "run")
        train(run_at(tmp_path / "run"))

    waits.append(make_anew)
    assert followed(tmp_path / "run") == [1, 2, 1]


def test_a_compacted_form_and_what_ids_were_forgotten_in_are_no_new_checkpoints(tmp_path, waits):
    run = train(SmallSteps(tmp_path), 3)

    def compact():
        recckpt.rewrite.compact(tmp_path)
        train(run)
        assert any(each.manifest.supersedes for each in list_checkpoints(run.saver.storage).committed)

    waits += [compact, lambda: recckpt.rewrite.forget(tmp_path, "t", [2])]
    assert followed(tmp_path) == [1, 2, 3, 4]


def test_ephemeral_checkpoints_come_where_they_are_asked_for(tmp_path):
    run = train(run_at(tmp_path))
    run.saver.save("by hand", step=7, ephemeral=True)
    assert (there(tmp_path), there(tmp_path, ephemeral=True)) == ([1], [1, 7])


def test_who_is_slower_than_the_run_may_have_the_newest_alone(tmp_path):
    run = train(run_at(tmp_path), 3)
    checkpoints = recckpt.follow(tmp_path, timeout_sec=0, newest=True)
    assert next(checkpoints).manifest.step == 3
    train(run, 2)
    assert [checkpoint.manifest.step for checkpoint in checkpoints] == [5]


def test_a_store_that_is_away_for_a_while_is_asked_again_and_named_once(tmp_path, waits, caplog, monkeypatch):
    run, list_dirs, is_away = train(run_at(tmp_path)), LocalStorage.list_dirs, [False]

    def list_or_fail(self):
        if is_away[0]:
            raise OSError(107, "Transport endpoint is not connected")
        return list_dirs(self)

    monkeypatch.setattr(LocalStorage, "list_dirs", list_or_fail)
    is_away[0] = True

    def come_back():
        is_away[0] = False
        train(run)

    waits += [lambda: None, lambda: None, come_back]
    assert followed(tmp_path) == [1, 2]
    assert caplog.text.count("Transport endpoint is not connected") == 1


@pytest.mark.parametrize("part", ["manifest.json", "sparse"])
def test_damage_is_passed_over_and_named_once(tmp_path, caplog, part, waits):
    train(run_at(tmp_path), 3)
    if part == "sparse":
        shutil.rmtree(tmp_path / "ckpt_2" / part)
    else:
        flip_bit(tmp_path / "ckpt_2" / part)
    waits += [lambda: None, lambda: None]
    assert followed(tmp_path) == [1, 3]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR and "ckpt_2 is damaged" in r.message]) == 1


def test_a_newer_format_ends_it_with_an_error(tmp_path):
    train(run_at(tmp_path))
    path = tmp_path / "ckpt_1/manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(FormatVersionError):
        there(tmp_path)


def test_items_go_wherever_a_path_does_and_share_the_links_that_are_open(tmp_path):
    train(SmallSteps(tmp_path), 3)
    first, second, third = recckpt.follow(tmp_path, timeout_sec=0)
    assert os.fspath(second) == second.path == str(tmp_path / "ckpt_2")
    assert CheckpointReader(second).manifest == second.manifest
    assert recckpt.diff(first, second).table("t").added == 1
    assert third.chain.links[1] is second.chain.links[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"run": 3}, TypeError),
        ({"run": "nowhere://x"}, ValueError),
        ({"every_sec": 0}, ValueError),
        ({"timeout_sec": -1}, ValueError),
        ({"after": "ckpt_3"}, TypeError),
        ({"newest": 1}, ValueError),
    ],
)
def test_wrong_arguments_are_refused_by_the_call_itself(tmp_path, options, error):
    with pytest.raises(error):
        recckpt.follow(**{"run": tmp_path, **options})


def test_a_checkpoint_is_no_run(tmp_path):
    train(run_at(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint itself, expected an output dir"):
        recckpt.follow(tmp_path / "ckpt_1")


@mostly_slow("kind")
@pytest.mark.parametrize("kind", ["delta", "full"])
def test_beside_a_process_that_saves_and_rotates_without_a_pause_each_is_whole_and_comes_once(tmp_path, kind):
    writer, steps = Piped(SUPPORT / "rotating_run.py", "write", tmp_path, kind), []
    for checkpoint in recckpt.follow(tmp_path, every_sec=0.01, timeout_sec=60):
        step = checkpoint.manifest.step
        rows = {}
        for batch in checkpoint.table("t"):
            rows |= dict(zip(batch.column("id").to_pylist(), batch.column("embedding").to_pylist(), strict=True))
        check_rows(step, rows)
        steps.append(step)
        if len(steps) == 8:
            break
    writer.stdin.close()
    assert writer.wait(60) == 0
    assert steps == sorted(set(steps))
    assert open_storage(str(tmp_path)).list_dirs()


def test_a_look_reads_no_manifest_twice_and_lists_no_checkpoint_that_it_knows(memory_url, waits, monkeypatch):
    train(run_at(memory_url), 3)
    asked = []
    for name in ("read", "open", "list_files"):
        method = getattr(ObjectStorage, name)

        def noted(self, *args, _name=name, _method=method):
            asked.append((_name, *args))
            return _method(self, *args)

        monkeypatch.setattr(ObjectStorage, name, noted)
    waits += [asked.clear, lambda: None]
    assert followed(memory_url) == [1, 2, 3]
    assert asked
    assert not [each for each in asked if "ckpt_" in str(each[1:])]
