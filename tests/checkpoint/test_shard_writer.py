"""What the shards of an attempt hold becomes what its manifest says."""

from recckpt.checkpoint.shard_writer import ShardRecord, with_shards
from recckpt.format.manifest import Content, FileEntry
from recckpt.format.shards import ShardEntry


def record(file):
    return ShardRecord("id", ShardEntry(file, (0, 1)), (FileEntry(file, 1),))


def test_the_files_of_all_shards_come_in_the_order_of_their_names_beside_those_of_none():
    head = Content((), (), (FileEntry("b", 1),))
    whole = with_shards(head, [record("c"), record("a")])
    assert [file.name for file in whole.files] == ["a", "b", "c"]
    assert [shard.catalog for shard in whole.shards] == ["c", "a"]
