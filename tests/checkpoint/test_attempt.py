"""What an attempt writes, and the checkpoints that one process commits."""

import errno

import pytest

from recckpt.checkpoint.attempt import ShardRecord, commit_new, with_shards
from recckpt.errors import CheckpointExistsError, CommitNotDurableError
from recckpt.format import layout
from recckpt.format.manifest import Content, FileEntry, ShardEntry
from recckpt.output_dir.listing import list_checkpoints, locate
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "runs"))


def empty(to):
    """Write a checkpoint without tables."""
    return with_shards(Content((), (), (), state={"auc": 0.5}), [to.shard(0, 1).record()])


def test_what_was_written_is_committed_with_its_content(storage):
    directory, record = commit_new(storage, "ckpt_7", 7, empty)
    found = locate(storage, "ckpt_7")
    assert (found.directory, found.manifest.save_id, found.manifest.step) == (directory, record.save_id, 7)
    assert found.manifest.content == record.content
    assert found.manifest.state == {"auc": 0.5}
    assert storage.read(layout.INDEX_FILE, 100) == b"ckpt_7\n"


def test_an_id_that_is_committed_is_not_written_again(storage):
    commit_new(storage, "ckpt_7", 7, empty)
    with pytest.raises(CheckpointExistsError, match="ckpt_7"):
        commit_new(storage, "ckpt_7", 8, lambda to: pytest.fail("nothing is to be written"))


def test_a_failed_write_leaves_no_files_and_the_id_free(storage):
    def fail(to):
        to.write(layout.catalog(0, 1), b"x")
        raise RuntimeError("no source")

    with pytest.raises(RuntimeError, match="no source"):
        commit_new(storage, "ckpt_7", 7, fail)
    assert list_checkpoints(storage).is_empty
    assert [name for name in storage.list_files("ckpt_7") if name != layout.INTENT] == []
    assert commit_new(storage, "ckpt_7", 7, empty)[1].step == 7


def test_a_manifest_that_the_storage_takes_late_finds_its_files(storage, monkeypatch):
    held = []

    def out_of_time(self, name, *data):
        held.append((name, data))
        raise OSError(errno.ETIMEDOUT, "the request may still be applied", name)

    def write(to):
        content = empty(to)
        monkeypatch.setattr(LocalStorage, "put_if_absent", out_of_time)
        monkeypatch.setattr("recckpt.output_dir.commit.read_manifest", out_of_time)
        return content

    with pytest.raises(CommitNotDurableError, match="'ckpt_7' may be in place"):
        commit_new(storage, "ckpt_7", 7, write)
    monkeypatch.undo()
    [name, [data]] = held[0]
    storage.put_if_absent(name, data)
    found = locate(storage, "ckpt_7")
    assert {file.name for file in found.manifest.files} <= set(storage.list_files("ckpt_7"))


def record(file):
    return ShardRecord("id", ShardEntry(file, (0, 1)), (FileEntry(file, 1),))


def test_the_files_of_all_shards_come_in_the_order_of_their_names_beside_those_of_none():
    head = Content((), (), (FileEntry("b", 1),))
    whole = with_shards(head, [record("c"), record("a")])
    assert [file.name for file in whole.files] == ["a", "b", "c"]
    assert [shard.catalog for shard in whole.shards] == ["c", "a"]
