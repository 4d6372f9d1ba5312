"""What the shards of an attempt hold becomes what its manifest says."""

import pytest

from recckpt.checkpoint.shard_writer import ShardRecord, with_shards
from recckpt.errors import StateMismatchError
from recckpt.format.manifest import Content, FileEntry, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.types import SlotSpec


def record(shape, file="x"):
    slot = SlotSpec("embedding", "float32", shape)
    files = (FileEntry(file, 1),)
    return ShardRecord("id", ShardEntry(file, (0, 1)), (TableEntry("t", 3, (slot,)),), files)


def test_ranks_that_disagree_on_a_table_are_refused_by_name():
    head = Content((), (), ())
    assert with_shards(head, [record((2,)), record((2,))]).tables[0].rows == 6
    with pytest.raises(StateMismatchError, match="table 't' of rank 1"):
        with_shards(head, [record((2,)), record((3,))])


def test_the_files_of_all_shards_come_in_the_order_of_their_names_beside_those_of_none():
    head = Content((), (), (FileEntry("b", 1),))
    whole = with_shards(head, [record((2,), "c"), record((2,), "a")])
    assert [file.name for file in whole.files] == ["a", "b", "c"]
    assert [shard.catalog for shard in whole.shards] == ["c", "a"]


def test_tables_that_are_known_already_stay_as_they_are():
    slots = (SlotSpec("embedding", "float32", (2,)),)
    head = Content((), (TableEntry("other", 7, slots),), ())
    assert with_shards(head, [record((2,))]).tables == head.tables
