"""where: which rows of a table a load takes."""

import numpy as np
import pytest

from recckpt.policies.row_filter import RowFilter, parse_row_filter
from recckpt.sparse import gen_slice

IDS = np.array([-(2**63), -5, 0, 7, 2**63 - 1])


def kept(value, ids=IDS, **values):
    columns = {name: np.array(column, np.float64) for name, column in values.items()}
    return ids[parse_row_filter(value).keeps(ids, columns)].tolist()


def test_no_condition_keeps_all_rows():
    assert parse_row_filter({}) == RowFilter()
    assert kept({}) == IDS.tolist()


def test_a_minimum_is_inclusive_and_nan_is_below_any():
    assert kept({"f": {"min": 5}}, f=[4.999, 5, 6, np.nan, np.inf]) == [-5, 0, 2**63 - 1]
    assert parse_row_filter({"f": {"min": 5}}).slots == {"f"}


@pytest.mark.parametrize("value", [[0, 7, 8], {"ids": [0, 7, 8]}, {"ids": (8, 7, 0, 0)}])
def test_a_list_of_ids_keeps_those_that_are_there(value):
    assert kept(value) == [0, 7]


@pytest.mark.parametrize("value", [[], {"ids": []}, {"sample": 0}])
def test_nothing_may_be_kept(value):
    assert kept(value) == []


def test_all_conditions_have_to_be_met():
    value = {"f": {"min": 1}, "g": {"min": 2}, "ids": [-5, 0, 7]}
    assert kept(value, f=[9, 0, 1, 1, 9], g=[9, 9, 1, 2, 9]) == [7]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_a_sample_is_a_share_of_the_ids(share):
    ids = np.arange(100_000)
    found = len(kept({"sample": share}, ids))
    assert abs(found - share * len(ids)) < 5 * np.sqrt(len(ids) * share * (1 - share))


def test_a_sample_is_always_the_same_and_a_smaller_one_is_part_of_it():
    ids = np.arange(10_000)
    assert kept({"sample": 0.2}, ids) == kept({"sample": 0.2}, ids)
    assert set(kept({"sample": 0.1}, ids)) < set(kept({"sample": 0.2}, ids))
    assert kept({"sample": 1}, ids) == ids.tolist()


def test_a_sample_takes_the_same_share_of_every_slice():
    ids = np.arange(40_000)
    sample = np.array(kept({"sample": 0.5}, ids))
    for shard in range(4):
        owned = gen_slice(shard, 4).owns(sample).sum()
        assert abs(owned - 5000) < 500


def test_a_table_without_a_slot_is_asked_the_rest():
    conditions = parse_row_filter({"f": {"min": 5}, "ids": [1]})
    assert conditions.of(["embedding"]) == RowFilter(ids=frozenset({1}))
    assert conditions.of(["f", "embedding"]) == conditions


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "found 'x', expected a dict such as"),
        (None, "expected a dict such as"),
        ({"f": 5}, r"'f': found 5, expected \{'min': number\}, or the keys 'ids' or 'sample'"),
        ({"f": {"max": 5}}, "'f': found"),
        ({"f": {"min": 1, "max": 5}}, "'f': found"),
        ({"f": {"min": "5"}}, "'f': found"),
        ({"f": {"min": True}}, "'f': found"),
        ({"f": {"min": float("nan")}}, "'f': found"),
        ({"f": {"min": 10**400}}, "'f': found"),
        ({"ids": 5}, "'ids': found 5, expected a list of int64 ids"),
        ({"ids": [1.5]}, "expected a list of int64 ids"),
        ({"ids": [True]}, "expected a list of int64 ids"),
        ([2**63], "expected a list of int64 ids"),
        ({"sample": 1.1}, "'sample': found 1.1, expected a share from 0 to 1"),
        ({"sample": -0.1}, "expected a share"),
        ({"sample": True}, "expected a share"),
        ({"sample": float("nan")}, "expected a share"),
        ({"smaple": 0.1}, "or the keys 'ids' or 'sample'"),
    ],
)
def test_what_is_no_condition_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        parse_row_filter(value)
