"""Parts planned and written; a golden part, which changes only when docs/format.md does."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.buckets import N_BUCKETS
from recckpt.format.catalog import Batch, Part
from recckpt.sparse.files.arrow_format import ID, column_values
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import (
    PART_BYTES,
    ColumnBytes,
    PartWriter,
    RowBatch,
    TableBytes,
    plan_parts,
    row_bytes,
)
from recckpt.storage import Storage, open_storage
from recckpt.types import SlotSpec

GROUPS = [
    (SlotSpec("embedding", "float32", (8,)),),
    (SlotSpec("embedding", "float32", (64,)), SlotSpec("sparse_adam_exp_avg", "float32", (64,))),
    (SlotSpec("embedding", "int8", ()),),
    (SlotSpec("embedding", "float32", (8, 1)),),
]
EVERYWHERE = (0, N_BUCKETS)
GOLDEN = Path(__file__).with_name("golden_part.arrow")
SLOTS = (
    SlotSpec("embedding", "float32", (2,)),
    SlotSpec("sparse_half", "float16", (3,)),
    SlotSpec("sparse_matrix", "bfloat16", (2, 2)),
    SlotSpec("sparse_step", "int64", ()),
)
ITEM, USER = [5, -7, 2**63 - 1], [-(2**63), 0]
CHECKSUMS = {
    "item": {
        "table": 0x06DF73813892FDE7,
        "id": 0x46A7805EF6D3C18B,
        "embedding": 0xDCD21C42CCAA9D2A,
        "sparse_half": 0x773C9BE6C2DC62B3,
        "sparse_matrix": 0x7EC78A15C122DA16,
        "sparse_step": 0x7FB6F0C094F81C5D,
    },
    "ü/user": {
        "table": 0x71940A272A674686,
        "id": 0x597D8D53443C6129,
        "embedding": 0x0AEE2086D517557E,
        "sparse_half": 0xC28D8A54E5CC669A,
        "sparse_matrix": 0x9E15B0DFDFA76B3C,
        "sparse_step": 0x0CFBAEA74A8CC0E5,
    },
}
IDS = {"item": (-7, 2**63 - 1), "ü/user": (-(2**63), 0)}
FRAME = 0x4FE694233D66DC7D


def spread(n_rows, seed=0):
    """Return how many rows each bucket has, of rows that are spread as hashes are."""
    return np.bincount(np.random.default_rng(seed).integers(0, N_BUCKETS, n_rows), minlength=N_BUCKETS)


def crowded(buckets):
    """Return how many rows each bucket has, of these alone."""
    return np.bincount(np.array([*buckets], np.int64), minlength=N_BUCKETS)


def check(tables, n_writers, part_bytes=PART_BYTES, least_bytes=1, buckets=EVERYWHERE):
    """Check all that a plan of (rows by bucket, slots) pairs promises and return it."""
    tables = [(spread(counts) if isinstance(counts, int) else counts, slots) for counts, slots in tables]
    sizes = [
        TableBytes(
            str(n), slots, int(counts.sum()) * row_bytes(slots), lambda c=counts, s=slots: c.cumsum() * row_bytes(s)
        )
        for n, (counts, slots) in enumerate(tables)
    ]
    parts = plan_parts(sizes, n_writers, part_bytes=part_bytes, least_bytes=least_bytes, buckets=buckets)
    covered = defaultdict(list)
    for part in parts:
        for cut in part.ranges:
            counts, slots = tables[int(cut.table)]
            assert part.slots == slots
            assert counts[cut.begin : cut.end].any()
            covered[cut.table].append((cut.begin, cut.end))
        assert 1 <= len(set(part.tables)) == len(part.ranges) <= 32_767
    for name, (counts, _) in enumerate(tables):
        pieces = covered.get(str(name), [])  # in the order of the parts
        assert pieces == sorted(pieces)
        left = counts[buckets[0] : buckets[1]].copy()
        for begin, end in pieces:
            assert buckets[0] <= begin < end <= buckets[1]
            left[begin - buckets[0] : end - buckets[0]] -= counts[begin:end]
        assert not left.any()
    groups = {slots for counts, slots in tables if counts[slice(*buckets)].any()}
    total = sum(int(counts.sum()) * row_bytes(slots) for counts, slots in tables)
    assert len(parts) <= len(groups) + n_writers + total / part_bytes + len(tables) / 32_767
    assert [(part.group, part.number) for part in parts] == sorted({(part.group, part.number) for part in parts})
    numbers = sorted({slots for _, slots in tables})
    assert {part.group for part in parts} == {numbers.index(slots) for slots in groups}
    return parts


def sizes_of(parts, counts):
    return [int(sum(counts[cut.begin : cut.end].sum() for cut in part.ranges)) for part in parts]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(GROUPS)), max_size=20),
    st.integers(1, 9),
    st.integers(1000, 300_000),
    st.integers(1, 300_000),
    st.tuples(st.integers(0, N_BUCKETS), st.integers(0, N_BUCKETS)).map(sorted),
)
def test_every_row_is_in_one_part_and_the_parts_are_few(tables, n_writers, part_bytes, least_bytes, buckets):
    check(tables, n_writers, part_bytes, min(least_bytes, part_bytes))
    check(tables, n_writers, part_bytes, min(least_bytes, part_bytes), tuple(buckets))


@given(
    st.lists(st.integers(0, 12).map(lambda n: n * 5461), max_size=60),
    st.integers(1, 9),
    st.integers(10, 500),
)
def test_rows_that_crowd_in_a_few_buckets_are_cut_between_those(buckets, n_writers, part_bytes):
    counts = crowded(buckets)
    parts = check([(counts, GROUPS[2]), (counts, GROUPS[2])], n_writers, part_bytes)
    target = min(part_bytes, -(-2 * int(counts.sum()) * 11 // n_writers))
    largest = int(counts.max()) * 11
    for part in parts:
        size = sum(int(counts[cut.begin : cut.end].sum()) for cut in part.ranges) * 11
        assert size < 1.5 * target + largest


def test_parts_roll_at_their_size_and_are_cut_between_buckets_only():
    assert check([], 4) == []
    assert check([(0, GROUPS[0]), (0, GROUPS[1])], 4) == []
    counts = spread(1000)
    rows = sizes_of(check([(counts, GROUPS[0])], 1, part_bytes=100 * row_bytes(GROUPS[0])), counts)
    assert len(rows) == 10
    assert all(abs(n_rows - 100) <= 2 for n_rows in rows)
    assert len(check([(3, GROUPS[0])], 8, least_bytes=8 << 20)) == 1, "too small to be worth a file"
    parts = check([(crowded([7, 70, 65_535]), GROUPS[1])], 1, part_bytes=1)
    assert [(cut.begin, cut.end) for part in parts for cut in part.ranges] == [(7, 8), (70, 71), (65_535, N_BUCKETS)]
    assert len(check([(crowded([9] * 1000), GROUPS[0])], 8)) == 1, "a bucket is never cut"


@pytest.mark.parametrize("n_writers", [1, 2, 3, 8])
def test_one_large_table_is_spread_over_all_writers_evenly(n_writers):
    counts = spread(1_000_000)
    rows = sizes_of(check([(counts, GROUPS[0])], n_writers), counts)
    assert len(rows) == n_writers
    assert max(rows) - min(rows) <= 2 * counts.max()


def test_a_table_that_is_not_cut_is_not_counted():
    def fail():
        raise AssertionError("nobody has to know where its rows are")

    tables = [TableBytes(str(n), GROUPS[n % 3], 1000, fail) for n in range(99)]
    assert len(plan_parts(tables, 8, least_bytes=1 << 20)) == 3


@pytest.mark.slow
def test_a_thousand_small_tables_make_few_parts():
    tables = [(100 + n % 50, GROUPS[n % 3]) for n in range(1000)]
    assert len(check(tables, 8)) <= 3 + 8
    assert len(check(tables, 8, least_bytes=64 << 20)) == 3


def test_40_000_tables_of_one_group_are_more_than_a_part_can_name():
    tables = [TableBytes(str(n), GROUPS[0], 42, lambda: crowded([1]).cumsum() * 42) for n in range(40_000)]
    assert [len(part.ranges) for part in plan_parts(tables, 1, least_bytes=1)] == [32_767, 7_233]


def test_groups_are_numbered_in_the_order_of_their_slots_whether_the_tables_of_others_have_rows_or_not():
    parts = check([(10, GROUPS[0]), (10, GROUPS[3]), (10, GROUPS[0])], 1)
    assert [part.tables for part in parts] in ([["0", "2"], ["1"]], [["1"], ["0", "2"]]), "tables of the same slots"
    forth, back = (check([(5, slots) for slots in order], 1) for order in (GROUPS, GROUPS[::-1]))
    assert [part.slots for part in forth] == [part.slots for part in back] == sorted(GROUPS)
    numbers = {part.slots: part.group for part in forth}
    for emptied in GROUPS:
        rest = [(0 if slots == emptied else 5, slots) for slots in GROUPS]
        assert {part.slots: part.group for part in check(rest, 1)} == {
            slots: number for slots, number in numbers.items() if slots != emptied
        }


def batch(table: str, ids: list[int]) -> RowBatch:
    """Return rows with slots whose values count up from the position of the row."""
    n_rows = len(ids)
    half, matrix = np.arange(n_rows * 3, dtype=np.float16), np.arange(n_rows * 4, dtype=np.float32)
    values = [
        np.arange(n_rows * 2, dtype=np.float32),
        half,
        (matrix.view(np.uint32) >> 16).astype(np.uint16),
        np.arange(n_rows, dtype=np.int64),
    ]
    slots = [ColumnBytes(spec, n_rows, [value.view(np.uint8)]) for spec, value in zip(SLOTS, values, strict=True)]
    return RowBatch(table, np.array(ids, np.int64), slots)


def write(storage: Storage, file: str) -> Part:
    with storage.create(file) as sink:
        writer = PartWriter(sink, file, ["item", "ü/user"], SLOTS)
        writer.write(batch("item", ITEM))
        writer.write(batch("ü/user", USER))
        return writer.finish()


def test_the_golden_part_is_read_by_its_checksums():
    batches = (
        Batch("item", 3, (1, 9), IDS["item"], CHECKSUMS["item"]),
        Batch("ü/user", 2, (3, 4), IDS["ü/user"], CHECKSUMS["ü/user"]),
    )
    part = Part(GOLDEN.name, GOLDEN.stat().st_size, FRAME, ("item", "ü/user"), batches)
    reader = PartReader(open_storage(str(GOLDEN.parent.parent)), GOLDEN.parent.name, part, SLOTS)
    for number, ids in enumerate((ITEM, USER)):
        found, n_rows = reader.arrays(number, reader.read(number)), len(ids)
        assert found[ID].to_pylist() == ids
        values = {spec.name: column_values(found[spec.name], spec) for spec in SLOTS}
        assert values["embedding"].tolist() == np.arange(n_rows * 2).reshape(n_rows, 2).tolist()
        assert values["sparse_half"].tolist() == np.arange(n_rows * 3).reshape(n_rows, 3).tolist()
        assert values["sparse_matrix"].tolist() == np.arange(n_rows * 4).reshape(n_rows, 2, 2).tolist()
        assert values["sparse_step"].tolist() == list(range(n_rows))
    reader.check_frame()


def test_what_is_written_today_is_the_golden_part_but_for_what_arrow_chooses(tmp_path):
    part = write(open_storage(str(tmp_path)), "part.arrow")
    assert {batch.table: batch.xxh3 for batch in part.batches} == CHECKSUMS
    assert {batch.table: batch.ids for batch in part.batches} == IDS
    mine, golden = (pa.ipc.open_file(str(path)) for path in (tmp_path / "part.arrow", GOLDEN))
    assert mine.schema.equals(golden.schema, check_metadata=True)
    assert mine.read_all().equals(golden.read_all(), check_metadata=True)
