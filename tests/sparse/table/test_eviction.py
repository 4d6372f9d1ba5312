"""What a table keeps of its training look-ups, and which rows it lets go by that, held against a dict."""

import copy
import logging
import math
import time

import numpy as np
import polars
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.sources import read_column
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.format.buckets import mix64
from recckpt.policies.evict import Capacity, LowCount, SmallNorm, Unseen, UnseenFor
from recckpt.sparse import HashTable, Normal, ShardedHashTable, SparseAdam
from recckpt.sparse.optim import SparseSGD
from recckpt.sparse.table import eviction as eviction_module
from recckpt.sparse.table.eviction import Plan
from recckpt.sparse.table.nn_module import Sharing

ALL = ("count", "step", "time")
TRACK = ("count", "step", "time")
DAY = 86_400


def counters(table):
    """Return id -> (count, last step, last time)."""
    columns = [table.ids(), *(table.slots[name] for name in ("count", "last_step", "last_time"))]
    return {row[0]: row[1:] for row in zip(*(column.tolist() for column in columns), strict=True)}


def at(table, step, event_time):
    table.step, table.event_time = step, event_time


class Tracked(torch.nn.Module):
    def __init__(self, track=ALL, name="user"):
        super().__init__()
        self.table = HashTable(2, name=name, track=track)


def test_a_training_look_up_counts_and_dates_every_occurrence_and_nothing_else_does():
    table = HashTable(2, name="t", track=ALL)
    at(table, 3, 1.5)
    table(torch.tensor([[7, 8], [7, 7]]))
    assert counters(table) == {7: (3, 3, 1.5), 8: (1, 3, 1.5)}
    at(table, 4, 2.5)
    table(torch.tensor([8]))
    with torch.no_grad():
        table(torch.tensor([9]))
    assert counters(table) == (before := {7: (3, 3, 1.5), 8: (2, 4, 2.5), 9: (1, 4, 2.5)})
    at(table, 5, 9.5)
    table.lookup(torch.tensor([7, 10]))
    table.eval()(torch.tensor([7, 10]))
    table.train().insert(torch.tensor([7]), torch.ones(1, 2))
    assert counters(table) == before


def test_a_row_that_is_inserted_is_as_old_as_its_insertion_and_one_that_comes_back_starts_anew():
    table = HashTable(2, name="t", track=ALL)
    at(table, 5, 9.5)
    table.insert(torch.tensor([7]), torch.ones(1, 2))
    assert counters(table) == {7: (0, 5, 9.5)}, "never looked up"
    given = HashTable.from_embedding(torch.nn.Embedding(2, 2), name="t", track=("count",))
    assert given.slots["count"].tolist() == [0, 0]
    table(torch.tensor([7, 7, 8]))
    table.erase(torch.tensor([7]))
    table(torch.tensor([7]))
    assert counters(table) == {8: (1, 5, 9.5), 7: (1, 5, 9.5)}


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
        read_column(snapshot, column, np.arange(snapshot.n_rows), target, is_last=column == len(targets))
    names = [spec.name for spec in snapshot.slots]
    return dict(zip(ids.tolist(), targets[names.index("count")].view(np.int64).tolist(), strict=True))


def train_for(manager, model, n_steps, ids=lambda step: torch.arange(step, step + 4)):
    optim = manager.saver.sparse_optim
    for _ in range(n_steps):
        optim.zero_grad()
        model.table(ids(manager.global_step)).square().sum().backward()
        optim.step()
        manager.step(event_time=100.0 + manager.global_step)


@mostly_slow()
@pytest.mark.parametrize("deltas", [False, True])
def test_a_resumed_run_has_the_counters_of_one_that_never_stopped(tmp_path, deltas):
    straight = Tracked()
    manager = CheckpointManager(Saver(straight, SparseAdam([straight.table]), str(tmp_path / "a")), 100)
    at(straight.table, 0, 99.0)
    train_for(manager, straight, 6)
    for stop in (1, 3, 5):
        where = str(tmp_path / f"b{stop}")
        for n_steps in (stop, 6 - stop):
            model = Tracked()
            saver = Saver(model, SparseAdam([model.table]), where, deltas=deltas)
            manager = CheckpointManager(saver, 1)
            if not manager.restore():
                at(model.table, 0, 99.0)
            train_for(manager, model, n_steps)
        assert counters(model.table) == counters(straight.table)
        assert model.table.now == straight.table.now == (6, 105.0)


def test_counters_are_saved_shown_filtered_and_loaded(tmp_path):
    model = Tracked()
    at(model.table, 2, 7.0)
    model.table(torch.tensor([1, 2, 2, 3, 3, 3]))
    Saver(model, None, str(tmp_path)).save("c")
    with CheckpointReader(tmp_path / "c") as reader:
        frame = polars.from_arrow(reader.table("user"))
        assert set(reader.schema("user").names) == {"id", "embedding", "count", "last_step", "last_time"}
    assert dict(zip(frame["id"], frame["count"], strict=True)) == {1: 1, 2: 2, 3: 3}
    other = Tracked()
    conf = {"where": {"count": {"min": 2}}}
    Saver(other, None, str(tmp_path / "other")).load_by_config([{"path": str(tmp_path), **conf}])
    assert counters(other.table) == {2: (2, 2, 7.0), 3: (3, 2, 7.0)}


def test_a_sharded_table_alone_counts_as_a_plain_one():
    plain, sharded = (make(2, name="t", track=ALL) for make in (HashTable, ShardedHashTable))
    for table in (plain, sharded):
        at(table, 1, 2.0)
        table(torch.tensor([5, 5, 6]))
    assert counters(plain) == counters(sharded)


def table_of(n=0, **options) -> HashTable:
    table = HashTable(2, name="t", initializer=Normal(), track=TRACK, **options)
    if n:
        table(torch.arange(n))
    return table


def ids_of(table) -> list[int]:
    return sorted(table.ids().tolist())


class Model:
    """What a table with ``Unseen``, ``LowCount & Unseen`` and ``Capacity`` does, in plain Python, an id at a time."""

    def __init__(self, every, capacity):
        self.rows, self.every, self.capacity = {}, every, capacity
        self.n_parts = min(every, max(1, capacity.n // eviction_module.MIN_PART_ROWS))

    def evict(self, step):
        self.room = self.capacity.n - int(self.capacity.n * self.capacity.room)
        if len(self.rows) > (self.capacity.n + self.room) / 2:
            self._evict_part(step, 0, 65536)
        elif step * self.n_parts // self.every != (step - 1) * self.n_parts // self.every:
            first = step * self.n_parts // self.every
            taken = (len(self.rows) - self.room) / (self.capacity.n - self.room)
            pace = 4 if taken > 7 / 16 else 2 if taken > 6 / 16 else 1
            for part in dict.fromkeys((first + n * self.n_parts // pace) % self.n_parts for n in range(pace)):
                self._evict_part(step, part * 65536 // self.n_parts, (part + 1) * 65536 // self.n_parts)

    def _evict_part(self, step, begin, end):
        ends = mix64(np.array(list(self.rows), np.int64).view(np.uint64)) & np.uint64(65535)
        part = [id_ for id_, at in zip(self.rows, ends.tolist(), strict=True) if begin <= at < end]
        for id_ in part:
            row = self.rows[id_]
            if row["last_step"] < step - 30 or (row["count"] < 2 and row["last_step"] < step - 3):
                del self.rows[id_]
        part = sorted((self.rows[id_]["last_step"], id_) for id_ in part if id_ in self.rows)
        n = min(len(self.rows) - self.room, len(part) - math.ceil(self.room * (end - begin) / 65536))
        for _, id_ in part[: max(0, n)]:
            del self.rows[id_]

    def look_up(self, step, ids):
        for id_ in ids:
            row = self.rows.setdefault(id_, {"count": 0, "value": 0.0})
            row["count"], row["last_step"] = row["count"] + 1, step
        for id_ in {*ids}:
            self.rows[id_]["value"] += ids.count(id_)


def policies(n):
    return [Unseen(steps=30), LowCount(2) & Unseen(steps=3), Capacity(n, room=0.2)]


def train(table, optim, step, ids):
    table.step = step
    table(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    optim.step()


def rows_of(table) -> dict:
    slots = {name: values.tolist() for name, values in table.slots.items()}
    values = table.embeddings()[:, 0].tolist()
    return {
        id_: {"count": slots["count"][at], "last_step": slots["last_step"][at], "value": -values[at]}
        for at, id_ in enumerate(table.ids().tolist())
    }


@drawn(st.integers(0, 2**32), st.integers(1, 40), st.integers(20, 120), few=3, many=300)
def test_a_table_in_training_evicts_what_a_dict_would(seed, every, n):
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction_module, "MIN_PART_ROWS", 8)
        table = HashTable(
            1, name="t", initializer=lambda v: v.zero_(), track=TRACK, evict=policies(n), evict_every=every
        )
        optim, model = SparseSGD([table], lr=1.0), Model(every, Capacity(n, room=0.2))
        for step in range(60):
            ids = (rng.integers(0, 15, rng.integers(0, 12)) ** 2 + step).tolist()
            model.evict(step)
            model.look_up(step, ids)
            train(table, optim, step, ids)
            assert ids_of(table) == sorted(model.rows)
        assert rows_of(table) == model.rows
        assert table.n_evicted > 0


@drawn(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 39), few=4, many=60)
def test_a_copy_that_goes_on_from_any_step_evicts_the_same_rows(seed, every, at):
    rng = np.random.default_rng(seed)
    batches = [(rng.integers(0, 15, 10) ** 2 + step).tolist() for step in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction_module, "MIN_PART_ROWS", 8)
        table = table_of(evict=policies(60), evict_every=every)
        optim = SparseSGD([table], lr=0.1)
        for step, ids in enumerate(batches):
            if step == at:
                resumed = table_of(evict=policies(60), evict_every=every)
                resumed.load_state_dict({"t": table})
                resumed_optim = SparseSGD([resumed], lr=0.1)
            for one, its_optim in [(table, optim)] if step < at else [(table, optim), (resumed, resumed_optim)]:
                train(one, its_optim, step, ids)
        assert rows_of(resumed) == rows_of(table)


def test_each_policy_by_hand_drops_what_it_says_and_returns_how_many():
    table = table_of(10)
    table.step, table.event_time = 5, 10.0 * DAY
    table(torch.arange(5))
    table.step, table.event_time = 8, 20.0 * DAY
    assert table.evict(Unseen(steps=3)) == 5
    assert ids_of(table) == [0, 1, 2, 3, 4]
    table(torch.tensor([0, 0, 0, 7]))
    assert table.evict(UnseenFor(days=9.5)) == 4
    assert table.evict(LowCount(2)) == 1
    assert ids_of(table) == [0]
    table.insert(torch.tensor([1, 2]), torch.tensor([[1e-3, 0], [1, 1]]))
    assert table.evict(SmallNorm(0.1), LowCount(1)) == 2
    assert table.n_evicted == 12


@pytest.mark.parametrize(("by", "left"), [("last_step", [1, 2, 8, 9]), ("count", [0, 1, 8, 9])])
def test_a_capacity_by_hand_leaves_so_many_rows_and_of_equal_ones_the_highest_ids(by, left):
    table = table_of(10)
    table(torch.tensor([0, 0, 0, 1]))
    table.step = 3
    table(torch.tensor([1, 2]))
    table.evict(Capacity(6, by=by))
    table.erase(torch.tensor([6, 7]) if by == "last_step" else torch.tensor([2, 7]))
    assert ids_of(table) == left


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_the_norm_is_that_of_torch(dtype):
    table = HashTable((2, 3), name="t", dtype=dtype)
    values = (torch.randn(100, 2, 3, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    table.insert(torch.arange(100), values)
    expected = values.double().flatten(1).norm(dim=1) < 5
    assert 10 < table.evict(SmallNorm(5)) == int(expected.sum()) < 90


BY_POLICY = {
    "unseen": Unseen(steps=1),
    "unseen for": UnseenFor(days=3),
    "low count": LowCount(2) & Unseen(steps=1),
    "small norm": SmallNorm(0.8),
    "several": [LowCount(2) & Unseen(steps=2), SmallNorm(0.5)],
    "capacity": Capacity(40, room=0.3),
    "capacity by count": [Unseen(steps=4), Capacity(40, by="count")],
}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("policy", BY_POLICY.values(), ids=BY_POLICY)
def test_who_asks_is_told_the_ids_that_go_once_they_have(policy, by_hand):
    told, found = [], []

    def tell(name, ids):
        assert (name, ids.dtype) == ("t", torch.int64)
        told.extend(ids.tolist())
        found.extend(table.lookup(ids)[1].tolist())

    options = {} if by_hand else {"evict": policy, "evict_every": 2}
    table = copy.deepcopy(table_of(on_evict=tell, **options))  # a copy tells, too
    n_told = 0
    for step in range(12):
        at(table, step, step * DAY)
        before, ids = {*ids_of(table)}, torch.arange(10) ** 2 + 3 * step
        if by_hand:
            assert table.evict(*np.atleast_1d(policy)) == len(told)
            assert {*ids_of(table)} == before - {*told}
        table(ids)
        assert {*told} <= before
        assert {*ids_of(table)} == (before - {*told}) | {*ids.tolist()}
        n_told += len(told)
        told.clear()
    assert n_told == table.n_evicted > 0
    assert not any(found)


def test_what_a_callback_of_evicted_ids_raises_is_logged_and_training_goes_on(caplog):
    def fail(name, ids):
        raise ZeroDivisionError("of the user")

    table = table_of(10, evict=Unseen(steps=2), evict_every=1, on_evict=fail)
    for step in range(1, 6):
        table.step = step
        table(torch.arange(5))
    assert ids_of(table) == [0, 1, 2, 3, 4]
    assert table.n_evicted == 5
    [record] = caplog.records
    assert record.getMessage().startswith("table 't': evicted 5 rows, but on_evict=<function ")
    assert record.exc_info[0] is ZeroDivisionError
    with pytest.raises(TypeError, match="table 't': on_evict must be a function of a name and ids, found 3"):
        table_of(on_evict=3)


def test_rows_that_are_erased_by_hand_are_not_said_to_be_evicted():
    told = []
    table = table_of(10, on_evict=lambda name, ids: told.append(ids))
    table.erase(torch.arange(3))
    table.clear()
    assert table.evict(LowCount(2)) == 0
    assert told == []


def test_an_id_that_comes_back_starts_anew():
    table = table_of(3, evict=LowCount(2), evict_every=1)
    first = table.embeddings()
    table.add_slot("mark", (), initial=7)
    table.insert(torch.arange(3), torch.full((3, 2), 9.0), {"mark": torch.zeros(3)})
    table.step = 1
    table(torch.arange(3))
    assert torch.equal(table.embeddings(), first)
    assert table.slots["mark"].tolist() == [7, 7, 7]
    assert table.slots["count"].tolist() == [1, 1, 1]


def test_in_as_many_steps_as_evict_every_says_all_rows_are_looked_at_a_part_at_each_step():
    table = table_of(3000, evict=LowCount(2), evict_every=30)
    left = [len(table)]
    for step in range(1, 31):
        table.step = step
        table(torch.tensor([-1]))
        left.append(len(table) - 1)
    assert left[-1] == 0
    gone = -np.diff(left)
    assert gone.min() > 50
    assert gone.max() < 160
    table = table_of(1000, evict=Unseen(steps=5), evict_every=100)
    for step in range(0, 130, 10):
        table.step = step
        table(torch.tensor([-1]))
    assert ids_of(table) == [-1], "steps that are not counted one by one leave nothing out"


@pytest.mark.parametrize(("every", "n"), [(1, 0), (7, 0), (20_000, 0), (1000, 50_000), (10, 10)])
def test_the_parts_of_as_many_steps_hold_every_id_once(every, n):
    plan = Plan((Unseen(steps=1),), Capacity(n) if n else None, every)
    parts = [part for step in range(every) for part in plan.due(None, step)]
    assert sorted(parts) == sorted({*parts})
    assert sum(end - begin for begin, end in parts) == 65536
    twice = {part for step in range(-(-every // 2)) for part in plan.due(None, step, pace=2)}
    assert twice == {*parts}
    assert sorted(plan.due(3, 3 + 2 * every)) == sorted(parts)


def test_a_table_with_a_capacity_stays_below_it_though_all_ids_are_new(caplog):
    table = table_of(evict=Capacity(5000, room=0.2), evict_every=20)
    for step in range(200):
        table.step = step
        table(torch.arange(step * 30, step * 30 + 30))
        assert len(table) <= 5000
    assert len(table) > 4000
    assert len({*range(200 * 30 - 3000, 200 * 30)} - {*ids_of(table)}) < 50, "those seen last stay"
    assert not caplog.records


def test_where_more_rows_come_than_go_part_by_part_a_step_looks_at_all_and_says_so_once(caplog):
    table = table_of(evict=Capacity(1000), evict_every=10_000)
    for step in range(100):
        table.step = step
        table(torch.arange(step * 40, step * 40 + 40))
        assert len(table) <= 1000
    [record] = caplog.records
    assert "960 rows at step 24" in record.message
    assert "set evict_every to less than 10000" in record.message


def test_a_look_up_of_more_ids_than_a_capacity_is_refused_before_a_row_is_added():
    table = table_of(evict=Capacity(10), evict_every=1)
    table(torch.zeros(100, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'t': found a look-up of 11 distinct ids, expected .* Capacity\(n=10"):
        table(torch.arange(11))
    assert ids_of(table) == [0]
    assert len(table.eval()(torch.arange(11))) == 11


def test_nothing_is_evicted_in_eval_mode_and_all_of_the_step_once_by_the_first_look_up_in_training():
    table = table_of(5, evict=LowCount(2), evict_every=1)
    table.step = 1
    table.eval()(torch.arange(5))
    assert len(table) == 5
    table.train()(torch.arange(2))
    table(torch.arange(2, 4))
    assert ids_of(table) == [0, 1, 2, 3]


def test_the_row_of_padding_stays():
    module = torch.nn.Embedding(5, 2, padding_idx=3)
    table = HashTable.from_embedding(module, name="t", track=TRACK, evict=LowCount(2), evict_every=1)
    table.step = 1
    table(torch.tensor([7]))
    assert ids_of(table) == [3, 7]
    assert table.evict(Capacity(1)) == 1
    assert ids_of(table) == [3]


@pytest.mark.parametrize("drop", [lambda table: table.evict(LowCount(3)), lambda table: table.erase(torch.arange(3))])
def test_gradients_of_a_row_that_is_dropped_are_not_those_of_an_id_that_comes_back(drop):
    table = table_of(4)
    optim = SparseSGD([table], lr=1.0)
    table(torch.tensor([3]))
    table(torch.arange(4)).sum().backward()  # of a step whose gradients are accumulated
    expected = table.lookup(torch.arange(4))[0]
    assert drop(table) == 3
    table(torch.arange(2)).sum().backward()
    assert len(table.grad) == 3
    optim.step()
    expected[[0, 1, 3]] -= 1
    assert torch.equal(table.lookup(torch.tensor([0, 1, 3]))[0], expected[[0, 1, 3]])


def test_a_table_that_never_hears_of_a_step_says_that_it_evicts_nothing(caplog, monkeypatch):
    monkeypatch.setattr(eviction_module, "_PATIENCE", 5)
    table = table_of(evict=LowCount(2), evict_every=10)
    for _ in range(20):
        table(torch.arange(3))
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "table 't': still at step 0 after 5 training look-ups" in record.message


class OneOfFour(Sharing):
    n_ranks = 4


@pytest.mark.parametrize(
    ("sharing", "first", "found"), [(Sharing, 11, "110 rows"), (OneOfFour, 3, "30 rows on one of 4 ranks")]
)
def test_a_table_with_a_capacity_says_once_that_it_grows_past_it_where_no_step_is_counted(
    caplog, sharing, first, found
):
    table = table_of(evict=Capacity(100), evict_every=1)
    table.sharing = sharing()
    for number in range(25):
        table(torch.arange(number * 10, number * 10 + 10))
        assert bool(caplog.records) == (number >= first), "at the first look-up of a table that has grown past it"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"table 't': found {found}, more than the limit Capacity(n=100" in record.message
    assert "while step 0 goes on" in record.message
    table.step = 1
    table(torch.tensor([1]))
    assert len(table) <= 100


def test_a_part_that_takes_longer_than_the_budget_is_evicted_all_the_same_and_says_what_to_do(caplog):
    table = table_of(2000, evict=LowCount(2), evict_every=1, budget_ms=1e-6)
    for step in range(1, 4):
        table.step = step
        table(torch.arange(1))
    assert ids_of(table) == [0]
    assert sum("expected budget_ms=1e-06: evict_every=" in record.message for record in caplog.records) == 1


def test_a_copy_evicts_as_the_table_does_and_a_restored_table_begins_again():
    table = table_of(100, evict=LowCount(2), evict_every=1)
    twin = copy.deepcopy(table)
    assert twin.evicts == table.evicts == (LowCount(2),)
    saved = copy.deepcopy(table)
    twin.step = 1
    twin(torch.tensor([5]))
    assert ids_of(twin) == [5]
    twin.load_state_dict({"t": saved})
    twin(torch.tensor([5]))  # of the same step
    assert ids_of(twin) == [5]


class OfTheirOwn:
    needs = ("price", "last_step")

    def __init__(self, make=lambda mask: mask):
        self.make = make

    def evicted(self, rows, now):
        return self.make((rows["price"] > 2) & (rows["last_step"] <= now.step))


def test_a_policy_of_the_users_own_looks_at_any_slot():
    table = table_of(4)
    table.add_slot("price", (), initial=1)
    table.insert(torch.arange(2), torch.zeros(2, 2), {"price": torch.tensor([3.0, 2.0])})
    for make in (lambda mask: mask[:1], lambda mask: mask.astype(int), lambda mask: None):
        with pytest.raises(ValueError, match=r"found a mask of .*, expected bool \(4,\)"):
            table.evict(OfTheirOwn(make))
    assert table.evict(OfTheirOwn()) == 1
    assert ids_of(table) == [1, 2, 3]


@pytest.mark.parametrize(
    ("policy", "track", "remedy"),
    [
        (Unseen(steps=5), (), r"needs \['last_step'\], .* add track=\('step',\)"),
        (UnseenFor(days=5), ("step",), r"add track=\('time',\)"),
        (LowCount(5) & Unseen(steps=3), ("time",), r"add track=\('count', 'step'\)"),
        (Capacity(5), "count", r"add track=\('step',\)"),
        (OfTheirOwn(), "step", r"needs \['price'\], .* declare it with add_slot"),
    ],
)
def test_policies_by_what_is_not_tracked_are_refused(policy, track, remedy):
    with pytest.raises(ValueError, match=f"table 't': .* {remedy}"):
        HashTable(2, name="t", track=track, evict=[SmallNorm(1), policy], evict_every=10)
    with pytest.raises(ValueError, match=f"table 't': .* {remedy}"):
        HashTable(2, name="t", track=track).evict(policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evict": [3], "evict_every": 1}, r"expected policies of recckpt.policies.evict, found \[3\]"),
        ({"evict": "LowCount", "evict_every": 1}, r"expected policies .* found \['LowCount'\]"),
        ({"evict": LowCount, "evict_every": 1}, "expected policies"),
        ({"evict": LowCount(2)}, "no evict_every: pass the number of steps"),
        ({"evict_every": 10}, "evict has no policy that uses it"),
        ({"budget_ms": 10}, "evict has no policy that uses it"),
        ({"evict": LowCount(2), "evict_every": 0}, "evict_every must be an int of at least 1, found 0"),
        ({"evict": LowCount(2), "evict_every": 1.5}, "evict_every must be an int"),
        ({"evict": LowCount(2), "evict_every": True}, "evict_every must be an int"),
        ({"evict": LowCount(2), "evict_every": 10**30}, "evict_every must be at most 9007199254740992, found 10000"),
        ({"evict": LowCount(2), "evict_every": 1, "budget_ms": math.nan}, "budget_ms must be a finite number above 0"),
        ({"evict": LowCount(2), "evict_every": 1, "budget_ms": -1}, "budget_ms must be a finite number above 0"),
        ({"evict": [Capacity(1), Capacity(2)], "evict_every": 1}, "expected one capacity"),
    ],
)
def test_what_a_table_cannot_evict_by_is_refused_where_it_is_made(options, message):
    with pytest.raises(ValueError, match=f"table 't': .*{message}"):
        table_of(**options)
    with pytest.raises(ValueError, match="found none"):
        table_of(3).evict()


def test_a_pass_that_evicts_more_than_half_of_a_table_says_so_once_with_what_it_goes_by(caplog):
    table = table_of(200, evict=Unseen(steps=5), evict_every=2)
    for step in range(1, 20):
        table.step = step
        table(torch.arange(100))
    assert len(table) == 100
    assert caplog.records == [], "half of it stays"
    table = table_of(evict=UnseenFor(days=30), evict_every=4)
    table.step, table.event_time = 1, 100.0 * DAY
    table(torch.arange(200))
    for step in range(4, 12):
        table.step, table.event_time = step, 200.0 * DAY  # of a bad record
        table(torch.tensor([1000]))
    assert ids_of(table) == [1000]
    [message] = [record.message for record in caplog.records]
    assert "of the 200 rows that were there at step 4, by UnseenFor(days=30); now is step" in message
    assert "set it back by manager.event_time or table.step" in message
