"""What a table keeps of its training look-ups: how often, at which step, and when each id was asked for."""

import copy
import time

import numpy as np
import polars
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.sparse import HashTable, ShardedHashTable, SparseAdam

ALL = ("count", "step", "time")


def counters(table):
    """Return id -> (count, last step, last time)."""
    columns = [table.ids(), *(table.slots[name] for name in ("count", "last_step", "last_time"))]
    return {row[0]: row[1:] for row in zip(*(column.tolist() for column in columns), strict=True)}


def at(table, step, event_time):
    table.step, table.event_time = step, event_time


class Model(torch.nn.Module):
    def __init__(self, track=ALL, name="user"):
        super().__init__()
        self.table = HashTable(2, name=name, track=track)


def test_a_training_look_up_counts_and_dates_every_occurrence():
    table = HashTable(2, name="t", track=ALL)
    at(table, 3, 1.5)
    table(torch.tensor([[7, 8], [7, 7]]))
    assert counters(table) == {7: (3, 3, 1.5), 8: (1, 3, 1.5)}
    at(table, 4, 2.5)
    table(torch.tensor([8]))
    with torch.no_grad():
        table(torch.tensor([9]))
    assert counters(table) == {7: (3, 3, 1.5), 8: (2, 4, 2.5), 9: (1, 4, 2.5)}


def test_nothing_else_counts():
    table = HashTable(2, name="t", track=ALL)
    at(table, 3, 1.5)
    table(torch.tensor([7]))
    before = counters(table)
    at(table, 5, 9.5)
    table.lookup(torch.tensor([7, 8]))
    table.eval()(torch.tensor([7, 8]))
    table.train().insert(torch.tensor([7]), torch.ones(1, 2))
    assert counters(table) == before


def test_a_row_that_is_inserted_was_never_looked_up_and_is_as_old_as_its_insertion():
    table = HashTable(2, name="t", track=ALL)
    at(table, 5, 9.5)
    table.insert(torch.tensor([7]), torch.ones(1, 2))
    assert counters(table) == {7: (0, 5, 9.5)}
    given = HashTable.from_embedding(torch.nn.Embedding(2, 2), name="t", track=("count",))
    assert given.slots["count"].tolist() == [0, 0]


def test_without_an_event_time_the_clock_counts():
    table = HashTable(2, name="t", track="time")
    before = time.time()
    table(torch.tensor([7]))
    assert before <= table.slots["last_time"].item() <= time.time()
    assert list(table.slots) == ["last_time"]
    assert before <= table.now.time <= time.time()
    assert table.now.step == 0


def test_bags_count_their_ids_and_a_padding_id_is_none():
    table = HashTable(2, name="t", track=ALL)
    at(table, 1, 1.0)
    table.bag(torch.tensor([[7, 8, 0], [7, 0, 0]]), padding_id=0)
    assert counters(table) == {7: (2, 1, 1.0), 8: (1, 1, 1.0)}


def test_an_id_that_comes_back_after_it_was_erased_starts_anew():
    table = HashTable(2, name="t", track=ALL)
    at(table, 1, 1.0)
    table(torch.tensor([7, 7, 8]))
    table.erase(torch.tensor([7]))
    table(torch.tensor([7]))
    assert counters(table) == {8: (1, 1, 1.0), 7: (1, 1, 1.0)}


def test_copies_take_the_counters_and_the_moment_along():
    table = HashTable(2, name="t", track=ALL)
    at(table, 3, 1.5)
    table(torch.tensor([7, 7]))
    twin = copy.deepcopy(table)
    assert twin.now == (3, 1.5)
    loaded = HashTable(2, name="t", track=ALL)
    loaded.load_state_dict(table.state_dict())
    table(torch.tensor([7]))
    assert counters(twin) == counters(loaded) == {7: (2, 3, 1.5)}
    twin(torch.tensor([7]))
    assert counters(twin) == counters(table)


def test_on_another_device_they_are_the_same():
    """As the door has it where the slots are not on the CPU, which they are here."""
    table = HashTable(2, name="t", track=ALL)
    table.store.rows.device = torch.device("cuda")
    at(table, 3, 1_700_000_000.25)
    table(torch.tensor([7, 8, 7, 7]))
    at(table, 1 << 40, 1_700_000_001.25)
    table(torch.tensor([9, 8]))
    assert counters(table) == {
        7: (3, 3, 1_700_000_000.25),
        8: (2, 1 << 40, 1_700_000_001.25),
        9: (1, 1 << 40, 1_700_000_001.25),
    }


def test_what_is_not_tracked_is_refused():
    for wrong in ("counts", ("count", "count"), ("count", 3), ["last_step"]):
        with pytest.raises(ValueError, match="expected some of"):
            HashTable(2, name="t", track=wrong)
    table = HashTable(2, name="t", track=ALL)
    for wrong in (-1, 1.5, "3", None, True):
        with pytest.raises(ValueError, match="step must be an int"):
            table.step = wrong
    for wrong in (float("nan"), float("-inf"), "now", True, 10**400, 1_700_000_000_000):
        with pytest.raises(ValueError, match="seconds since 1970"):
            table.event_time = wrong
    with pytest.raises(ValueError, match="cannot also be float32"):
        table.add_slot("count", ())


BATCHES = st.lists(
    st.tuples(st.lists(st.integers(-3, 3), max_size=8), st.integers(0, 5), st.booleans(), st.booleans()), max_size=6
)


@drawn(BATCHES, few=15, many=500)
def test_the_counters_are_those_of_a_dict(batches):
    table, expected = HashTable(2, name="t", track=ALL), {}
    snapshots = []
    for ids, step, erases, snaps in batches:
        at(table, step, step / 2)
        if snaps:
            snapshots.append((table.store.snapshot("t"), dict(expected)))
        table(torch.tensor(ids, dtype=torch.int64))
        for id_ in ids:
            expected[id_] = (expected.get(id_, (0,))[0] + 1, step, step / 2)
        if erases:
            table.erase(torch.tensor(ids[:2], dtype=torch.int64))
            for id_ in ids[:2]:
                expected.pop(id_, None)
    assert counters(table) == expected
    for snapshot, then in snapshots:
        assert counts_in(snapshot) == {id_: found[0] for id_, found in then.items()}


def counts_in(snapshot):
    """Return id -> count as the snapshot has them."""
    targets = [np.empty(snapshot.n_rows * spec.row_bytes, np.uint8) for spec in snapshot.slots]
    ids = np.empty(snapshot.n_rows, np.int64)
    for column, target in enumerate((ids.view(np.uint8), *targets)):
        snapshot.read(column, np.arange(snapshot.n_rows), target, is_last=column == len(targets))
    names = [spec.name for spec in snapshot.slots]
    return dict(zip(ids.tolist(), targets[names.index("count")].view(np.int64).tolist(), strict=True))


def train(manager, model, n_steps, ids=lambda step: torch.arange(step, step + 4)):
    optim = manager.saver.sparse_optim
    for _ in range(n_steps):
        optim.zero_grad()
        model.table(ids(manager.global_step)).square().sum().backward()
        optim.step()
        manager.step(event_time=100.0 + manager.global_step)


@mostly_slow()
@pytest.mark.parametrize("deltas", [False, True])
def test_a_resumed_run_has_the_counters_of_one_that_never_stopped(tmp_path, deltas):
    straight = Model()
    manager = CheckpointManager(Saver(straight, SparseAdam([straight.table]), str(tmp_path / "a")), 100)
    at(straight.table, 0, 99.0)
    train(manager, straight, 6)
    for stop in (1, 3, 5):
        where = str(tmp_path / f"b{stop}")
        for n_steps in (stop, 6 - stop):
            model = Model()
            saver = Saver(model, SparseAdam([model.table]), where, deltas=deltas)
            manager = CheckpointManager(saver, 1)
            if not manager.restore():
                at(model.table, 0, 99.0)
            train(manager, model, n_steps)
        assert counters(model.table) == counters(straight.table)
        assert model.table.now == straight.table.now == (6, 105.0)


def test_counters_are_saved_shown_filtered_and_loaded(tmp_path):
    model = Model()
    at(model.table, 2, 7.0)
    model.table(torch.tensor([1, 2, 2, 3, 3, 3]))
    Saver(model, None, str(tmp_path)).save("c")
    with CheckpointReader(tmp_path / "c") as reader:
        frame = polars.from_arrow(reader.table("user"))
        assert set(reader.schema("user").names) == {"id", "embedding", "count", "last_step", "last_time"}
    assert dict(zip(frame["id"], frame["count"], strict=True)) == {1: 1, 2: 2, 3: 3}
    other = Model()
    conf = {"where": {"count": {"min": 2}}}
    Saver(other, None, str(tmp_path / "other")).load_by_config([{"path": str(tmp_path), **conf}])
    assert counters(other.table) == {2: (2, 2, 7.0), 3: (3, 2, 7.0)}


def test_a_sharded_table_alone_counts_as_a_plain_one():
    plain, sharded = (make(2, name="t", track=ALL) for make in (HashTable, ShardedHashTable))
    for table in (plain, sharded):
        at(table, 1, 2.0)
        table(torch.tensor([5, 5, 6]))
    assert counters(plain) == counters(sharded)
