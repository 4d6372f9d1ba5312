"""x"""

import pytest

from recckpt.errors import CorruptCheckpointError
from recckpt.format.codec import Document, plain
from recckpt.format.tables import Narrowed, Reduced, TableEntry, Where, descriptions_of, table_problems
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "bfloat16", (2,)), SlotSpec("count", "int64", ()))
WHERE = Where({"count": 2.0}, 0.5, 3, 2**64 - 1)
ANY = Where({}, 1.0)
FULL = Reduced(("late",), WHERE, 7, (Narrowed("embedding", "float32", 0.125),))


def reduced(slots=(), where=None, rows=0, narrowed=()):
    return Reduced(slots, where, rows, narrowed)


def parsed(values):
    document = Document({**plain(TableEntry("t", 9, SLOTS)), "reduced": values}, "manifest.json", b"")
    table = document.read(TableEntry)
    for where, found, expected in table_problems(table, of_delta=False):
        raise document.wrong(where, found, expected)
    return table.reduced


@pytest.mark.parametrize("saved", [FULL, reduced(("late",)), reduced(where=ANY), reduced(narrowed=FULL.narrowed)])
def test_it_comes_back_as_it_was(saved):
    found = parsed(plain(saved))
    assert (found, found.rows, str(found)) == (saved, saved.rows, str(saved))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"slots": ["count"]}, "slots"),
        ({"slots": ["late", "late"]}, "slots"),
        ({"slots": [""]}, "slots"),
        ({"slots": None}, "slots"),
        ({"rows": -1}, "rows"),
        ({"where": None}, "rows"),
        ({"where": {"min": {"count": "2"}, "sample": 1.0}}, "where.min.count"),
        ({"where": {"min": {"count": True}, "sample": 1.0}}, "where.min.count"),
        ({"where": {"min": {"count": 10**400}, "sample": 1.0}}, "where.min.count"),
        ({"where": {"min": {}, "sample": 1.5}}, "where.sample"),
        ({"where": {"min": {}, "sample": 1.0, "ids": 3}}, "where.ids_xxh3"),
        ({"narrowed": [{"slot": "late", "dtype": "float32", "error": 0.0}]}, "narrowed[0].slot"),
        ({"narrowed": [{"slot": "embedding", "dtype": "float16", "error": 0.0}]}, "narrowed[0].dtype"),
        ({"narrowed": [{"slot": "count", "dtype": "float64", "error": 0.0}]}, "narrowed[0].dtype"),
        ({"narrowed": [{"slot": "embedding", "dtype": "float32", "error": -1.0}]}, "narrowed[0].error"),
        ({"narrowed": [{"slot": "embedding", "dtype": "float32", "error": True}]}, "narrowed[0].error"),
        ({"narrowed": [{"slot": "embedding", "dtype": "float32", "error": 0}] * 2}, "narrowed"),
    ],
)
def test_what_cannot_be_is_corrupt_and_named(changes, where):
    with pytest.raises(CorruptCheckpointError) as refused:
        parsed({**plain(FULL), **changes})
    assert refused.value.where == f"reduced.{where}"


def test_tables_of_which_the_same_was_left_out_share_a_line():
    names = [f"t{n}" for n in range(5)]
    said = descriptions_of(dict.fromkeys(names, reduced(where=WHERE, rows=2)) | {"as it is": reduced(where=ANY)})
    why = "saved: count of at least 2 and one of 3 given ids and in a sample of 0.5"
    assert said == [f"tables 't0', 't1', 't2' and 2 more without 10 rows ({why})"]


def test_whether_a_loaded_table_can_tell_which_of_its_rows_were_saved():
    by_count = Where({"count": 2.0}, 1.0)
    assert not reduced(("late",), by_count).forgets_why
    assert reduced(("count",), by_count).forgets_why
    assert reduced((), Where({"score": 0.5}, 1.0), 0, (Narrowed("score", "float32", 0.0),)).forgets_why
    assert not reduced(("count",)).forgets_why
