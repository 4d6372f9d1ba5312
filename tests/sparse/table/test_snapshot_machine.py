"""Whatever happens to a table while its snapshots are written, each holds the rows of its moment, bit for bit."""

import math
import threading
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.builders import OPTIMIZERS
from support.forge import rows_of, written_parts
from support.stepped import Counting, Stepped, halt_where_columns_are_read
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.thread_ranks import no_others
from torch import nn

from recckpt import Saver
from recckpt.format.buckets import bucket_of
from recckpt.format.tables import TableEntry
from recckpt.policies.row_filter import RowFilter
from recckpt.save.job import SparseSaver
from recckpt.sparse import Constant, HashTable, Normal
from recckpt.sparse.files.arrow_format import ID, column_buffer, column_values
from recckpt.sparse.files.filler import Filler
from recckpt.sparse.files.link_pass import LinkLoad
from recckpt.sparse.files.loader import load_tables
from recckpt.sparse.files.part_reader import LinkBatches, PartReader
from recckpt.sparse.files.table_target import Ages, target_of
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table import rows as rows_module
from recckpt.sparse.table import snapshot as pre_images_module
from recckpt.sparse.table import snapshot as snapshot_module
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.kernels import pick_marked
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.snapshot import PreImages, Snapshot
from recckpt.storage import Storage, open_storage
from recckpt.types import EMBEDDING

START, MARK = 7.0, 3.0  # what embeddings and marks of new rows start at
DTYPES = ["float32", "float64", "bfloat16", "float16", "int8"]
_numbers = count()


class Saving:
    """One snapshot being written by the real saver, in steps."""

    def __init__(self, table: HashTable, storage: Storage, expected: dict, order_rows: int, batch_bytes: int) -> None:
        self.expected, self._storage, self._directory = expected, storage, f"save{next(_numbers)}"
        self.snapshot = table.store.snapshot(table.name)
        self.entry = TableEntry(table.name, self.snapshot.n_rows, self.snapshot.slots)
        saver = SparseSaver(1, batch_bytes=batch_bytes, order_bytes=4 * order_rows)
        self.parts = []
        self._writer = Stepped(lambda: self._save(saver))
        self.step = self._writer.step

    def finish(self) -> None:
        """Let the save end, and compare what it wrote with the rows of its moment."""
        error = self._writer.finish()
        if error is not None:
            raise error
        self.snapshot.close()
        ids, found = [], {}
        for part in self.parts:
            reader = PartReader(self._storage, self._directory, part, self.entry.slots)
            for number, batch in enumerate(part.batches):
                columns = reader.arrays(number, reader.read(number))
                some = np.frombuffer(column_buffer(columns[ID]), np.int64)
                ids += some.tolist()
                found |= rows_as_dict(some, {s.name: column_values(columns[s.name], s) for s in self.entry.slots})
                buckets = bucket_of(some)
                assert batch.buckets[0] <= buckets.min()
                assert buckets.max() < batch.buckets[1]
        assert [id_ for id_, times in Counter(ids).items() if times > 1] == [], "twice"
        assert found.keys() == self.expected.keys(), "lost or of another step"
        assert found == self.expected

    def give_up(self) -> None:
        """Close the snapshot under the writer, as if the save had failed elsewhere."""
        self.snapshot.close()
        error = self._writer.finish()
        assert error is None or "closed" in str(error)

    def as_load(self, table: HashTable, clear: bool) -> LinkLoad:
        slots = {spec.name: spec.name for spec in self.entry.slots}
        filler = Filler(target_of(table), self.entry, slots, True, clear, RowFilter(), False, Ages())
        batches = LinkBatches(self._storage, self._directory, {filler.entry.name}, {0: self.parts})
        return LinkLoad((0, 0), [filler], batches)

    def _save(self, saver: SparseSaver) -> None:
        self.parts = written_parts(saver, [self.snapshot], self._storage, self._directory).parts


def rows_as_dict(ids, columns) -> dict:
    lists = {
        name: np.asarray(values, np.float64).reshape(len(ids), math.prod(values.shape[1:])).tolist()
        for name, values in columns.items()
    }
    return {int(i): {name: tuple(rows[at]) for name, rows in lists.items()} for at, i in enumerate(ids)}


some_ids = st.builds(
    lambda begin, length, stride: list(range(begin, begin + length * stride, stride)),
    st.integers(-20, 200),
    st.integers(1, 80),
    st.integers(1, 5),
)


class Fire(RuleBasedStateMachine):
    """A table that trains, its model in plain Python, and up to three saves that are under way."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.storage = open_storage(self.url)
        self.storage.prepare()
        self.model: dict[int, dict[str, tuple[float, ...]]] = {}
        self.saves: list[Saving] = []
        self.finished: list[Saving] = []

    @initialize(dtype=st.sampled_from(DTYPES), dim=st.integers(1, 3), n_rows=st.integers(0, 150))
    def make(self, dtype, dim, n_rows):
        self.dim = dim
        self.table = HashTable(dim, name="t", dtype=getattr(torch, dtype), initializer=Constant(START))
        self.initial = {EMBEDDING: (START,) * dim, "count": (0.0,), "mark": (MARK,)}
        self.is_float = self.table.dtype.is_floating_point
        self.optimizer = Counting([self.table]) if self.is_float else None
        self.table.add_slot("count", ())
        self.table.add_slot("mark", (), torch.int8, initial=MARK)
        self.table(torch.arange(n_rows))
        self.model = {id_: dict(self.initial) for id_ in range(n_rows)}

    @rule(ids=some_ids, value=st.integers(-50, 50), with_mark=st.booleans(), inference=st.booleans())
    def insert(self, ids, value, with_mark, inference):
        with torch.inference_mode(inference):
            values = torch.full((len(ids), self.dim), value, dtype=self.table.dtype)
            marks = {"mark": torch.full((len(ids),), value, dtype=torch.int8)} if with_mark else {}
            self.table.insert(torch.tensor(ids), values, marks)
        for id_ in ids:
            row = self.model.setdefault(id_, dict(self.initial))
            row[EMBEDDING] = (float(value),) * self.dim
            if with_mark:
                row["mark"] = (float(value),)

    @rule(ids=some_ids, often=st.integers(1, 3), value=st.integers(-20, 20))
    def train(self, ids, often, value):
        out = self.table(torch.tensor(ids * often))
        for id_ in ids:
            self.model.setdefault(id_, dict(self.initial))
        if self.is_float:
            (out * value).sum().backward()
            self.optimizer.step()
            for id_ in ids:
                row = self.model[id_]
                row[EMBEDDING], row["count"] = (float(often * value),) * self.dim, (row["count"][0] + 1,)

    @rule(ids=some_ids)
    def erase(self, ids):
        self.table.erase(torch.tensor(ids))
        for id_ in ids:
            self.model.pop(id_, None)

    @rule(
        what=st.sampled_from(["reserve", "add_slot", "load"] * 2 + ["clear", "move", "fail", "reload"]),
        number=st.integers(0, 9),
    )
    def something_rare(self, what, number):
        getattr(self, f"_{what}")(number)

    def _clear(self, number):
        self.table.clear()
        self.model.clear()

    def _reserve(self, number):
        self.table.reserve(number * 200)

    def _add_slot(self, number):
        if len(self.initial) < 5:
            name = f"late{len(self.initial)}"
            self.table.add_slot(name, (2,), initial=number)
            self.initial[name] = (float(number),) * 2
            for row in self.model.values():
                row[name] = self.initial[name]

    def _move(self, number):
        self.table.store = self.table.store.to(self.table.device)

    def _fail(self, number):
        if self.saves:
            self.saves.pop(number % len(self.saves)).give_up()

    def _load(self, number, clear=False):
        if self.finished:
            saved = self.finished[number % len(self.finished)]
            loads = [saved.as_load(self.table, clear)]
            calls = {"advance": lambda n: None, "when_checked": lambda: None}
            load_tables(loads, concurrency=2, meetings=no_others(), **calls)
            if clear:
                self.model.clear()
            for id_, row in saved.expected.items():
                self.model[id_] = self.model.get(id_, self.initial) | row

    def _reload(self, number):
        self._load(number, clear=True)

    @precondition(lambda self: len(self.saves) < 3)
    @rule(order_rows=st.sampled_from([10_000, 100, 7]), batch_bytes=st.sampled_from([100_000, 1000, 100]))
    def save(self, order_rows, batch_bytes):
        expected = {id_: dict(row) for id_, row in self.model.items()}
        self.saves.append(Saving(self.table, self.storage, expected, order_rows, batch_bytes))

    @precondition(lambda self: self.saves)
    @rule(number=st.integers(0, 2), steps=st.integers(1, 6))
    def advance(self, number, steps):
        for _ in range(steps):
            self.saves[number % len(self.saves)].step()

    @precondition(lambda self: self.saves)
    @rule(number=st.integers(0, 2))
    def finish(self, number):
        saving = self.saves.pop(number % len(self.saves))
        saving.finish()
        self.finished.append(saving)

    def teardown(self):
        for saving in self.saves:
            saving.finish()
        if hasattr(self, "table"):
            columns = {
                EMBEDDING: self.table.embeddings().double(),
                **{n: t.double() for n, t in self.table.slots.items()},
            }
            assert rows_as_dict(self.table.ids().tolist(), columns) == self.model


@pytest.fixture
def machine(memory_url, monkeypatch):
    """The machine, in a world where small tables have many blocks and writers halt at every read."""
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(column_module, "_FIRST_ROWS", 8)
    monkeypatch.setattr(rows_module, "MIN_ROWS", 8)
    monkeypatch.setattr(snapshot_module, "_PIECE_ROWS", 50)
    halt_where_columns_are_read(monkeypatch)
    return type("Fire", (Fire,), {"url": memory_url})


def run(machine, examples: int, **more) -> None:
    untimed = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=70, **untimed, **more)
    )


def test_every_snapshot_is_of_its_moment_in_any_interleaving(machine):
    run(machine, 8)


@pytest.mark.slow
def test_every_snapshot_is_of_its_moment_in_many_interleavings(machine):
    run(machine, 3000 // SWEEP_STRIDE)


def marked_before_gathered(images, rows, targets, *, is_last):
    columns, log = images._opened()
    with images._lock:
        at = pick_marked(rows, images._marks, images._needed, is_last)
        places = log.places.find(rows[at].astype(np.int64))
    for name, target in targets.items():
        columns[name].gather_into(rows, target)
    for name, target in targets.items():
        log.columns[name].lay_over(places, at, target)


def laid_over_before_gathered(images, rows, targets, *, is_last):
    """Mark at the end, as is right, but look at the log at the beginning."""
    columns, log = images._opened()
    with images._lock:
        at = pick_marked(rows, images._marks, images._needed, False)
        places = log.places.find(rows[at].astype(np.int64))
    for name, target in targets.items():
        columns[name].gather_into(rows, target)
    for name, target in targets.items():
        log.columns[name].lay_over(places, at, target)
    with images._lock:
        pick_marked(rows, images._marks, images._needed, is_last)


def without_telling(method):
    """Return a method of the store that tells no snapshot."""

    def silent(store, *args, **more):
        snapshots, store._observers._snapshots = store._observers._snapshots, []
        try:
            return method(store, *args, **more)
        finally:
            store._observers._snapshots = snapshots

    return silent


def told_too_late(store, rows, values, flag=None):
    without_telling(WRITE)(store, rows, values, flag)
    store._announce(rows, with_ids=False)


def cleared_in_place(store):
    store._observers.forget_snapshots()
    store.rows.index.clear()


def shared_log(store, name, slots=None):
    snapshot = SNAPSHOT(store, name, slots)
    store._observers._spare_logs = (snapshot._ids._opened()[1], snapshot._slots._opened()[1])
    return snapshot


WRITE, SNAPSHOT = RowStore.write, RowStore.snapshot
BUGS = {
    "ids are not copied aside": (Snapshot, "keep", lambda snapshot, rows, with_ids: snapshot._slots.keep(rows)),
    "rows are marked as read before they are": (PreImages, "read", marked_before_gathered),
    "rows are laid over before they are read": (PreImages, "read", laid_over_before_gathered),
    "adding a row tells nobody": (RowStore, "insert", without_telling(RowStore.insert)),
    "slots are not copied aside": (
        Snapshot,
        "keep",
        lambda snapshot, rows, with_ids: with_ids and snapshot._ids.keep(rows),
    ),
    "what is copied aside is not laid over": (Column, "lay_over", lambda *args: None),
    "rows are copied aside again": (
        pre_images_module,
        "keep_rows",
        lambda counts, *_: counts.__setitem__(0, counts[1]),
    ),
    "writing a row tells nobody": (RowStore, "write", without_telling(RowStore.write)),
    "erasing a row tells nobody": (RowStore, "erase", without_telling(RowStore.erase)),
    "writing tells too late": (RowStore, "write", told_too_late),
    "clearing keeps the memory": (RowStore, "clear", cleared_in_place),
    "two snapshots share a log": (RowStore, "snapshot", shared_log),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_finds_what_is_planted(machine, monkeypatch, bug):
    monkeypatch.setattr(*BUGS[bug])
    monkeypatch.setattr(machine, "teardown", lambda self: [saving.give_up() for saving in self.saves])
    with pytest.raises((AssertionError, RuntimeError)):
        run(seed(3)(machine), 300, phases=[Phase.generate], database=None, report_multiple_bugs=False)


def fire(url: str, saves: int, n_rows: int, optimizer: str) -> Counter:
    """Save again and again while training goes on; load each checkpoint and compare it with the rows of its moment."""
    generator = torch.Generator().manual_seed(0)
    table, twin = (HashTable(8, name="t", initializer=Normal(0.0, 1.0)) for _ in range(2))
    sparse_optim = OPTIMIZERS[optimizer]([table])
    table(torch.arange(n_rows))

    def train() -> None:
        ids = torch.randint(-n_rows // 10, n_rows, (n_rows // 20,), generator=generator)
        table(ids).square().sum().backward()
        sparse_optim.step()
        table.erase(ids[: len(ids) // 20])

    seen, has_trained = Counter(), threading.Event()
    with Saver(nn.ModuleList([table]), sparse_optim, output_dir=url, concurrency=2) as saver:
        create = saver.storage.create
        saver.storage.create = lambda name: has_trained.wait(60) and create(name)
        reader = Saver(nn.ModuleList([twin]), OPTIMIZERS[optimizer]([twin]), output_dir=url)
        for number in range(saves):
            expected = rows_of(table)
            if number % 2:  # a step comes before the first row is written, however busy the machine is
                has_trained.clear()
            else:
                has_trained.set()
            handle = saver.save_async(f"a{number}")
            while not handle.done():
                train()
                has_trained.set()
                seen["steps"] += 1
            train()
            handle.wait()
            reader.load(ckpt_id=f"a{number}")
            found = rows_of(twin)
            seen["saves"] += 1
            seen["wrong"] += found != expected
            seen["rows aside"] += handle.info.kept_rows
            if number % 20 == 19:
                table.clear()
                table(torch.arange(n_rows))
    return seen


@mostly_slow()
@pytest.mark.parametrize("optimizer", ["adagrad", "adamw"])
def test_saves_beside_training_hold_the_rows_of_their_moment(memory_url, optimizer):
    seen = fire(memory_url, 4, 20_000, optimizer)
    assert seen["wrong"] == 0
    assert seen["rows aside"] > 0


@pytest.mark.slow
def test_a_thousand_saves_beside_training_hold_the_rows_of_their_moment(tmp_path, record_property):
    seen = fire(str(tmp_path / "runs"), 1000 // SWEEP_STRIDE, 50_000, "adamw")
    record_property("figures", {"saves beside training": dict(seen)})
    assert seen["wrong"] == 0
    assert seen["rows aside"] > seen["saves"]
