"""What a manifest says of shards: which ids they have, where buckets do not say it."""

from dataclasses import replace

import pytest

from recckpt.format import shards
from recckpt.format.shards import ShardEntry, are_disjoint, in_manifest, overlap

ONE, OTHER = ShardEntry("a", (0, 30), {"item": (0, 9)}), ShardEntry("b", (30, 60), {"item": (5, 90), "user": (1, 1)})


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], True),
        ([(3, 3)], True),
        ([(5, 9), (0, 4)], True),
        ([(0, 4), (4, 9)], False),  # both ends are included
        ([(0, 9), (3, 3)], False),
        ([(-(2**63), -1), (0, 2**63 - 1)], True),
        ([(10, 11), (0, 9), (9, 9)], False),
    ],
)
def test_ranges_of_ids_are_disjoint_where_no_id_is_in_two(ranges, expected):
    assert are_disjoint(ranges) == expected


def test_ranges_of_buckets_overlap_where_one_bucket_is_in_two():
    assert not overlap([(30, 60), (0, 30), (0, 0), (15, 15)])
    assert overlap([(29, 60), (0, 30)])


def test_a_manifest_has_the_ids_of_shards_whose_buckets_overlap_and_of_no_others():
    assert [shard.ids for shard in in_manifest([ONE, OTHER])] == [None, None]
    beside = replace(OTHER, buckets=(29, 60))
    assert in_manifest([ONE, beside]) == (ONE, beside)


def test_a_manifest_does_not_grow_with_tables_times_shards(monkeypatch):
    beside = replace(OTHER, buckets=(29, 60))
    monkeypatch.setattr(shards, "_MAX_RANGES", 3)
    assert in_manifest([ONE, beside]) == (ONE, beside)
    monkeypatch.setattr(shards, "_MAX_RANGES", 2)
    assert in_manifest([ONE, beside]) == (replace(ONE, ids=None), replace(beside, ids=None))
