"""Ids that wait for a row: counted, read as if new, and admitted as a dict of counts would have it."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.raising import RaisingAt
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, Saver
from recckpt.errors import StateMismatchError
from recckpt.format.buckets import bucket_of, mix64
from recckpt.policies.admit import Bloom, MinCount, Probability
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import Constant, HashTable, Normal, SparseAdam
from recckpt.sparse.table.admission import block_of

SMALL = Bloom(1000, 0.01)


def ids_of(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def rows_of(table):
    """Return id -> values of all slots."""
    columns = [table.embeddings().flatten(1), *(some.view(len(table), -1).double() for some in table.slots.values())]
    return dict(zip(table.ids().tolist(), torch.cat([c.double() for c in columns], 1).tolist(), strict=True))


def waiting(table):
    return dict(zip(table.candidates.ids().tolist(), table.candidates.embeddings()[:, 0].tolist(), strict=True))


class Model(torch.nn.Module):
    def __init__(self, admit, **options):
        super().__init__()
        self.table = HashTable(2, name="user", initializer=Normal(), admit=admit, **options)


def test_gradients_from_before_an_id_had_its_row_never_reach_it():
    table = HashTable(1, name="t", initializer=Constant(1), admit=MinCount(2))
    (10 * table(ids_of(5, 6, 6))).sum().backward()
    table(ids_of(5)).sum().backward()
    rows, grads = table.take_gradients()
    assert dict(zip(table.ids()[rows].tolist(), grads[:, 0].tolist(), strict=True)) == {6: 20, 5: 1}


@pytest.mark.parametrize(
    "admit", [MinCount(2), MinCount(2, bloom=SMALL), Probability(0.001), lambda ids, step: ids < 0]
)
def test_who_waits_reads_what_its_row_would_begin_with_and_has_no_gradient(admit):
    table, free = (HashTable(2, name="t", initializer=Normal(), admit=some) for some in (admit, None))
    table.step = 0
    rows = table(ids_of(5, 6, 5) if not isinstance(admit, MinCount) else ids_of(5, 6))
    assert torch.equal(rows[:2], free(ids_of(5, 6)))
    rows.sum().backward()
    assert len(table) == 0
    taken, grads = table.take_gradients()
    assert len(taken) == len(grads) == 0
    assert table.eval()(ids_of(5)).tolist() == [[0, 0]]


def test_one_call_may_insert_and_count_nothing():
    table = HashTable(1, name="t", initializer=Constant(1), track="count", admit=MinCount(2))
    table(ids_of(7, 7))
    rows = table(ids_of(7, 8, 8), admit=False)
    assert rows.tolist() == [[1], [1], [1]]
    rows.sum().backward()
    assert len(table) == 1
    assert waiting(table) == {}
    assert table.slots["count"].tolist() == [2]
    assert [some.tolist() for some in table.take_gradients()] == [[0], [[1]]]
    free = HashTable(1, name="t")
    assert free(ids_of(1), admit=False).tolist() == [[0]]
    assert free.bag(ids_of(1, 2).view(1, 2), admit=False).tolist() == [[0]]
    assert len(free) == 0
    with pytest.raises(ValueError, match="admit must be True or False"):
        free(ids_of(1), admit=MinCount(2))


def test_a_probability_needs_the_step_and_says_so():
    table = HashTable(2, name="t", admit=Probability(0.5))
    with pytest.raises(ValueError, match="was not given a step"):
        table(ids_of(1))
    table.step = 0
    table(torch.arange(1000))
    n_rows = len(table)
    table(torch.arange(1000))
    assert len(table) == n_rows
    table.step = 1
    table(torch.arange(1000))
    assert n_rows < len(table) < 1000


@pytest.mark.parametrize("wrong", [lambda ids, step: ids, lambda ids, step: ids[1:] > 0, lambda ids, step: None])
def test_a_function_that_returns_no_mask_is_refused_and_nothing_changes(wrong):
    table = HashTable(2, name="t", admit=wrong)
    with pytest.raises(ValueError, match="expected 2 bools"):
        table(ids_of(1, 2))
    assert len(table) == 0


def test_copies_and_state_dicts_take_the_counts_along_and_optimizers_leave_them_out():
    model = Model(MinCount(3))
    model.table(ids_of(1, 1, 2))
    twin = copy.deepcopy(model)
    other = Model(MinCount(3))
    other.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == ["table.user", "table.user.candidates"]
    for some in (twin, other):
        assert waiting(some.table) == {1: 2, 2: 1}
        some.table(ids_of(1))
        assert some.table.ids().tolist() == [1]
    assert len(model.table) == 0
    assert list(filter_out_sparse_param(model)) == ["user"]
    SparseAdam(filter_out_sparse_param(model))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"table.user": model.table})
    assert HashTable(1, name="t", admit=Probability(0.5)).candidates is None


def test_after_an_exception_rows_are_as_before_or_after_and_counts_never_ahead_of_them():
    def started():
        table = HashTable(2, name="t", initializer=Normal(), track="count", admit=MinCount(3))
        table(ids_of(1, 1, 2, 9, 9, 9))
        return table

    def look_up(table):
        table(ids_of(1, 2, 3, 9, 4, 4, 4))
        return table

    def state(table):
        return rows_of(table), waiting(table)

    before, after = state(started()), state(look_up(started()))
    for number in range(0, 10_000, 7):
        table = started()
        try:
            with RaisingAt(number, KeyboardInterrupt, "sparse"):
                look_up(table)
        except KeyboardInterrupt:
            rows, counts = state(table)
            assert rows in (before[0], after[0])
            assert counts == before[1] or rows == after[0]
        else:
            break
    assert number > 50


BATCHES = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=8), st.sampled_from(["train", "eval", "read", "erase"])), max_size=10
)


@drawn(BATCHES, st.integers(1, 4), st.booleans(), few=15, many=500)
def test_the_rows_are_those_of_a_dict_of_counts(batches, n, bloom):
    table = HashTable(2, name="t", track=("count", "step"), admit=MinCount(n, SMALL if bloom else None))
    rows, counts = {}, {}
    for step, (ids, mode) in enumerate(batches):
        table.step = step
        given = torch.tensor(ids, dtype=torch.int64)
        if mode == "erase":
            assert table.erase(given) == len(rows.keys() & set(ids))
            for id_ in ids:
                rows.pop(id_, None)
                if not bloom:
                    counts.pop(id_, None)
            continue
        table.train(mode != "eval")(given, admit=mode != "read")
        if mode != "train":
            continue
        for id_ in set(ids):
            times = ids.count(id_)
            if id_ in rows:
                rows[id_] = (rows[id_][0] + times, step)
            elif counts.get(id_, 0) + times >= n:
                rows[id_] = (counts.get(id_, 0) + times, step)
                if not bloom:  # cells of a filter stay as they are
                    counts.pop(id_, None)
            else:
                counts[id_] = counts.get(id_, 0) + times
    found = zip(table.slots["count"].tolist(), table.slots["last_step"].tolist(), strict=True)
    assert dict(zip(table.ids().tolist(), found, strict=True)) == rows
    if not bloom:
        assert waiting(table) == counts


def test_a_filter_never_admits_later_than_exact_counts_and_seldom_earlier():
    """Filled to its capacity, which is small here since a block of the filter is asked for alone."""
    bloom = Bloom(8_000_000, 0.02)
    draw = np.random.default_rng(0)
    ids = draw.integers(-(2**63), 2**63 - 1, 60_000_000 // 64)
    ids = ids[bucket_of(ids) < 256]
    more = [draw.integers(-(2**63), 2**63 - 1, 1_000_000) for _ in range(8)]
    ids = np.unique(np.concatenate([ids, *(some[bucket_of(some) < 256] for some in more)]))
    ids = ids[: 8_000_000 // 256]
    table = HashTable(1, name="t", initializer=Constant(0), admit=MinCount(2, bloom))
    with torch.no_grad():
        table(torch.from_numpy(ids))
        early = len(table)
        assert early / len(ids) < bloom.error
        table(torch.from_numpy(ids))
    assert len(table) == len(ids)


def test_the_block_of_an_id_is_in_its_bucket_and_blocks_are_spread_over_the_index_of_their_table():
    """The lowest bits of the hash of a row are its home there: rows of one home would be searched one by one."""
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100_000)
    for bloom in (SMALL, Bloom(10**8, 0.01)):
        assert (bucket_of(block_of(ids, bloom.geometry)) == bucket_of(ids)).all()
    blocks = np.unique(block_of(ids, Bloom(10**7, 0.01).geometry))
    homes = mix64(blocks.view(np.uint64)) & np.uint64((1 << 19) - 1)
    assert len(np.unique(homes)) == len(blocks) > 50_000


def cells_by_the_format(id_, blocks, hashes):
    """Return the hash of the row of an id, and its cells, as docs/format.md has them."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    h, s = mix(id_ % 2**64), 0x9E3779B97F4A7C15
    g, cells = mix((h + s + s) % 2**64), []
    for i in range(hashes):
        if i == 8:
            g = mix((g + s) % 2**64)
        cells.append(g >> 8 * (i % 8) & 255)
    bucket, number = h >> 48, ((h % 2**48) * blocks) >> 48
    return (bucket << 48) + (number << 16) + bucket, sorted({*cells}), mix


@pytest.mark.parametrize("bloom", [SMALL, Bloom(10**8, 0.001)], ids=str)
def test_a_filter_counts_where_the_format_says(bloom):
    for id_ in (0, 7, -1, -(2**63), 2**63 - 1):
        table = HashTable(1, name="t", admit=MinCount(9, bloom))
        table(ids_of(id_, id_, id_))
        row, cells, mix = cells_by_the_format(id_, *bloom.geometry)
        assert mix(table.candidates.ids().item() % 2**64) == row
        (counts,) = table.candidates.embeddings().tolist()
        assert [cell for cell, count in enumerate(counts) if count] == cells
        assert {*counts} == {0, 3}


def batch(step):
    return torch.from_numpy(np.random.default_rng(step).integers(0, 12, 10))


def run(where, policy, steps, **options):
    model = Model(policy, track=("count", "step"))
    saver = Saver(model, SparseAdam(filter_out_sparse_param(model)), str(where), max_keep=3, **options)
    manager = CheckpointManager(saver, 1)
    manager.restore()
    while manager.global_step < steps:
        model.table(batch(manager.global_step)).square().sum().backward()
        saver.sparse_optim.step()
        saver.sparse_optim.zero_grad()
        manager.step()
    return model.table


@mostly_slow()
@pytest.mark.parametrize(
    ("policy", "deltas"),
    [(MinCount(4), False), (MinCount(4), True), (MinCount(4, SMALL), True), (Probability(0.1), False)],
    ids=["exact", "exact-deltas", "bloom-deltas", "probability"],
)
def test_a_run_that_resumes_at_each_step_admits_what_one_that_never_stopped_does(tmp_path, policy, deltas):
    straight = run(tmp_path / "straight", policy, 6)
    for steps in range(1, 7):
        resumed = run(tmp_path / "resumed", policy, steps, deltas=deltas)
    assert rows_of(resumed) == rows_of(straight)
    assert 0 < len(straight) < 12
    if straight.candidates is not None:
        assert rows_of(resumed.candidates) == rows_of(straight.candidates)


@pytest.mark.parametrize(
    ("policy", "name"),
    [(MinCount(2, Bloom(10**8, 0.001)), "user.candidates_99x9"), (MinCount(2), "user.candidates"), (None, None)],
)
def test_counts_of_another_filter_or_of_none_are_no_counts_of_this_one(tmp_path, policy, name):
    first = run(tmp_path, MinCount(2, SMALL), 1)
    with pytest.raises(StateMismatchError) as caught:
        run(tmp_path, policy, 1)
    assert caught.value.missing == ([name] if name else [])
    assert caught.value.unexpected == [first.candidates.name] == ["user.candidates_1x1"]
    model = Model(policy, track=("count", "step"))
    saver = Saver(model, SparseAdam(filter_out_sparse_param(model)), str(tmp_path))
    CheckpointManager(saver, 1).restore(load_conf={"strict": False})
    assert rows_of(model.table) == rows_of(first)
    assert model.table.candidates is None or len(model.table.candidates) == 0


def test_an_id_that_is_inserted_waits_no_longer():
    table = HashTable(1, name="t", track="count", admit=MinCount(3))
    table(ids_of(1, 1, 2))
    table.insert(ids_of(1), torch.ones(1, 1))
    assert waiting(table) == {2: 1}
    table.erase(ids_of(1))
    table(ids_of(1))
    assert waiting(table) == {1: 1, 2: 1}


@pytest.mark.parametrize("keys", [["table.user"], ["table.user.candidates"]])
def test_half_of_a_state_dict_leaves_no_counts_of_ids_with_rows(keys):
    model, other = Model(MinCount(3)), Model(MinCount(3))
    model.table(ids_of(1, 1, 1, 2, 3))
    other.table(ids_of(2, 2, 2, 1, 4))
    state = model.state_dict()
    other.load_state_dict({key: state[key] for key in keys}, strict=False)
    assert waiting(other.table) == ({4: 1} if keys == ["table.user"] else {3: 1})


@pytest.mark.parametrize(
    ("load", "rows", "counts"),
    [
        ({"load": ["user"]}, {1}, {4: 1}),
        ({"load": ["user"], "hashtable_clear": False}, {1, 2}, {4: 1}),
        ({"load": ["user.candidates"]}, {2}, {3: 1}),
        ({"load": ["sparse"]}, {1}, {2: 1, 3: 1}),
        ({"load": ["sparse"], "hashtable_clear": False}, {1, 2}, {3: 1, 4: 1}),
    ],
)
def test_a_load_leaves_no_counts_of_ids_with_rows(tmp_path, load, rows, counts):
    model, other = Model(MinCount(3)), Model(MinCount(3))
    model.table(ids_of(1, 1, 1, 2, 3))
    other.table(ids_of(2, 2, 2, 1, 4))
    Saver(model, None, str(tmp_path / "run")).save("ckpt")
    Saver(other, None, str(tmp_path / "other")).load(tmp_path / "run" / "ckpt", load_conf=load)
    assert set(other.table.ids().tolist()) == rows
    assert waiting(other.table) == counts
