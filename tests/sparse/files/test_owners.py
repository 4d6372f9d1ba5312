"""Who reads the batches that several ranks need, and in which rounds they send rows."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import drawn

from recckpt.format.buckets import N_BUCKETS, Slice, bucket_of, gen_slice
from recckpt.format.catalog import Batch, Part
from recckpt.sparse.files.owners import (
    LEAST,
    IdBlock,
    IdSpan,
    IdSpans,
    LinkRequests,
    Owners,
    TableRequest,
    agreed_rounds,
)

ROW_BYTES = 100
EVERYTHING = Slice(0, 1, 1)


def request(*slices):
    return TableRequest(frozenset({"embedding"}), ROW_BYTES, slices)


def evenly(n_ranks, tables=("t",)):
    """Return the requests of ranks that own equal slices of tables."""
    return LinkRequests([dict.fromkeys(tables, request(gen_slice(rank, n_ranks))) for rank in range(n_ranks)])


def dealt(requests, parts, shard=0):
    """Return the batches that are dealt, by file and number."""
    return {(batch.part.file, batch.number): batch for batch in requests.deal(parts, shard)}


def part_of(n_batches, *, table="t", file="p", buckets=(0, N_BUCKETS), rows=50):
    """Return a part whose batches have equal ranges of buckets, one after the other."""
    edges = np.linspace(*buckets, n_batches + 1).astype(int).tolist()
    batches = [Batch(table, rows, span, (0, 0), {}) for span in pairwise(edges)]
    return Part(file, 1 << 20, 0, (table,), tuple(batches))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 64])
def test_ranks_as_of_the_save_read_their_own_batches_and_nobody_else_needs_one(n_ranks):
    for shard in range(n_ranks):
        own = gen_slice(shard, n_ranks)
        batches = list(evenly(n_ranks).deal([part_of(7, buckets=own.buckets)], shard))
        assert len(batches) == 7
        assert {batch.reader for batch in batches} == {shard}
        assert not any(batch.sent for batch in batches)


def test_a_batch_goes_to_the_rank_that_owns_most_of_it():
    first, between, last = evenly(2).deal([part_of(3)], 0)
    assert (first.reader, last.reader) == (0, 1)
    assert between.sent == {1 - between.reader: pytest.approx(between.n_bytes / 2, rel=0.02)}
    almost = LinkRequests([{"t": request(Slice(0, 100))}, {"t": request(Slice(100, N_BUCKETS))}])
    assert next(almost.deal([part_of(1)], 0)).reader == 1


@given(
    n_ranks=st.integers(1, 9),
    parts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=6),
    shard=st.integers(0, 3),
)
def test_each_rank_reads_of_a_shard_what_it_owns_give_or_take_the_largest_batches(n_ranks, parts, shard):
    some = [part_of(n, rows=rows, file=f"p{at}") for at, (n, rows) in enumerate(parts)]
    batches = list(evenly(n_ranks).deal(some, shard))
    assert len(batches) == sum(len(part.batches) for part in some)
    read, largest = Counter(), max(rows for _, rows in parts) * ROW_BYTES
    for batch in batches:
        assert batch.n_bytes == batch.part.batches[batch.number].rows * ROW_BYTES
        read[batch.reader] += batch.n_bytes
    owned = sum(read.values()) / n_ranks
    assert all(abs(read[rank] - owned) <= 2 * largest + n_ranks for rank in range(n_ranks))


def test_small_tables_of_one_batch_each_are_spread_over_the_ranks_and_shards_begin_with_different_ones():
    names = [f"t{number}" for number in range(200)]
    parts = [part_of(1, table=name, file=name) for name in names]
    assert Counter(batch.reader for batch in evenly(4, names).deal(parts, 0)) == dict.fromkeys(range(4), 50)
    readers = [next(evenly(4).deal([part_of(1)], shard)).reader for shard in range(4)]
    assert sorted(readers) == [0, 1, 2, 3]


def test_nobody_reads_what_nobody_takes_and_others_do_not_read_for_a_rank_alone():
    requests = LinkRequests([{"t": request()}, {"t": request(gen_slice(0, 2)), "u": request(EVERYTHING)}, {}])
    batches = dealt(requests, [part_of(4), part_of(1, table="u", file="u"), part_of(1, table="v", file="v")])
    assert {batch.reader for batch in batches.values()} == {1}
    assert batches.keys() == {("p", 0), ("p", 1), ("u", 0)}


def test_a_rank_that_fills_two_tables_from_one_needs_what_both_need():
    both = TableRequest(frozenset({"a", "b"}), 12, (gen_slice(0, 4), gen_slice(1, 4)))
    other = TableRequest(frozenset({"c"}), 10, (gen_slice(1, 2),))
    batches = dealt(LinkRequests([{"t": both}, {"t": other}]), [part_of(4)])
    assert [batches["p", number].reader for number in range(4)] == [0, 0, 1, 1]
    assert [batches["p", number].columns for number in (0, 3)] == [both.columns, other.columns]
    assert batches["p", 0].n_bytes == 50 * 12


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    st.integers(1, 7),
    st.sampled_from([7, 100, N_BUCKETS]),
)
def test_owners_by_buckets_own_what_their_slices_own(ids, n_ranks, size):
    ids = np.array(ids, np.int64)
    slices = {rank: [gen_slice(rank, n_ranks, size)] for rank in range(n_ranks)}
    owners = Owners(slices)
    for rank, positions in owners.of(ids, range(n_ranks)):
        assert positions.tolist() == np.flatnonzero(slices[rank][0].owns(ids)).tolist()
    for bucket in bucket_of(ids).tolist():
        batch = Batch("t", 1, (bucket, bucket + 1), (0, 0), {})
        assert owners.shares(batch) == {rank: 1.0 for rank in slices if slices[rank][0].meets(*batch.buckets)}


def test_copies_of_a_slice_on_two_ranks_both_get_its_rows():
    owners = Owners({0: [gen_slice(0, 2)], 1: [gen_slice(1, 2)], 2: [gen_slice(1, 2)], 3: [Slice(5, 5)]})
    assert owners.shares(Batch("t", 1, (N_BUCKETS // 2, N_BUCKETS), (0, 0), {})) == {1: 1.0, 2: 1.0}
    ids = np.arange(100)
    (_, second), (_, third) = owners.of(ids, [1, 2])
    assert second.tolist() == third.tolist() == np.flatnonzero(gen_slice(1, 2).owns(ids)).tolist()


def test_rows_of_a_live_table_and_ids_without_a_row_have_one_owner_each():
    spans = [IdSpan.of_rows(*rows, 10) for rows in ((0, 4), (4, 4), (4, 9), (9, 10))]
    ids = np.array([-(2**63), -1, 0, 3, 4, 8, 9, 10, 2**63 - 1], np.int64)
    owned = [ids[span.owns(ids)].tolist() for span in spans]
    assert owned == [[-(2**63), -1, 0, 3], [], [4, 8], [9, 10, 2**63 - 1]]
    assert IdSpan.of_rows(0, 10, 10).is_everything
    assert not any(span.is_everything for span in spans)


@drawn(
    st.integers(1, 6),
    st.integers(1, 1 << 62),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    few=60,
    many=2000,
)
def test_of_blocks_each_id_has_one_owner_by_its_place_or_in_turn(size, width, ids):
    for some in (ids, [id_ % (3 * width * size) % 2**63 for id_ in ids]):
        owned = [IdBlock(number, size, width).owns(np.array(some, np.int64)).tolist() for number in range(size)]
        unsigned = [id_ % 2**64 for id_ in some]
        owners = [id_ // width if id_ < width * size else id_ % size for id_ in unsigned]
        assert owned == [[owner == number for owner in owners] for number in range(size)]


def test_a_batch_of_ids_of_a_block_is_of_its_rank_and_one_of_ids_beyond_of_all():
    owners = Owners({rank: [IdBlock(rank, 3, 100)] for rank in range(3)})
    shares = [owners.shares(Batch("t", 9, (0, N_BUCKETS), ids, {})) for ids in ((100, 199), (150, 249), (400, 9000))]
    third = pytest.approx(1 / 3)
    assert shares == [{1: 1.0}, {1: 0.5, 2: 0.5}, {0: third, 1: third, 2: third}]
    assert Owners({0: [IdBlock(0, 1, 7)]}).shares(Batch("t", 9, (0, N_BUCKETS), (-5, 100), {})) == {0: pytest.approx(1)}


def test_a_batch_goes_to_the_rank_whose_rows_meet_its_ids():
    requests = LinkRequests([{"t": request(IdSpan.of_rows(first, first + 50, 100))} for first in (0, 50)])
    batches = (Batch("t", 9, (0, N_BUCKETS), ids, {}) for ids in ((0, 49), (50, 99), (10, 99), (-5, -3), (100, 2**62)))
    found = list(requests.deal([Part("p", 1, 0, ("t",), tuple(batches))], 0))
    assert [batch.reader for batch in found] == [0, 1, 1, 0, 1]
    assert [sorted(batch.sent) for batch in found] == [[], [], [0], [], []]
    assert found[2].sent == {0: pytest.approx(found[2].n_bytes * 40 / 90, abs=1)}


N_ROWS = 40  # of a live table
some_ids = st.lists(st.integers(-10, N_ROWS + 10) | st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True)


@st.composite
def ownerships(draw):
    """Return what each rank owns of a table: rows, buckets, blocks or copies, or some of all kinds that may overlap."""
    n_ranks = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["rows", "buckets", "copies", "blocks", "shared", "mixed"]))
    edges = [0, *sorted(draw(st.lists(st.integers(0, N_ROWS), min_size=n_ranks - 1, max_size=n_ranks - 1))), N_ROWS]
    rows = [IdSpan.of_rows(first, end, N_ROWS) for first, end in pairwise(edges)]
    buckets = [gen_slice(rank, n_ranks) for rank in range(n_ranks)]
    width = draw(st.sampled_from([1, 7, 1 << 40, (1 << 63) - 1]))
    blocks = [IdBlock(rank, n_ranks, width) for rank in range(n_ranks)]
    any_kind = st.lists(st.sampled_from([*rows, *buckets, *blocks, EVERYTHING]), max_size=2, unique=True)
    of_rank = {
        "rows": lambda rank: [rows[rank]],
        "buckets": lambda rank: [buckets[rank]],
        "copies": lambda rank: [IdSpan.of_rows(0, N_ROWS, N_ROWS)],
        "blocks": lambda rank: [IdBlock(rank, n_ranks, width)],
        "shared": lambda rank: [IdSpans((IdSpan(LEAST, -1), rows[rank]))],
        "mixed": lambda rank: draw(any_kind),
    }[kind]
    return [of_rank(rank) for rank in range(n_ranks)]


def batches_of(ids, n_rows):
    """Return the batches of a table that has these ids in its order, and the ids of each."""
    ids = np.array(ids, np.int64)
    ids = ids[np.argsort(bucket_of(ids), kind="stable")]
    pieces = [ids[first : first + n_rows] for first in range(0, len(ids), n_rows)]
    spans = [(int(buckets[0]), int(buckets[-1]) + 1) for buckets in map(bucket_of, pieces)]
    ranges = [(int(piece.min()), int(piece.max())) for piece in pieces]
    return [Batch("t", len(p), *at, {}) for p, *at in zip(pieces, spans, ranges, strict=True)], pieces


@drawn(ownerships(), some_ids, st.integers(1, 9), st.integers(0, 3), few=60, many=2000)
def test_each_batch_is_read_by_one_rank_and_each_rank_gets_what_it_owns_once(ownership, ids, n_rows, shard):
    requests = LinkRequests([{"t": request(*owned)} if owned else {} for owned in ownership])
    batches, pieces = batches_of(ids, n_rows)
    found = dealt(requests, [Part("p", 1, 0, ("t",), tuple(batches))], shard)
    received = {rank: [] for rank in range(len(ownership))}
    for number, piece in enumerate(pieces):
        if ("p", number) in found:
            batch = found["p", number]
            assert batch.reader not in batch.sent
            for rank, positions in requests.owners["t"].of(piece, (batch.reader, *batch.sent)):
                received[rank] += piece[positions].tolist()
    for rank, owned in enumerate(ownership):
        is_own = np.zeros(len(ids), np.bool_)
        for one in owned:
            is_own |= one.owns(np.array(ids, np.int64))
        assert sorted(received[rank]) == sorted(np.array(ids, np.int64)[is_own].tolist())


@st.composite
def sends(draw):
    """Return what each of some ranks sends: windows, each with bytes for others."""
    n_ranks = draw(st.integers(1, 6))
    windows = st.dictionaries(st.integers(0, n_ranks - 1), st.integers(0, 12), min_size=1)
    of_rank = st.lists(windows, max_size=6)
    return [[_to_others(window, rank) for window in draw(of_rank)] for rank in range(n_ranks)]


def _to_others(window, rank):
    return {to: n_bytes for to, n_bytes in window.items() if to != rank}


@given(sends(), st.integers(1, 30))
def test_all_windows_are_sent_and_a_rank_gets_no_more_than_it_has_room_for(of_ranks, room):
    windows = [iter(some) for some in of_ranks]
    for senders in agreed_rounds(of_ranks, room):
        assert senders
        sent = [next(windows[rank]) for rank in senders]
        received = sum(map(Counter, sent), Counter())
        assert all(n <= room or max(window.get(to, 0) for window in sent) == n for to, n in received.items())
    assert all(next(some, None) is None for some in windows)


@pytest.mark.parametrize(
    ("of_ranks", "room", "rounds"),
    [
        ([[dict.fromkeys({0, 1, 2, 3} - {rank}, 4)] * 5 for rank in range(4)], 12, [{0, 1, 2, 3}] * 5),
        ([[], *[[{0: 10}]] * 4], 20, [{1, 2}, {3, 4}]),
        ([[], *[[{0: 10}]] * 4], 5, [{1}, {2}, {3}, {4}]),
        ([[], [{0: 10}], [{0: 10}] * 2], 10, [{2}, {1}, {2}]),
    ],
    ids=["all send evenly", "all send to one", "to one without room for two", "most to send goes first"],
)
def test_ranks_take_turns_as_there_is_room(of_ranks, room, rounds):
    assert agreed_rounds(of_ranks, room) == rounds
