"""What a manifest says of tables that were not saved as they were comes back, and nothing else is taken for it."""

import pytest

from recckpt.errors import CorruptCheckpointError
from recckpt.format.json_fields import Fields
from recckpt.format.reduced import Narrowed, Reduced, Where, descriptions_of, parse_reduced, reduced_json
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "bfloat16", (2,)), SlotSpec("count", "int64", ()))
WHERE = Where((("count", 2.0),), n_ids=3, ids_xxh3=2**64 - 1, sample=0.5)
FULL = Reduced(("late",), WHERE, 7, (Narrowed("embedding", "float32", 0.125),))


def parsed(values):
    return parse_reduced(Fields(values, "manifest.json"), SLOTS)


@pytest.mark.parametrize("reduced", [FULL, Reduced(("late",)), Reduced(where=Where()), Reduced(narrowed=FULL.narrowed)])
def test_it_comes_back_as_it_was(reduced):
    found = parsed(reduced_json(reduced))
    assert (found, found.rows, str(found)) == (reduced, reduced.rows, str(reduced))


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
        parsed({**reduced_json(FULL), **changes})
    assert refused.value.where == where


def test_tables_of_which_the_same_was_left_out_share_a_line():
    names = [f"t{n}" for n in range(5)]
    said = descriptions_of(dict.fromkeys(names, Reduced(where=WHERE, rows=2)) | {"as it is": Reduced(where=Where())})
    why = "saved: count of at least 2 and one of 3 given ids and in a sample of 0.5"
    assert said == [f"tables 't0', 't1', 't2' and 2 more without 10 rows ({why})"]


def test_whether_a_loaded_table_can_tell_which_of_its_rows_were_saved():
    by_count = Where((("count", 2.0),))
    assert not Reduced(("late",), by_count).forgets_why
    assert Reduced(("count",), by_count).forgets_why
    assert Reduced((), Where((("score", 0.5),)), 0, (Narrowed("score", "float32"),)).forgets_why
    assert not Reduced(("count",)).forgets_why
