import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.forge import fence_of, filled, save_tables

from recckpt.errors import CheckpointExistsError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.listing import list_checkpoints, locate
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import VISIBLE
from recckpt.types import SlotSpec


@pytest.fixture
def storage(url) -> Storage:
    storage = open_storage(url)
    storage.prepare()
    return storage


def begin(storage: Storage, ckpt_id: str, overwrite: bool = False, step: int | None = None) -> Intent:
    return committing.begin(storage, fence_of(storage), ckpt_id, step=step, overwrite=overwrite, base=None)[0]


def commit(storage: Storage, directory: str, manifest: Manifest) -> None:
    committing.commit(storage, fence_of(storage), directory, manifest, VISIBLE)


def record(storage: Storage, attempt: Intent, data: bytes = b"x") -> Manifest:
    name = layout.catalog(0, 1)
    with storage.create(f"{attempt.directory}/{name}") as sink:
        sink.write(data)
    return Manifest(
        (ShardEntry(name, (0, 0)),),
        (),
        (FileEntry(name, 1, 0),),
        ckpt_id=attempt.directory,
        save_id=attempt.save_id,
        seq=1,
        time="",
        epoch=attempt.epoch,
    )


def test_an_attempt_has_a_directory_of_its_own_with_its_intent(storage):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    assert attempt.directory == "ckpt_1"
    intent = json.loads(storage.read("ckpt_1/INTENT", 1000))
    assert intent == {"epoch": 1, "save_id": attempt.save_id, "step": None}


def test_attempts_never_share_a_directory_or_a_save_id(storage):
    attempts = [begin(storage, "ckpt_1", overwrite=False) for _ in range(4)]
    assert [a.directory for a in attempts] == ["ckpt_1", "ckpt_1.1", "ckpt_1.1.1", "ckpt_1.1.2"]
    assert len({a.save_id for a in attempts}) == 4


def test_an_attempt_that_another_writer_takes_in_the_same_moment_takes_the_next(storage, monkeypatch):
    fence_of(storage).hold()
    monkeypatch.setattr(type(storage), "list_dirs", lambda self: [])  # has not seen it yet
    assert begin(storage, "ckpt_1", overwrite=False).directory == "ckpt_1"
    assert begin(storage, "ckpt_1", overwrite=False).directory == "ckpt_1.1"


def test_a_committed_id_is_not_written_again_unless_asked(storage):
    save_tables(storage, [filled("item", [1])], ckpt_id="a/b")
    with pytest.raises(CheckpointExistsError, match="'a/b' is committed already, in a%2Fb/"):
        begin(storage, "a/b", overwrite=False)
    assert begin(storage, "a/b", overwrite=True).directory == "a%2Fb.1"


@pytest.mark.parametrize("ckpt_id", ["", "x" * 300, "checkpoint", 3])
def test_a_bad_id_is_refused_before_anything_is_made(storage, ckpt_id):
    with pytest.raises(ValueError):  # noqa: PT011  # of several reasons
        begin(storage, ckpt_id, overwrite=False)
    assert storage.list_files("") == []


def test_a_step_that_an_earlier_writer_may_still_be_busy_with_gets_a_new_directory(storage):
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_7", step=7)
    later = open_storage(storage.url)
    begun = [begin(later, f"ckpt_{step}", step=step).directory for step in (5, 8, 6)]
    assert begun == ["ckpt_5.2", "ckpt_8", "ckpt_6.2"]


def test_nothing_is_visible_before_the_commit_and_all_after_it(storage):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    manifest = record(storage, attempt)
    assert list_checkpoints(storage).committed == ()
    commit(storage, attempt.directory, manifest)
    assert locate(storage, "ckpt_1").manifest == manifest


@pytest.mark.parametrize("size", [0, 2])
def test_a_file_of_another_size_than_was_written_is_not_committed(storage, size):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    with pytest.raises(OSError, match=f"found {size} bytes, 1 were written"):
        commit(storage, attempt.directory, record(storage, attempt, b"x" * size))
    assert list_checkpoints(storage).committed == ()


def test_a_file_that_is_gone_is_not_committed(storage):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    manifest = record(storage, attempt)
    storage.remove(f"{attempt.directory}/{layout.catalog(0, 1)}")
    with pytest.raises(FileNotFoundError):
        commit(storage, attempt.directory, manifest)
    assert list_checkpoints(storage).committed == ()


def test_a_manifest_that_no_reader_would_take_is_not_committed(storage):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    manifest = record(storage, attempt)
    table = TableEntry("item", 1, (SlotSpec("embedding", "float32", (0,)),))
    for wrong in (replace(manifest, tables=(table,)), replace(manifest, files=()), replace(manifest, seq=-1)):
        with pytest.raises(CorruptCheckpointError):
            commit(storage, attempt.directory, wrong)
    assert list_checkpoints(storage).committed == ()
    assert "manifest.json" not in storage.list_files(attempt.directory)


def test_a_manifest_is_committed_once(storage):
    attempt = begin(storage, "ckpt_1", overwrite=False)
    manifest = record(storage, attempt)
    commit(storage, attempt.directory, manifest)
    with pytest.raises(FileExistsError):
        commit(storage, attempt.directory, replace(manifest, step=5))
    assert locate(storage, "ckpt_1").manifest == manifest


def test_data_and_directories_are_synced_before_the_manifest_and_it_before_the_root(tmp_path, monkeypatch):
    storage = open_storage(str(tmp_path))
    attempt = begin(storage, "ckpt_1", overwrite=False)
    manifest = record(storage, attempt)
    events = []
    for name in ("sync_dir", "put_if_absent"):
        call = getattr(type(storage), name)
        monkeypatch.setattr(
            type(storage), name, lambda self, *args, n=name, c=call: (events.append((n, args[0])), c(self, *args))
        )
    commit(storage, attempt.directory, manifest)
    put = events.index(("put_if_absent", "ckpt_1/manifest.json"))
    assert {("sync_dir", "ckpt_1"), ("sync_dir", "ckpt_1/sparse")} <= set(events[:put])
    assert ("sync_dir", "") in events[put:]


def test_the_index_file_lists_the_ids_newest_last(storage):
    for ckpt_id in ("ckpt_9", "ckpt_10", "a/b"):
        save_tables(storage, [filled("item", [1])], ckpt_id=ckpt_id)
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_9", overwrite=True)
    fence = fence_of(storage)
    fence.hold()
    fence.write_index()
    assert storage.read("checkpoint", 1000) == b"ckpt_10\na%2Fb\nckpt_9\n"


@pytest.mark.parametrize("index", [b"", b"ckpt_1\nckp", b"ckpt_7\n", b"../x\n", b"\xff\0"])
def test_the_index_file_is_never_believed(tmp_path, index):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_1")
    Path(tmp_path, "checkpoint").write_bytes(index)
    listing = list_checkpoints(storage)
    assert [c.ckpt_id for c in listing.committed] == ["ckpt_1"]
    fence = fence_of(storage)
    fence.hold()
    fence.write_index()
    assert storage.read("checkpoint", 1000) == b"ckpt_1\n"
