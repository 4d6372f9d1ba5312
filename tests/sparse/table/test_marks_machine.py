"""Whatever happens to tables between saves, a delta on its base gives the rows of its moment, and holds no others."""

import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.sources import read_column
from support.stepped import Counting
from support.sweeps import SWEEP_STRIDE

from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.sparse import Constant, HashTable
from recckpt.sparse.files.table_rows import BucketOrder, repeated_id
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.marks import DeltaSource, Frozen, Marks
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.snapshot import PreImages
from recckpt.sparse.table.store import MarkSet, Observers
from recckpt.sparse.table.tracker import Tracker

Content = dict[int, tuple[float, ...]]  # id -> the values of its slots


@dataclass
class Shard:
    """What one rank writes of a table."""

    upserts: Content
    deletes: list[int]


class Reading:
    """A frozen table that is read as the saver does: in bucket order, in batches, while training goes on."""

    def __init__(self, frozen: Frozen, base: str | None) -> None:
        self.frozen = frozen
        self.source = frozen.snapshot if base is None else frozen.delta(base)
        self.order = BucketOrder(self.source.ids, self.source.n_rows, 10_000)
        self.shard, self._at, self._before = Shard({}, []), 0, np.empty(0, np.int64)
        self._rows = None

    def step(self, n_rows: int) -> None:
        begin, end = self._at, min(self._at + n_rows, self.source.n_rows)
        if begin == end:
            return
        if self._rows is None:
            [self._rows] = self.order.rows(0, N_BUCKETS)
        rows, ids = self._rows[begin:end], np.empty(end - begin, np.int64)
        slots = [np.empty((len(rows), spec.row_bytes // 4), np.float32) for spec in self.source.slots]
        for column, some in enumerate((ids, *slots)):
            read_column(self.source, column, rows, some.reshape(-1).view(np.uint8), is_last=column == len(slots))
        repeat, self._before = repeated_id(ids, self._before)
        assert repeat is None
        values = np.concatenate(slots, axis=1).tolist()
        self.shard.upserts |= {int(i): tuple(row) for i, row in zip(ids, values, strict=True)}
        self._at = end

    def finish(self) -> Shard:
        self.step(self.source.n_rows)
        if isinstance(self.source, DeltaSource):
            deletes = self.source.deletes()
            assert (np.diff(bucket_of(deletes).astype(np.int64)) >= 0).all()
            self.shard.deletes = deletes.tolist()
            assert len(set(self.shard.deletes)) == len(deletes)
            assert not self.shard.upserts.keys() & set(self.shard.deletes), "an id as row and as delete in one shard"
        self.source.close()
        return self.shard


def applied(base: Content, shards: list[Shard]) -> Content:
    """Read a link as the format says: a row in any shard beats a delete in any."""
    deletes = {i for shard in shards for i in shard.deletes}
    upserts = {i: row for shard in shards for i, row in shard.upserts.items()}
    return {i: row for i, row in base.items() if i not in deletes} | upserts


def is_agreed(said: list[bool]) -> bool:
    """Let all ranks write a table whole if one of them has to."""
    return any(said)


class Writer:
    """A saver on some ranks, each with its part of the table: what it stands on, and what it has under way."""

    def __init__(self, name: str, n_ranks: int) -> None:
        self.name, self.trackers = name, [Tracker() for _ in range(n_ranks)]
        self.base: str | None = None
        self.n_saves = 0
        self.changed: list[set[int]] = [set()]  # ids since the base; since the save under way; as the marks should be
        self.save: tuple[str, str | None, list[Reading], Content, set[int]] | None = None
        self.n_deltas = 0

    def stage(self, tables: list[HashTable], content: Content, base: str | None) -> None:
        frozen = [tracker.freeze(table) for tracker, table in zip(self.trackers, tables, strict=True)]
        said = [base is None or some.is_replaced(base) for some in frozen]
        agreed = is_agreed(said)
        readings = [
            Reading(some, None if agreed or is_replaced else base)
            for some, is_replaced in zip(frozen, said, strict=True)
        ]
        kept = set(self.changed[0])
        self.n_saves, self.changed = self.n_saves + 1, [self.changed[0], set()]
        self.n_deltas += not any(said)
        self.save = f"{self.name}{self.n_saves}", None if any(said) else base, readings, dict(content), kept

    def finish(self, checkpoints: dict[str, Content], outcome: str) -> None:
        save_id, base, readings, expected, changed = self.save
        self.save = None
        if outcome == "lost":  # nobody ends it
            for reading in readings:
                reading.source.close()
            return
        shards = [reading.finish() for reading in readings]
        found = applied({} if base is None else checkpoints[base], shards)
        assert found == expected
        if base is not None:
            written = {i for shard in shards for i in shard.upserts}
            assert written == changed & expected.keys(), "rows that have not changed, or twice"
        for reading in readings:
            if outcome == "committed":
                reading.frozen.committed(save_id)
            else:
                reading.frozen.failed()
        checkpoints[save_id] = expected
        if outcome == "committed":
            self.base, self.changed = save_id, self.changed[1:]
        else:
            self.changed = self.changed[:1]


some_ids = st.builds(
    lambda begin, length, stride: list(range(begin, begin + length * stride, stride)),
    st.integers(0, 60),
    st.integers(1, 25),
    st.integers(1, 4),
)


class Training(RuleBasedStateMachine):
    """A table in two halves, one a rank, its model in plain Python, and two writers whose saves take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Content = {}
        self.owner: dict[int, int] = {}  # rank of each id
        self.clock = 0.0

    @initialize(n_rows=st.integers(0, 90), n_ranks=st.integers(1, 2), n_saved=st.integers(0, 2))
    def make(self, n_rows, n_ranks, n_saved):
        self.tables = [HashTable(2, name="t", initializer=Constant(0.5)) for _ in range(n_ranks)]
        for table in self.tables:
            table.add_slot("count", ())
        self.width = 3
        self.optimizers = [Counting([table]) for table in self.tables]
        self.writers = [Writer(name, n_ranks) for name in "ab"]
        self.checkpoints: dict[str, Content] = {}
        self.insert(list(range(n_rows)), 0)
        for writer in range(n_saved):
            self.save_at_once(writer, "committed")

    def fresh(self, value: float) -> tuple[float, ...]:
        """Return a new row with this embedding."""
        return (value, value, 0.0, 3.0)[: self.width]

    def tick(self, ids) -> float:
        for writer in self.writers:
            for some in writer.changed:
                some.update(ids)
        self.clock += 1
        return self.clock

    def parts(self, ids, rank) -> list[tuple[int, list[int]]]:
        """Return the ids of each rank; new ones go to ``rank``."""
        for id_ in ids:
            self.owner.setdefault(id_, rank % len(self.tables))
        return [(r, mine) for r in range(len(self.tables)) if (mine := [i for i in ids if self.owner[i] == r])]

    @rule(ids=some_ids, rank=st.integers(0, 1))
    def insert(self, ids, rank):
        value = self.tick(ids)
        for owner, mine in self.parts(ids, rank):
            table = self.tables[owner]
            table.insert(torch.tensor(mine), torch.full((len(mine), 2), value))
            for id_ in mine:
                self.model[id_] = (value, value, *self.model.get(id_, self.fresh(0.5))[2:])

    @rule(ids=some_ids, rank=st.integers(0, 1))
    def look_up(self, ids, rank):
        """Look up, which changes only what is new."""
        self.tick([i for i in ids if i not in self.model])
        for owner, mine in self.parts(ids, rank):
            self.tables[owner](torch.tensor(mine))
            for id_ in mine:
                self.model.setdefault(id_, self.fresh(0.5))

    @rule(ids=some_ids, rank=st.integers(0, 1))
    def train(self, ids, rank):
        value = self.tick(ids)
        for owner, mine in self.parts(ids, rank):
            (self.tables[owner](torch.tensor(mine)) * value).sum().backward()
            self.optimizers[owner].step()
            for id_ in mine:
                row = self.model.get(id_, self.fresh(0.5))
                self.model[id_] = (value, value, row[2] + 1, *row[3:])

    @rule(ids=some_ids, share=st.integers(1, 9))
    def erase(self, ids, share):
        ids = [i for i in ids[: -(-len(ids) // share)] if i in self.model]
        self.tick(ids)
        for owner, mine in self.parts(ids, 0):
            assert self.tables[owner].erase(torch.tensor(mine)) == len(mine)
        for id_ in ids:
            del self.model[id_], self.owner[id_]

    @rule(what=st.sampled_from(["clear", "move", "add_slot", "load"]), rank=st.integers(0, 1), often=st.integers(0, 4))
    def something_rare(self, what, rank, often):
        if not often:
            slots_before = self.width
            getattr(self, f"_{what}")(rank % len(self.tables))
            if what != "add_slot" or self.width > slots_before:  # a slot that is there already changes no row
                self.tick(self.model.keys())

    def _clear(self, rank):
        self.tables[rank].clear()
        for id_ in [i for i, owner in self.owner.items() if owner == rank]:
            del self.model[id_], self.owner[id_]

    def _move(self, rank):
        self.tables[rank].store = self.tables[rank].store.to(self.tables[rank].device)

    def _add_slot(self, rank):
        if self.width == 3:
            for table in self.tables:
                table.add_slot("late", (), initial=3)
            self.width = 4
            self.model = {i: (*row, 3.0) for i, row in self.model.items()}

    def _load(self, rank):
        """Take over other rows, some of the same ids, in place of all."""
        other = HashTable(2, name="t")
        ids = [i for i, owner in self.owner.items() if owner == rank][::2]
        other.insert(torch.tensor(ids, dtype=torch.int64), torch.full((len(ids), 2), -self.clock))
        self._clear(rank)
        self.tables[rank].load_state_dict({"t": other})
        for id_ in ids:
            self.owner[id_], self.model[id_] = rank, self.fresh(-self.clock)

    @rule(writer=st.integers(0, 1), other=st.integers(0, 9))
    def stage(self, writer, other):
        mine = self.writers[writer]
        if mine.save is None:
            base = self.writers[1 - writer].base if other == 0 else mine.base
            mine.stage(self.tables, self.model, base)

    @rule(writer=st.integers(0, 1), n_rows=st.integers(1, 30))
    def read(self, writer, n_rows):
        if self.writers[writer].save is not None:
            for reading in self.writers[writer].save[2]:
                reading.step(n_rows)

    @rule(writer=st.integers(0, 1), outcome=st.sampled_from(["committed"] * 4 + ["failed", "ephemeral", "lost"]))
    def finish(self, writer, outcome):
        if self.writers[writer].save is not None:
            self.writers[writer].finish(self.checkpoints, outcome)

    @rule(writer=st.integers(0, 1), outcome=st.sampled_from(["committed"] * 3 + ["failed", "ephemeral"]))
    def save_at_once(self, writer, outcome):
        self.stage(writer, 1)
        self.finish(writer, outcome)

    @precondition(lambda self: self.checkpoints)
    @rule(writer=st.integers(0, 1))
    def restore(self, writer):
        """Let the tables have the rows of the newest base of a writer, which counts from it."""
        mine = self.writers[writer]
        if mine.base is None or self.width != len(next(iter(self.checkpoints[mine.base].values()), ())):
            return
        content = self.checkpoints[mine.base]
        if mine.save is not None:
            self.finish(writer, "lost")
        for table in self.tables:
            table.clear()
        self.model, self.owner = {}, {}
        for owner, ids in self.parts(list(content), 0):
            rows = torch.tensor([content[i] for i in ids])
            slots = {name: rows[:, 2 + at] for at, name in enumerate(["count", "late"][: self.width - 2])}
            self.tables[owner].insert(torch.tensor(ids), rows[:, :2], slots)
        self.model = dict(content)
        self.tick(self.model.keys())
        for tracker, table in zip(mine.trackers, self.tables, strict=True):
            tracker.begin(table, mine.base)
        mine.changed = [set()]

    def teardown(self):
        for writer in getattr(self, "writers", []):
            if writer.save is not None:
                writer.finish(self.checkpoints, "failed")
            writer.stage(self.tables, self.model, writer.base)
            writer.finish(self.checkpoints, "committed")
            SEEN["deltas"] += writer.n_deltas


SEEN: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(column_module, "_FIRST_ROWS", 8)


def run(machine, examples: int, **more) -> None:
    untimed = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40, **untimed, **more)
    )


def test_deltas_on_their_bases_are_the_rows_of_their_moment():
    SEEN.clear()
    run(Training, 20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    assert SEEN["deltas"] > 10


@pytest.mark.slow
def test_deltas_on_their_bases_are_the_rows_of_their_moment_in_many_runs(record_property):
    SEEN.clear()
    run(Training, 5000 // SWEEP_STRIDE)
    record_property("figures", {"deltas": dict(SEEN)})


def in_first_set_only(method):
    """Return a method of the store that tells the marks of a save under way nothing."""

    def forgetful(store, *args, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Marks, "sets", property(lambda marks: marks._since.sets[:1]))
            return method(store, *args, **more)

    return forgetful


def untold(method):
    """Return a method of the store that tells no marks."""

    def silent(store, *args, **more):
        marks, store._observers._marks = store._observers._marks, []
        try:
            return method(store, *args, **more)
        finally:
            store._observers._marks = marks

    return silent


class MovesNothing(MarkSet):
    def move(self, erasure):
        self.bits[erasure.holes >> 3] &= ~(1 << (erasure.holes & 7)).astype(np.uint8)


class RemembersNoIds(MarkSet):
    def erase(self, ids, rows, n_rows):
        super().erase(ids[:0], rows[:0], n_rows)


def with_second_set(kind):
    def freeze(marks, store, name, slots, **how):
        frozen = FREEZE(marks, store, name, slots, **how)
        frozen.second.__class__ = kind
        return frozen

    return freeze


def cleared_at_staging(marks, store, name, slots, **how):
    frozen = FREEZE(marks, store, name, slots, **how)
    if not marks._since.sets[0].is_replaced:
        marks._since = marks._since._replace(sets=(MarkSet(is_replaced=False), frozen.second))
    return frozen


def without_second_set(marks, frozen, base):
    END(marks, frozen, base)
    if base is not None:
        marks._since = marks._since._replace(sets=(MarkSet(is_replaced=False),))


def forgetting_erased(marks, frozen, base):
    END(marks, frozen, base)
    if base is None:
        marks._since.sets[0].erased = frozen.second.erased


def forgetting_replaced(marks, frozen, base):
    END(marks, frozen, base)
    if base is None:
        marks._since.sets[0].is_replaced = frozen.second.is_replaced


def store_taken_over(tracker, table):
    before = tracker._marks.get(table.name)
    marks = OF(tracker, table)
    if before is not None and before is not marks:
        marks.begin(before._since.base)
    return marks


def slot_added_silently(store, *args, **more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Observers, "replaced", lambda observers: None)
        ADD_COLUMN(store, *args, **more)


def deletes_beat_upserts(base, shards):
    deletes = {i for shard in shards for i in shard.deletes}
    return {i: row for i, row in APPLIED(base, shards).items() if i not in deletes}


def narrowed_to_nothing(images, bits):
    images._marks |= 255


FREEZE, END, OF, ADD_COLUMN, APPLIED = Marks.freeze, Marks.end, Tracker._of, RowStore.add_column, applied
HERE = sys.modules[__name__]
BUGS = {
    "marks are cleared at staging": (Marks, "freeze", cleared_at_staging),
    "marks of a save go on changing": (MarkSet, "_own", lambda marks: None),
    "marks since staging are cleared at commit": (Marks, "end", without_second_set),
    "erase does not move marks": (MarkSet, "move", MovesNothing.move),
    "erase leaves marks behind": (MarkSet, "move", lambda marks, erasure: None),
    "erase does not move marks since staging": (Marks, "freeze", with_second_set(MovesNothing)),
    "writes are not marked": (RowStore, "write", untold(RowStore.write)),
    "inserts are not marked": (RowStore, "insert", untold(RowStore.insert)),
    "erased ids are not marked": (RowStore, "erase", untold(RowStore.erase)),
    "writes since staging are not marked": (RowStore, "_announce", in_first_set_only(RowStore._announce)),
    "erased ids are forgotten on failure": (Marks, "end", forgetting_erased),
    "ids erased since staging are not marked": (Marks, "freeze", with_second_set(RemembersNoIds)),
    "ids that are there again are deleted": (
        DeltaSource,
        "deletes",
        lambda source: np.unique(np.concatenate([np.empty(0, np.int64), *source._erased])),
    ),
    "replaced is forgotten on failure": (Marks, "end", forgetting_replaced),
    "replaced since staging is not marked": (Observers, "replaced", in_first_set_only(Observers.replaced)),
    "replaced is not marked": (Observers, "replaced", lambda observers: None),
    "a new slot replaces nothing": (RowStore, "add_column", slot_added_silently),
    "failures and ephemeral checkpoints clear the marks": (
        Frozen,
        "failed",
        lambda frozen: frozen.committed(frozen.base),  # a base of another id would be noticed: all is written then
    ),
    "each rank replaces by itself": (HERE, "is_agreed", lambda said: False),
    "marks do not know their base": (Frozen, "is_replaced", lambda frozen, base: frozen.base is None),
    "a new store is not replaced": (Tracker, "_of", store_taken_over),
    "deletes beat rows": (HERE, "applied", deletes_beat_upserts),
    "changed rows are not protected": (PreImages, "narrow", narrowed_to_nothing),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_finds_what_is_planted(monkeypatch, bug):
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((AssertionError, RuntimeError)):
        run(seed(3)(Training), 5000, phases=[Phase.generate], database=None, report_multiple_bugs=False)
