"""Slots with one value for each range of columns, between tables that were divided otherwise."""

import pytest

from recckpt.errors import LoadConfError, StateMismatchError
from recckpt.format.names import slot_name
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.inventory import LoadCandidate, Thing, list_inventory, listed_inventory
from recckpt.load.plan import plan_load
from recckpt.load.problems import Problems

SUM = slot_name("t", "sparse_rowwise_adagrad_sum")
TWO, OTHER = ((0, 8), (8, 12)), ((0, 4), (4, 12))


def inventory(columns, dtype="float32", shape=None):
    of_ranges = Thing(dtype, ((len(columns),) if columns else ()) if shape is None else shape, 5, columns=columns)
    return {slot_name("t", "id"): Thing("int64"), slot_name("t", "embedding"): Thing("float32", (12,)), SUM: of_ranges}


def planned(saved, live, **conf):
    offer = LoadCandidate(parse_load_conf(conf), "there", saved)
    [item] = [item for item in plan_load(live, [offer], Problems()).items if item.name == SUM]
    return item


def test_the_same_ranges_need_no_conversion():
    assert planned(inventory(TWO), inventory(TWO)).conversion == ""


@pytest.mark.parametrize(("saved", "live"), [(TWO, ()), ((), TWO), (TWO, OTHER)])
def test_others_are_converted_where_that_is_allowed(saved, live):
    with pytest.raises(StateMismatchError, match="'convert': True in load_conf"):
        planned(inventory(saved), inventory(live))
    item = planned(inventory(saved), inventory(live), convert=True)
    assert item.conversion.startswith("one value")
    assert " -> one value" in item.conversion
    skipped = planned(inventory(saved), inventory(live), on_mismatch="skip")
    assert skipped.offer is None
    assert "skipped" in skipped.reason


def test_a_cast_is_asked_for_beside():
    with pytest.raises(StateMismatchError):
        planned(inventory(TWO), inventory((), "float16"), convert=True)
    item = planned(inventory(TWO), inventory((), "float16"), convert=True, on_mismatch="cast")
    assert item.conversion.endswith(", cast float32 -> float16")


def test_values_of_ranges_that_nobody_has_named_are_refused():
    with pytest.raises(StateMismatchError, match="of ranges of columns that are not known"):
        planned(inventory((), shape=(2,)), inventory(TWO), convert=True)


def test_a_state_by_columns_of_as_many_columns_as_ranges_is_no_state_of_ranges():
    saved = inventory(((0, 1), (1, 2)), shape=(2,))
    assert planned(saved, inventory((), shape=(2,))).conversion == ""


def test_a_list_of_names_has_the_ranges():
    live = inventory(TWO)
    assert listed_inventory(list_inventory(live))[SUM].columns == TWO
    with pytest.raises(LoadConfError, match="write columns 0:4,4:8"):
        listed_inventory(["t@sparse_sum\tsparse_opt\tfloat32\t2\tcolumns 0-4"])


def test_convert_is_a_flag():
    assert not Entry().convert
    with pytest.raises(LoadConfError, match="convert"):
        parse_load_conf({"convert": 1})
