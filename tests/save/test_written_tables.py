"""What the ranks wrote of each table becomes one entry of the manifest."""

import pickle

import numpy as np
import pytest

from recckpt.errors import StateMismatchError
from recckpt.format.reduced import Narrowed, Reduced
from recckpt.format.tables import ClockDates, DeltaRows, TableEntry
from recckpt.save.written_tables import NamesAndSlots, WrittenTables, tables_of_all
from recckpt.types import SlotSpec


def slots(dim):
    return (SlotSpec("embedding", "float32", (dim,)),)


def written(tables, dim=2, **fields):
    """Return what a rank wrote of tables as (rows,), or (rows, upserts, deletes) of a delta."""
    heads = NamesAndSlots.of(dict.fromkeys(tables, slots(dim)))
    return WrittenTables(heads, np.array(list(tables.values()), np.int64).reshape(len(tables), -1).T, **fields)


def test_rows_are_added_up_by_name_in_whatever_order_the_ranks_have_their_tables():
    ranks = [written({"t": (3,), "u": (4,)}), written({"u": (10,), "t": (20,)}), written({"v": (5,)})] * 2
    assert tables_of_all(ranks, ()) == tuple(
        TableEntry(name, rows, slots(2)) for name, rows in (("t", 46), ("u", 28), ("v", 10))
    )
    assert tables_of_all([WrittenTables(NamesAndSlots.of({}), np.zeros((1, 0), np.int64))] * 2, ()) == ()


def test_a_delta_has_the_changes_of_all_ranks_and_the_tables_that_it_replaces():
    ranks = [written({"t": (3, 1, 2), "u": (4, 4, 0)}), written({"t": (5, 3, 1), "u": (6, 6, 0)})]
    t, u = tables_of_all(ranks, {"u"})
    assert (t.rows, t.delta) == (8, DeltaRows(4, 3, replaced=False))
    assert (u.rows, u.delta) == (10, DeltaRows(10, 0, replaced=True))


def test_ranks_that_disagree_on_a_table_are_refused_by_name():
    with pytest.raises(StateMismatchError, match="table 't' of rank 2"):
        tables_of_all([written({"t": (1,)}), written({"u": (1,)}), written({"t": (1,)}, dim=3)], ())


def test_a_table_is_evicted_up_to_a_step_where_all_ranks_that_have_it_say_the_same():
    ranks = [written({"t": (1,)}, evicted_to={"t": 7}), written({"t": (1,)}, evicted_to={"t": 7}), written({"u": (1,)})]
    assert [table.evicted_to for table in tables_of_all(ranks, ())] == [7, None]
    for other in ({"t": 8}, {}):
        [table] = tables_of_all([ranks[0], written({"t": (1,)}, evicted_to=other)], ())
        assert table.evicted_to is None


def test_dates_of_the_clock_span_those_of_all_ranks_and_what_was_left_out_is_added_up_with_the_worst_errors():
    one = Reduced(("m",), None, 3, (Narrowed("embedding", "float64", 0.1),))
    other = Reduced(("m",), None, 4, (Narrowed("embedding", "float64", 0.5),))
    [table] = tables_of_all(
        [
            written({"t": (1,)}, clock={"t": ClockDates(5.0, 6.0)}, reduced={"t": one}),
            written({"t": (1,)}, clock={"t": ClockDates(2.0, 4.0)}, reduced={"t": other}),
            written({"t": (1,)}),
        ],
        (),
    )
    assert table.clock == ClockDates(2.0, 6.0)
    assert (table.reduced, table.reduced.rows, table.reduced.narrowed[0].error) == (one, 7, 0.5)


def test_what_a_rank_sends_of_two_hundred_tables_of_a_full_save_takes_less_than_six_kilobytes():
    sent = pickle.dumps(written({f"feature_{number:03d}": (10**6 + number,) for number in range(200)}))
    assert len(sent) < 6000
    [first, *_] = tables_of_all([pickle.loads(sent)] * 3, ())
    assert (first.name, first.rows) == ("feature_000", 3 * 10**6)
