"""Ranks say once, by name, what differs of the state that rank 0 saves for all."""

import numpy as np
import pytest
import torch

from recckpt.dense.rank_digests import RankDigests, digest
from recckpt.dense.state_copy import as_it_is

SAME = [
    {"a": 1, "b": [torch.arange(3), (None, 2.5)], "c": {1, 2}},
    torch.arange(6).reshape(2, 3).t(),
    np.arange(3, dtype=np.int16),
    torch.tensor(1.5),
    torch.empty(0),
]


@pytest.mark.parametrize("state", SAME, ids=str)
def test_equal_states_have_one_digest(state):
    def copied(value):
        if isinstance(value, torch.Tensor):
            return value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value

    assert digest(state) == digest(copied(state))


def test_states_that_differ_have_other_digests():
    states = [
        *SAME,
        {"a": 2, "b": [torch.arange(3), (None, 2.5)], "c": {1, 2}},
        {"a": 1, "b": [torch.tensor([0, 1, 3]), (None, 2.5)], "c": {1, 2}},
        torch.arange(6).reshape(2, 3),
        torch.arange(6),
        torch.arange(6, dtype=torch.int32),
        np.arange(3, dtype=np.int32),
        torch.tensor([1.5]),
        1,
        True,
        1.0,
        "1",
        [1],
        (1,),
        [[1], 2],
        [1, [2]],
    ]
    assert len({digest(state) for state in states}) == len(states)


def test_what_a_save_refuses_has_a_digest_all_the_same():
    assert digest(torch.ones(2).to_sparse()) == 0
    assert digest(torch.empty(2, device="meta")) == 0


def taken(digests, dense=0, small=0, large=0):
    now = digests.begin()
    copy = now.noting(as_it_is)
    copy(("dense", "top.weight"), torch.full((2,), float(dense)))
    copy(("register_for_checkpointing", "small"), {"n": small})
    copy(("register_for_checkpointing", "large"), torch.full((1 << 19,), float(large)))
    return now


def test_what_costs_time_is_looked_at_in_the_first_save_and_in_every_twentieth():
    digests = RankDigests()
    looked_at = [{name for name, found in taken(digests).by_name.items() if found > 1} for _ in range(41)]
    small = {"register_for_checkpointing 'small'"}
    everything = small | {"dense 'top.weight'", "register_for_checkpointing 'large'"}
    assert [number for number, names in enumerate(looked_at) if names == everything] == [0, 20, 40]
    assert all(names == small for number, names in enumerate(looked_at) if number % 20)


def test_what_differs_is_said_once_and_by_name(caplog):
    ranks = [RankDigests(), RankDigests()]
    for _ in range(3):
        first, second = taken(ranks[0]), taken(ranks[1], dense=1, small=1)
        if first.summary == second.summary:
            continue
        for rank, own in enumerate((first, second)):
            own.warn([first.by_name, second.by_name], rank)
    dense, small = [record.getMessage() for record in caplog.records]
    assert dense.startswith(
        "dense 'top.weight' differs on rank 1: the state of rank 0 is saved, and all ranks get it back"
    )
    assert small.startswith("register_for_checkpointing 'small' differs on rank 1: ")
    assert "per_rank=True" in small


def test_what_rank_0_does_not_have_is_said_not_to_be_saved(caplog):
    ranks = [RankDigests().begin(), RankDigests().begin()]
    ranks[1].noting(as_it_is)(("dense", "stage_2.weight"), torch.ones(1))
    ranks[0].warn([rank.by_name for rank in ranks], 0)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("dense 'stage_2.weight' is known to rank 1 and not to rank 0, and is not saved")


def copies(n_rows=10_000, **changed):
    """Return the slots of a copy of a table; ``changed`` are slots of which row 7 is another."""
    slots = {"embedding": torch.ones(n_rows, 3), "sum": torch.ones(n_rows)}
    for slot in changed:
        slots[slot][7] = 2
    return slots


@pytest.mark.parametrize("slot", ["embedding", "sum"])
def test_copies_of_a_table_that_differ_in_a_row_are_named_once_after_some_saves(caplog, slot):
    ranks = [RankDigests() for _ in range(3)]
    for _ in range(4):  # each of which looks at about half of so many rows
        saves = [each.begin() for each in ranks]
        saves[0].note_rows("users", 20, copies(), audit=0)
        saves[2].note_rows("users", 20, copies(**{slot: True}), audit=0)  # rank 1 has no copy of these rows
        for rank, save in enumerate(saves):
            save.warn([each.by_name for each in saves], rank)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("table 'users' from row 20 to 10019 differs on rank 2 from the other copies")


def test_an_audit_looks_at_all_rows_of_copies():
    own, other = RankDigests(), RankDigests()
    looks = []
    for _ in range(4):
        saves = [each.begin() for each in (own, other)]
        for save, slots in zip(saves, (copies(30_000), copies(30_000, sum=True)), strict=True):
            save.note_rows("users", 0, slots, audit=2)
        looks.append(saves[0].summary != saves[1].summary)
    assert looks == [False, True, False, True]


def test_digests_tell_how_lists_are_nested_and_not_in_which_order_a_dict_was_filled():
    assert digest([[1, 2], 3]) != digest([[1, 2, 3]])
    assert digest([{"a": 1}, {}]) != digest([{"a": 1, "b": {}}])
    assert digest({"a": 1, 2: 3}) == digest({2: 3, "a": 1})


def test_an_object_that_is_large_on_one_rank_alone_differs_and_is_not_said_to_be_missing(caplog):
    states = [torch.zeros(300_000), torch.zeros(2)]
    digests = [RankDigests() for _ in states]
    for each in digests:
        each.begin()  # the first save looks at everything
    seconds = [each.begin() for each in digests]
    for each, state in zip(seconds, states, strict=True):
        each.noting(lambda place, state: state)(("extra", "x"), state)
    seconds[0].warn([each.by_name for each in seconds], 0)
    assert "extra 'x' differs on rank 1" in caplog.text
