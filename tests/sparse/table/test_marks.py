import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from support.forge import written_parts
from support.raising import RaisingAt
from support.sources import read_column
from support.sweeps import SWEEP_STRIDE

from recckpt import Saver
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.table.marks import DeltaSource
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.tracker import Tracker
from recckpt.storage import open_storage


def table_of(n_rows: int) -> HashTable:
    table = HashTable(2, name="t")
    table.add_slot("mark", ())
    table.insert(torch.arange(n_rows), torch.ones(n_rows, 2))
    return table


def tracked(n_rows: int) -> tuple[HashTable, Tracker]:
    table, tracker = table_of(n_rows), Tracker()
    tracker.begin(table, "base")
    return table, tracker


def write(table: HashTable, *ids: int) -> None:
    table.insert(torch.tensor(ids), torch.full((len(ids), 2), 2.0))


def upserts(source: DeltaSource | Snapshot) -> dict[int, float]:
    """Read all rows: id -> its first value."""
    rows = np.arange(source.n_rows)
    ids, embeddings, marks = np.empty(len(rows), np.int64), np.empty((len(rows), 2), np.float32), np.empty_like(rows)
    targets = ids.view(np.uint8), embeddings.reshape(-1).view(np.uint8), marks.view(np.uint8)[: 4 * len(rows)]
    for column, target in enumerate(targets):
        read_column(source, column, rows, target, is_last=column == len(targets) - 1)
    return dict(zip(ids.tolist(), embeddings[:, 0].tolist(), strict=True))


def test_a_table_that_nobody_tracks_marks_nothing():
    table, tracker = tracked(100)
    assert len(table.store._observers.mark_sets()) == 1
    del tracker
    gc.collect()
    assert table.store._observers.mark_sets() == []
    write(table, 1, 2)


def test_a_delta_holds_what_was_written_and_erased_since_the_base():
    table, tracker = tracked(100)
    table(torch.arange(100))  # a look-up of what is there
    write(table, 3, 200)
    table.erase(torch.tensor([5, 3, 7, 1000]))
    write(table, 7)
    source = tracker.freeze(table).delta("base")
    assert upserts(source) == {200: 2.0, 7: 2.0}
    assert sorted(source.deletes()) == [3, 5]


def test_what_a_delta_would_hold_is_counted_without_looking_for_it():
    table, tracker = tracked(100)
    random = np.random.default_rng(0)
    for _ in range(20):
        write(table, *random.integers(0, 120, 3).tolist())
        table.erase(torch.from_numpy(random.integers(0, 120, 2)))  # some of the last rows, too
        frozen = tracker.freeze(table)
        source = frozen.delta("base")
        [marks, _] = table.store._observers.mark_sets()
        assert frozen.n_changed == source.n_rows + marks.n_erased
        assert marks.n_marked == np.unpackbits(marks.bits).sum()
    table.clear()
    write(table, 1, 2)
    assert tracker.freeze(table).n_changed == 2


def test_a_load_that_replaces_all_rows_is_more_than_marks_can_say(tmp_path):
    table, tracker = tracked(10)
    saver = Saver(torch.nn.ModuleList([table]), output_dir=str(tmp_path))
    saver.save("a")
    assert not tracker.freeze(table).is_replaced("base")
    saver.load(ckpt_id="a")
    assert tracker.freeze(table).is_replaced("base")
    tracker.begin(table, "a")
    write(table, 3)
    assert upserts(tracker.freeze(table).delta("a")) == {3: 2.0}


def test_the_late_end_of_a_save_after_which_another_has_begun_moves_no_base():
    table, tracker = tracked(10)
    write(table, 1)
    late = tracker.freeze(table)
    write(table, 2)
    tracker.freeze(table).committed("b")
    late.committed("late")
    write(table, 3)
    frozen = tracker.freeze(table)
    assert frozen.is_replaced("late")
    assert upserts(frozen.delta("b")) == {3: 2.0}


@pytest.mark.parametrize("ends", [("committed", "committed"), ("failed", "committed"), ("committed", "failed")])
def test_the_first_end_of_a_save_counts(ends):
    table, tracker = tracked(10)
    write(table, 1)
    frozen = tracker.freeze(table)
    write(table, 2)
    for end in ends:
        frozen.committed("b") if end == "committed" else frozen.failed()
    write(table, 3)
    base, rows = ("b", {2, 3}) if ends[0] == "committed" else ("base", {1, 2, 3})
    assert upserts(tracker.freeze(table).delta(base)).keys() == rows


def test_marks_since_another_base_are_of_no_use():
    table, tracker = tracked(10)
    frozen = tracker.freeze(table)
    assert frozen.is_replaced("another")
    with pytest.raises(RuntimeError, match="'t': no marks since 'another', only since 'base'"):
        frozen.delta("another")


def test_a_table_of_which_half_is_erased_is_replaced_and_keeps_no_ids():
    table, tracker = tracked(100)
    table.erase(torch.arange(33))
    assert not tracker.freeze(table).is_replaced("base")
    table.erase(torch.arange(33, 40))
    assert tracker.freeze(table).is_replaced("base")
    first, second = table.store._observers.mark_sets()
    assert first.erased == []
    assert second.erased == []


def test_a_store_that_is_no_longer_used_is_not_kept():
    table, tracker = tracked(10)
    before = weakref.ref(table.store)
    table.store = table.store.to(table.device)
    gc.collect()
    assert before() is None
    assert tracker.freeze(table).is_replaced("base")
    other, tracker = tracked(10)
    tracker.forget(other)
    assert tracker.freeze(other).is_replaced("base"), "its changes are forgotten"


def test_only_rows_that_the_delta_has_yet_to_write_are_copied_aside():
    table, tracker = tracked(1000)
    write(table, *range(10))
    source = tracker.freeze(table).delta("base")
    write(table, *range(5, 1000))
    table.erase(torch.arange(900, 1000))
    assert source.n_kept == 5
    assert upserts(source).keys() == set(range(10))
    write(table, *range(10))
    assert source.n_kept == 5


def test_the_saver_writes_a_delta_like_a_table(memory_url):
    table, tracker = tracked(5000)
    changed = set(range(0, 5000, 7))
    write(table, *changed)
    storage = open_storage(memory_url)
    storage.prepare()
    source = tracker.freeze(table).delta("base")
    saver = SparseSaver(2, batch_bytes=1000, order_bytes=400)
    catalog = written_parts(saver, [source], storage, "d")
    found = []
    for part in catalog.parts:
        reader = PartReader(storage, "d", part, source.slots)
        for number in range(len(part.batches)):
            found += np.frombuffer(reader.read(number)[ID], np.int64).tolist()
    assert sorted(found) == sorted(changed)


def test_threads_that_write_other_rows_of_one_byte_of_marks_lose_none():
    table, tracker = tracked(800)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda first: [write(table, i) for i in range(first, 800, 4)], range(4)))
    assert tracker.freeze(table).delta("base").n_rows == 800


def test_deltas_beside_several_writers_are_of_their_moment():
    table, tracker = tracked(3000)
    base, content, stop, is_frozen = "base", rows_of(table), [], threading.Event()

    def change(seed):
        is_frozen.wait(60)
        generator = torch.Generator().manual_seed(seed)
        for value in range(60):
            ids = torch.randint(4000, (60,), generator=generator)
            table.insert(ids, torch.full((60, 2), float(value)))
            table.erase(ids[::3])
        stop.append(seed)

    with ThreadPoolExecutor(2) as pool:
        changing = [pool.submit(change, seed) for seed in range(2)]
        number = n_deltas = 0
        while len(stop) < 2 and number < 1000:
            with table.store.lock:
                expected, frozen = rows_of(table), tracker.freeze(table)
            is_frozen.set()
            is_delta = not frozen.is_replaced(base)
            source = frozen.delta(base) if is_delta else frozen.snapshot
            found = upserts(source)
            gone = set(source.deletes().tolist()) if is_delta else content.keys()
            assert {i: value for i, value in content.items() if i not in gone} | found == expected
            source.close()
            number, n_deltas = number + 1, n_deltas + is_delta
            if number % 3:
                base, content = f"save {number}", expected
                frozen.committed(base)
            else:
                frozen.failed()
        for one in changing:
            one.result()
    assert n_deltas > 0


def change(table: HashTable, how: str, value: float) -> None:
    """Change a table in one of several ways, with a value that tells when."""
    if how in ("write", "write and erase"):
        ids = torch.tensor([3, 44, 100, 101])
        table.insert(ids, torch.full((4, 2), value))
    if how in ("erase", "write and erase"):
        table.erase(torch.tensor([0, 1, int(value) + 10, 20]))  # the last rows take their places
    if how == "clear":
        table.clear()
        table.insert(torch.tensor([7]), torch.full((1, 2), value))
    if how == "add_slot":
        table.add_slot(f"late{value}", ())


CHANGES = ["write", "erase", "write and erase", "clear", "add_slot"]


@pytest.mark.parametrize("end", ["committed", "failed"])
@pytest.mark.parametrize("during", CHANGES)
@pytest.mark.parametrize("before", CHANGES)
def test_what_changes_before_and_during_a_save_is_in_the_delta_after_it(before, during, end):
    table, tracker = tracked(45)
    name, base, whole = "base", rows_of(table), {before, during} & {"clear", "add_slot"}
    change(table, before, 5.0)
    saving, content = tracker.freeze(table), rows_of(table)
    change(table, during, 6.0)
    if end == "committed":
        saving.committed("a")
        name, base, whole = "a", content, whole & {during}
    else:
        saving.failed()
    frozen = tracker.freeze(table)
    assert frozen.is_replaced(name) == bool(whole)
    if not whole and before != "add_slot":  # `upserts` reads two slots
        source = frozen.delta(name)
        gone = set(source.deletes().tolist())
        assert {i: value for i, value in base.items() if i not in gone} | upserts(source) == rows_of(table)


OPERATIONS = {
    "insert": lambda table: write(table, 3, 100, 101, 44),
    "look up": lambda table: table(torch.arange(40, 60)),
    "erase": lambda table: table.erase(torch.tensor([0, 7, 20, 44])),
    "clear": lambda table: table.clear(),
    "add_slot": lambda table: table.add_slot("late", (), initial=3),
}


def rows_of(table: HashTable) -> dict[int, float]:
    return dict(zip(table.ids().tolist(), table.embeddings()[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("stride", [11, pytest.param(1 + SWEEP_STRIDE // 10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_after_an_exception_at_any_line_the_marks_cover_what_has_changed(name, stride):
    number, is_reached = 0, True
    while is_reached:
        table, tracker = tracked(45)
        write(table, 1, 30)
        base = rows_of(table_of(45))
        saving = tracker.freeze(table)
        with RaisingAt(number, KeyboardInterrupt, "sparse") as raising, suppress(KeyboardInterrupt):
            OPERATIONS[name](table)
        OPERATIONS["erase"](table)
        write(table, 2, 20, 300)
        saving.failed()
        frozen = tracker.freeze(table)
        if not frozen.is_replaced("base"):
            source = frozen.delta("base")
            gone = set(source.deletes().tolist())
            found = {i: value for i, value in base.items() if i not in gone} | upserts(source)
            assert found == rows_of(table), raising.where
        is_reached, number = raising.n_lines > number, number + stride
    assert number > 10


def ids_of(source: DeltaSource) -> set[int]:
    return set(source.ids.to_tensor(source.n_rows).tolist())


def test_a_peek_shows_all_since_the_base_and_changes_no_marks():
    table, tracker = tracked(10)
    write(table, 1)
    frozen = tracker.freeze(table)
    write(table, 2)
    peeked = tracker.freeze(table, keeps_marks=True)
    assert ids_of(peeked.delta("base")) == {1, 2}, "a save is under way, whose marks are not lost"
    peeked.committed("another")
    frozen.failed()
    write(table, 3)
    assert ids_of(tracker.freeze(table).delta("base")) == {1, 2, 3}
    tracker.freeze(table).committed("next")
    write(table, 4)
    peeked = tracker.freeze(table, keeps_marks=True)
    assert peeked.is_replaced("base")
    assert ids_of(peeked.delta("next")) == {4}


def test_what_has_changed_since_a_base_is_marked_by_its_ids():
    table, tracker = tracked(10)
    tracker.resume(table, "other", np.array([3, 77]), np.array([500]))
    source = tracker.freeze(table).delta("other")
    assert ids_of(source) == {3}
    assert source.deletes().tolist() == [500]
