"""The rule of ids in files, held against dicts."""

import numpy as np
import pytest
from hypothesis import strategies as st
from support.drawn import drawn

from recckpt.sparse.files.table_reader import ABSENT, DELETED, LinkIds, NamedIds, check_once, newest

IDS = st.sets(st.integers(-3, 12))
LINKS = st.lists(st.tuples(IDS, IDS), max_size=4)


def array(ids):
    return np.array(sorted(ids), np.int64)


def link_of(rows, deletes):
    return LinkIds(array(rows), [array(deletes), array(deletes)])


def damage(where, found, expected):
    return ValueError(f"{where}: {found}, {expected}")


@drawn(LINKS, IDS, few=20, many=500)
def test_an_id_has_the_row_of_the_newest_link_that_names_it(links, ids):
    asked, expected = list(ids), {}
    for number, (rows, deletes) in reversed(list(enumerate(links))):
        expected = {id_: link for id_, link in expected.items() if id_ not in deletes} | dict.fromkeys(rows, number)
    opened = [link_of(*link) for link in links]
    found = {
        asked[place]: (opened.index(link), int(link.rows[row]))
        for link, places, rows in newest(opened, np.array(asked, np.int64))
        for place, row in zip(places, rows, strict=True)
    }
    assert found == {id_: (expected[id_], id_) for id_ in asked if id_ in expected}


def test_no_link_is_asked_for_ids_that_newer_ones_name():
    def links():
        yield link_of({1}, {2})
        raise AssertionError("asked too far")

    [(_, places, _)] = newest(links(), np.array([2, 1]))
    assert places.tolist() == [1]
    assert not list(newest(links(), np.empty(0, np.int64)))


def test_a_link_tells_rows_deletes_and_other_ids_apart():
    assert link_of({4, 7}, {5, 7}).find(np.array([7, 5, 6, 4])).tolist() == [1, DELETED, ABSENT, 0]
    assert link_of((), ()).find(np.array([7])).tolist() == [ABSENT]


@pytest.mark.parametrize(
    ("shards", "refusal"),
    [
        ([({1}, {2}), ({2}, {1})], None),
        ([({1, 2}, {2})], "in one shard: id 2 twice, every id once"),
        ([({1, 2, 3}, ()), ((), {1}), ({2, 3}, ())], "between shards: id 2 and 1 others twice, every id once"),
    ],
)
def test_a_link_names_an_id_once(shards, refusal):
    ids = [(array(rows), array(deletes)) for rows, deletes in shards]
    if refusal is None:
        check_once(ids, damage)
    else:
        with pytest.raises(ValueError, match=refusal):
            check_once(ids, damage)


@drawn(st.lists(IDS, max_size=4), few=20, many=500)
def test_ids_are_new_until_they_are_named(added):
    named, before = NamedIds(), set()
    for some in added:
        ids = array(some)
        assert set(ids[named.is_new(ids)].tolist()) == some - before
        named.add(ids, ids[:1])
        before |= some
    named.add()
