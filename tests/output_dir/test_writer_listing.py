"""What a writer looks at: one listing a save, each manifest once, and nothing that an old look could get wrong."""

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from faults.storage_faults import OPERATIONS, watch
from support.forgetting import LONG, ForgettingRun, fill
from torch import nn

from recckpt import Saver
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import Manifests
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import list_checkpoints, newest
from recckpt.storage import open_storage


@pytest.fixture
def looks(monkeypatch):
    """Count the listings of an output dir and the readings of each manifest."""
    counts = Counter()

    def counted(saver):
        storage = saver.storage
        directories, read = Manifests.directories, storage.read

        def count_listing(known, storage):
            counts["listings"] += 1
            return directories(known, storage)

        def count_reading(name, max_bytes):
            counts[name] += name.endswith("manifest.json")
            return read(name, max_bytes)

        monkeypatch.setattr(Manifests, "directories", count_listing)
        monkeypatch.setattr(storage, "read", count_reading)
        return counts

    return counted


def test_a_save_lists_the_output_dir_once_and_reads_each_manifest_once_in_its_life(url, looks):
    earlier = Saver(nn.Linear(1, 1), output_dir=url, max_keep=None)
    for step in range(4):
        earlier.save(f"ckpt_{step}")
    saver = Saver(nn.Linear(1, 1), output_dir=url, max_keep=6)
    counts = looks(saver)
    saver.save("ckpt_4")
    assert counts.pop("listings") == 3  # before and after its claim, and once nothing is left to forget
    for step in range(5, 10):
        saver.save(f"ckpt_{step}")
        assert counts.pop("listings") == 1
    assert max(counts.values()) == 1
    assert [c.ckpt_id for c in list_checkpoints(open_storage(url)).current] == [f"ckpt_{n}" for n in range(4, 10)]


def test_the_requests_of_a_save_do_not_grow_with_links_checkpoints_or_takeovers(memory_url):
    run = ForgettingRun(memory_url, deltas=replace(LONG, full_every=100))
    asked = Counter()
    watch(run.saver.storage, lambda what: asked.update([what, what.partition(" ")[0]]))

    def requests_of_a_save(step):
        asked.clear()
        fill(run.user, [step], float(step))
        run.saver.save(f"ckpt_{step}")
        assert asked["list_files .recckpt/owner"] <= (2 if step else 10)  # the first takes over
        return sum(asked[operation] for operation in OPERATIONS)

    requests = [requests_of_a_save(step) for step in range(12)]
    assert len(newest(run.saver.storage).below) == 11
    assert set(requests[2:]) == {requests[2]}
    for _ in range(4):
        Fence(open_storage(memory_url)).hold()
    assert run.saver.storage.list_files(layout.OWNER_DIR) == ["5.json", "5.list.json"]


@pytest.mark.parametrize("known", [None, Manifests()])
def test_manifests_on_an_object_store_are_asked_for_at_once(monkeypatch, known):
    storage = open_storage("memory://at-once")
    saver = Saver(nn.Linear(1, 1), output_dir=storage.url, max_keep=None)
    for step in range(4):
        saver.save(f"ckpt_{step}", overwrite=True)
    read, all_there = storage.read, Barrier(4)

    def read_together(name, max_bytes):
        if name.endswith("manifest.json"):
            all_there.wait(60)  # broken where they come one after another
        return read(name, max_bytes)

    monkeypatch.setattr(storage, "read", read_together)
    assert list_checkpoints(storage, known).ckpt_ids == [f"ckpt_{step}" for step in range(4)]


def test_a_checkpoint_that_was_put_in_the_place_of_another_is_read(tmp_path):
    storage, known = open_storage(str(tmp_path / "runs")), Manifests()
    for place in ("runs", "elsewhere"):
        saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / place))
        saver.save("a")
    before = list_checkpoints(storage, known).committed[0].manifest
    shutil.rmtree(tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "elsewhere" / "a", tmp_path / "runs" / "a")
    after = list_checkpoints(storage, known).committed[0].manifest
    assert (before.save_id, after.save_id) == (before.save_id, newest(storage).manifest.save_id)
    assert before.save_id != after.save_id


def test_damage_that_a_writer_does_not_see_is_seen_by_the_next_reader(tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path), max_keep=None)
    saver.save("a")
    saver.save("b")
    path = tmp_path / "a" / "manifest.json"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"seq": 1', b'"seq": 3'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    saver.save("c")
    assert list(list_checkpoints(saver.storage).damaged) == ["a"]


def test_a_save_never_removes_what_it_has_just_acknowledged_for_one_that_was_copied_in(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for _ in range(3):
        Saver(nn.Linear(1, 1), output_dir=str(elsewhere)).save("x", overwrite=True)
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "runs"), max_keep=1)
    saver.save("a")
    shutil.copytree(elsewhere / "x.3", tmp_path / "runs" / "x")
    saver.save("b")
    assert newest(saver.storage).ckpt_id == "b"
    assert newest(saver.storage).manifest.epoch == 4


def test_a_manifest_of_another_program_is_ignored(tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "runs"))
    foreign = Path(tmp_path, "runs", "static")
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "a web app", "icons": []}')
    (tmp_path / "runs" / "manifest.json").write_text("{}")
    assert list_checkpoints(saver.storage).is_empty
    saver.save("a")
    assert newest(saver.storage).ckpt_id == "a"
    assert (foreign / "manifest.json").exists()
