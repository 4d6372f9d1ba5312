"""Ranks that have columns of the same rows: what each saves of them is whole, and of one moment."""

from functools import partial

import numpy as np
import pytest
import torch
from support.sources import read_column
from support.sweeps import mostly_slow
from support.thread_ranks import ThreadGroup, Wire

from recckpt.adapters import columns as column_exchange
from recckpt.adapters.columns import ColumnRows, Head, holders_of, join_columns, windows
from recckpt.errors import LiveTableError, RecckptError
from recckpt.live.attached import AttachedTable
from recckpt.parallel.ranks import Meetings
from recckpt.parallel.threads import run_all
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import Box, SlotSpec

COLUMNS = ((0, 4), (4, 8), (8, 10))
N_ROWS, WIDTH = 100, 10


class Part:
    """A table in memory, of which a rank has a box; with a state by columns, and one a row."""

    def __init__(self, name, box):
        self.name, self.n_rows, self._box = name, N_ROWS, box
        n_rows = box.rows[1] - box.rows[0]
        begin, end = box.columns[box.part]
        draw = torch.Generator().manual_seed(box.part + box.rows[0])
        self.values = {
            "embedding": torch.rand(n_rows, end - begin, generator=draw),
            "sparse_adagrad_sum": torch.rand(n_rows, end - begin, generator=draw).to(torch.bfloat16),
            "sparse_rowwise_adagrad_sum": torch.rand(n_rows, generator=draw),
        }

    def box(self):
        return self._box

    def prepare(self):
        pass

    def tensors(self):
        return self.values

    def attach(self, door):
        self.door = door
        return lambda: None

    def scalars(self):
        return {}

    def settings(self):
        return {}

    def finish(self, scalars, settings):
        pass

    def train(self, rows):
        """Change rows as a step would."""
        self.door.announce(torch.tensor(rows))
        for values in self.values.values():
            values[rows] += 1


class Rank:
    """The tables of one rank, and the marks of their changes."""

    def __init__(self, boxes, *, by_prints=False):
        self.parts = [Part(name, box) for name, box in boxes.items()]
        self.tables = [AttachedTable(part, says_what_changes=not by_prints) for part in self.parts]
        self.tracker = Tracker()

    def begin(self):
        for table in self.tables:
            self.tracker.begin(table, "base")

    def staged(self, *, is_delta):
        frozen = [self.tracker.freeze(table) for table in self.tables]
        staged = [ColumnRows(each.snapshot, table.store.box) for each, table in zip(frozen, self.tables, strict=True)]
        if is_delta:
            return [rows.since(partial(each.changed_since, "base")) for rows, each in zip(staged, frozen, strict=True)]
        return staged


def three(names=("a", "b"), **options):
    return [
        Rank({name: Box((0, N_ROWS), columns=COLUMNS, part=part) for name in names}, **options) for part in range(3)
    ]


def grid():
    """Two groups of ranks, each with a half of the rows; one rank that has nothing."""
    halves = [
        Rank({"a": Box(rows, columns=COLUMNS[:2], part=part)}) for rows in ((0, 60), (60, 100)) for part in range(2)
    ]
    return [*halves, Rank({"a": Box((0, 0), columns=COLUMNS[:2])})]


def whole(ranks, name="a"):
    """Return the whole rows of a table, whichever ranks have them, by slot."""
    found = {}
    for part in (part for rank in ranks for part in rank.parts if part.name == name):
        box = part.box()
        for slot, values in part.values.items():
            n_values = box.columns[-1][1] if values.dim() > 1 else len(box.columns)
            rows = found.setdefault(slot, torch.full((N_ROWS, n_values), float("nan"), dtype=values.dtype))
            columns = slice(*box.columns[box.part]) if values.dim() > 1 else box.part
            rows[slice(*box.rows), columns] = values
    return found


def joined(ranks, *, is_delta=False, beside=lambda rank: None, window_bytes=200):
    """Return the rows that each rank saves, as (id, slot) -> bytes; all of them as they were before ``beside``."""
    staged = [rank.staged(is_delta=is_delta) for rank in ranks]
    wire = Wire(len(ranks))

    def work(number):
        beside(ranks[number])
        join_columns(staged[number], Meetings(ThreadGroup(number, wire)), window_bytes=window_bytes)
        return [dict(rows_of(source)) for source in staged[number]]

    return run_all(work, range(len(ranks)), len(ranks))


def rows_of(source):
    ids = source.ids.to_tensor(source.n_rows).numpy()
    for number, spec in enumerate(source.slots, start=1):
        target = np.empty(source.n_rows * spec.row_bytes, np.uint8)
        read_column(source, number, np.arange(source.n_rows), target, is_last=True)
        for id_, values in zip(ids.tolist(), target.reshape(source.n_rows, spec.row_bytes), strict=True):
            yield (id_, spec.name), values.tobytes()


def expected(found, ids=range(N_ROWS)):
    return {
        (id_, slot): values[id_].view(torch.uint8).numpy().tobytes() for slot, values in found.items() for id_ in ids
    }


def all_of(saved, table=0):
    """Return the rows of a table on all ranks, none of which two have."""
    rows = {}
    for of_rank in saved:
        assert not rows.keys() & of_rank[table].keys()
        rows |= of_rank[table]
    return rows


@mostly_slow()
@pytest.mark.parametrize("made", [three, grid])
@pytest.mark.parametrize("window_bytes", [1, 200, 1 << 20])
def test_the_ranks_save_each_row_once_and_whole_as_it_was_before_training_went_on(made, window_bytes):
    ranks = made()
    truth = expected(whole(ranks))
    saved = joined(
        ranks,
        beside=lambda rank: [part.train(list(range(part.box().rows[1] - part.box().rows[0]))) for part in rank.parts],
        window_bytes=window_bytes,
    )
    assert all_of(saved) == truth


@pytest.mark.parametrize("by_prints", [False, True])
def test_a_delta_has_the_rows_that_changed_on_any_rank(by_prints):
    ranks = three(by_prints=by_prints)
    for rank in ranks:
        rank.begin()
    changed = {0: [1, 40, 99], 1: [2, 40], 2: []}
    for number, rank in enumerate(ranks):
        rank.parts[0].train(changed[number])
    truth = expected(whole(ranks), [1, 2, 40, 99])
    saved = joined(ranks, is_delta=True, beside=lambda rank: rank.parts[0].train([1, 2, 3, 40]))
    assert all_of(saved) == truth
    assert all_of(saved, table=1) == {}


def test_the_marks_of_one_rank_alone_would_lose_rows(monkeypatch):
    """The planted bug: each rank takes what has changed on it for what has changed."""
    ranks = three(["a"])
    for rank in ranks:
        rank.begin()
        rank.parts[0].train([1, 2, 3, 4, 5, 6, 7])
    n_changed = [rank.tracker.freeze(rank.tables[0]).n_changed for rank in ranks]
    [staged] = zip(*(rank.staged(is_delta=False) for rank in ranks), strict=True)
    assert sum(map(ColumnRows.share_of, staged, n_changed)) == 7, "about as many are proposed as have changed"
    ranks[2].parts[0].train([0])  # row 0 is saved by rank 0
    monkeypatch.setattr(column_exchange, "_joined", lambda pieces, real=column_exchange._joined: real(pieces) * 0)
    assert (0, "embedding") not in joined(ranks, is_delta=True)[0][0]


def test_a_rank_that_fails_ends_the_exchange_for_all():
    ranks = three(["a"])
    staged = [rank.staged(is_delta=False) for rank in ranks]
    ranks[1].parts[0].door.replaced()  # its snapshot cannot be read any more
    wire = Wire(3)

    def work(number):
        meetings = Meetings(ThreadGroup(number, wire))
        expected = pytest.raises(RecckptError, match="'a': its rows were changed while they were being saved")
        with expected as caught, meetings.ended_by_errors():
            join_columns(staged[number], meetings)
        return type(caught.value)

    assert run_all(work, range(3), 3) == [LiveTableError] * 3


def test_parts_that_are_not_all_there_are_refused_and_windows_hold_what_fits_and_at_least_a_row():
    slots = (SlotSpec("embedding", "float32", (4,)),)
    one, other = (Head(Box((0, 10), columns=COLUMNS[:2], part=part), slots, False) for part in (0, 1))
    assert holders_of("t", 0, [[one], [other]], 0) == {0: one, 1: other}
    for wrong in ([[one]], [[one], [one]], [[one], [Head(other.box, slots, True)]]):
        with pytest.raises(LiveTableError, match=r"table 't': found the parts .* expected each of 2 once"):
            holders_of("t", 0, wrong, 0)
    pieces = [[(0, 0, 3)], [(2, 0, 1)], [(2, 1, 2)]]
    assert windows({0: (3, 10), 1: (0, 4), 2: (2, 30)}, 40) == pieces
    assert windows({5: (4, 10)}, 25) == [[(5, 0, 2)], [(5, 2, 4)]]
    assert windows({5: (2, 10)}, 1) == [[(5, 0, 1)], [(5, 1, 2)]]
    assert windows({}, 10) == []
