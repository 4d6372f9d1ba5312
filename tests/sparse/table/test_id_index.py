from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.sweeps import SWEEP_STRIDE

from recckpt.format.buckets import mix64
from recckpt.sparse.table.id_index import IdIndex, erase_ids

INT64 = st.integers(-(2**63), 2**63 - 1)


def colliding_ids(n: int, bits: int = 12) -> list[int]:
    """Ids that share a home cell in every index of up to ``1 << bits`` cells."""
    candidates = np.arange(n << (bits + 2), dtype=np.uint64)
    found = candidates[mix64(candidates) & np.uint64((1 << bits) - 1) == 5][:n]
    assert len(found) == n
    return found.astype(np.int64).tolist()


COLLIDING = colliding_ids(40)
IDS = st.lists(st.one_of(st.sampled_from(COLLIDING), INT64, st.integers(-3, 3)), max_size=60)


def array(ids) -> np.ndarray:
    return np.array(ids, np.int64)


def erase(index: IdIndex, live: list[int], ids) -> None:
    """Erase present ids; ``live`` are all, in the order of their rows."""
    rows = set(index.find(array(ids)).tolist())
    n_left = len(live) - len(rows)
    holes, movers = (
        sorted(row for row in rows if row < n_left),
        [row for row in range(n_left, len(live)) if row not in rows],
    )
    erase_ids(index.cells, index.counts, array(ids), array([live[row] for row in movers]), array(holes))
    for hole, mover in zip(holes, movers, strict=True):
        live[hole] = live[mover]
    del live[n_left:]


class IndexAgainstDict(RuleBasedStateMachine):
    """Rows stay 0 to n - 1: after an erase, the last rows move into the gaps, as a store does it."""

    def __init__(self):
        super().__init__()
        self.index = IdIndex()
        self.rows: dict[int, int] = {}

    @rule(ids=IDS)
    def find_or_add(self, ids):
        rows, new_ids = self.index.find_or_add(array(ids))
        expected_new = [i for i in dict.fromkeys(ids) if i not in self.rows]
        for id_ in expected_new:
            self.rows[id_] = len(self.rows)
        assert new_ids.tolist() == expected_new
        assert rows.tolist() == [self.rows[i] for i in ids]

    @rule(ids=IDS)
    def find(self, ids):
        assert self.index.find(array(ids)).tolist() == [self.rows.get(i, -1) for i in ids]

    @rule(ids=IDS)
    def erase(self, ids):
        present = [i for i in dict.fromkeys(ids) if i in self.rows]
        erased = [self.rows.pop(i) for i in present]
        holes = sorted(row for row in erased if row < len(self.rows))
        movers = [i for i, row in self.rows.items() if row >= len(self.rows)]
        erase_ids(self.index.cells, self.index.counts, array(present), array(movers), array(holes))
        self.rows.update(zip(movers, holes, strict=True))

    @rule(ids=IDS)
    def claim_and_fail(self, ids):
        _, new_ids = self.index.claim(array(ids))
        assert [self.rows.get(i, -1) for i in ids] == self.index.find(array(ids)).tolist()
        assert self.index.n_claimed == len(self.rows) + len(new_ids)
        self.index.settle()

    @rule(n_rows=st.integers(0, 500))
    def reserve(self, n_rows):
        self.index.reserve(n_rows)

    @rule(fitted=st.booleans())
    def copy(self, fitted):
        self.index, old = self.index.fitted() if fitted else self.index.copy(), self.index
        erase_ids(old.cells, old.counts, array(list(self.rows)), array([]), array([]))  # of no consequence to the copy

    @rule(begin=st.integers(0, 65535), n=st.sampled_from([1, 40, 5000, 65536]))
    def part(self, begin, n):
        end = min(65536, begin + n)
        ends = (mix64(array(list(self.rows)).view(np.uint64)) & np.uint64(65535)).tolist()
        expected = [row for row, at in zip(self.rows.values(), ends, strict=True) if begin <= at < end]
        rows, ids = self.index.part(begin, end)
        assert sorted(rows.tolist()) == sorted(expected)
        assert self.index.find(ids).tolist() == rows.tolist()

    @invariant()
    def holds_all(self):
        assert len(self.index) == len(self.rows)
        assert self.index.find(array(list(self.rows))).tolist() == list(self.rows.values())


def run(examples):
    run_state_machine_as_test(IndexAgainstDict, settings=settings(max_examples=examples, stateful_step_count=25))


def test_it_is_what_a_dict_is():
    run(20)


@pytest.mark.slow
def test_it_is_what_a_dict_is_in_many_runs():
    run(max(60, 2000 // SWEEP_STRIDE))


def test_every_int64_is_a_legal_id_whatever_its_strides():
    ids = array([0, 9, -1, 9, 1, 9, 2**63 - 1, 9, -(2**63)])[::2]
    index = IdIndex()
    assert index.find(ids).tolist() == [-1] * 5
    assert index.find_or_add(ids)[0].tolist() == [0, 1, 2, 3, 4]
    assert index.find(ids).tolist() == [0, 1, 2, 3, 4]


def test_ids_that_collide_are_told_apart_and_erased_one_by_one():
    index = IdIndex()
    index.find_or_add(array(COLLIDING))
    live = list(COLLIDING)
    for gone in range(len(COLLIDING)):
        erase(index, live, COLLIDING[gone : gone + 1])
        assert index.find(array(live)).tolist() == list(range(len(COLLIDING) - gone - 1))
        assert index.find(array(COLLIDING[: gone + 1])).tolist() == [-1] * (gone + 1)


def test_a_run_of_cells_wraps_around_the_end_of_the_cells():
    candidates = np.arange(10_000, dtype=np.uint64)
    last_cells = candidates[(mix64(candidates) & np.uint64(63)) >= 62][:20].astype(np.int64)
    index = IdIndex()
    index.find_or_add(last_cells)
    live = last_cells.tolist()
    erase(index, live, last_cells[:5])
    assert index.find(last_cells[:5]).tolist() == [-1] * 5
    assert index.find(array(live)).tolist() == list(range(15))


def test_growing_keeps_all_rows_whatever_the_sizes_of_the_batches():
    ids = np.random.default_rng(0).permutation(100_000)
    whole, pieces = IdIndex(), IdIndex()
    whole.find_or_add(ids)
    for piece in np.array_split(ids, 37):
        pieces.find_or_add(piece)
    assert (whole.find(ids) == np.arange(100_000)).all()
    assert (pieces.find(ids) == np.arange(100_000)).all()


def test_a_reserved_index_and_one_that_is_filled_and_erased_again_and_again_never_grow():
    index = IdIndex()
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 1000)
    index.reserve(1000)
    before = index.cells.nbytes
    index.find_or_add(ids)
    for _ in range(50):
        erase(index, ids.tolist(), ids)
        assert len(index) == 0
        index.find_or_add(ids)
    assert index.cells.nbytes == before
    assert (index.find(ids) == np.arange(1000)).all()


@pytest.mark.parametrize("n_parts", [1, 7, 1000])
def test_parts_hold_every_row_once_also_where_there_are_more_cells_than_parts(n_parts):
    index = IdIndex()
    index.find_or_add(np.arange(100_000) * 7 - 3000)
    bounds = [part * 65536 // n_parts for part in range(n_parts + 1)]
    found = np.concatenate([index.part(begin, end)[0] for begin, end in pairwise(bounds)])
    assert (np.sort(found) == np.arange(100_000)).all()
