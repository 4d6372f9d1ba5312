"""A snapshot holds the rows of its moment, whatever happens to the table afterwards."""

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.sources import read_column
from support.sweeps import mostly_slow

from recckpt.sparse import HashTable
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table import snapshot as pre_images_module
from recckpt.sparse.table import store as store_module
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import EMBEDDING


def table_of(n_rows: int, dim: int = 3) -> HashTable:
    table = HashTable(dim, name="t")
    table.add_slot("moment", ())
    ids = torch.arange(n_rows)
    table.insert(ids, values_of(ids, dim), {"moment": -ids.float()})
    return table


def values_of(ids: torch.Tensor, dim: int = 3) -> torch.Tensor:
    return ids.float()[:, None].expand(-1, dim).contiguous()


def read(snapshot: Snapshot, rows: np.ndarray) -> dict[int, tuple]:
    """Return id -> (embedding, moment) of rows."""
    dim = snapshot.slots[0].shape[0]
    ids = np.empty(len(rows), np.int64)
    embedding, moment = np.empty((len(rows), dim), np.float32), np.empty(len(rows), np.float32)
    for column, array in enumerate((ids, embedding, moment)):
        read_column(snapshot, column, rows, array.view(np.uint8).reshape(-1), is_last=column == 2)
    return {int(i): (e.tobytes(), float(m)) for i, e, m in zip(ids, embedding, moment, strict=True)}


def state_of(table: HashTable) -> dict[int, tuple]:
    columns = table.ids(), table.embeddings(), table.slots["moment"]
    return {int(i): (e.numpy().tobytes(), float(m)) for i, e, m in zip(*columns, strict=True)}


CHANGES = {
    "nothing": lambda table: None,
    "write": lambda table: table.insert(torch.arange(0, 90, 2), torch.zeros(45, 3)),
    "write twice": lambda table: [table.insert(torch.arange(50), torch.full((50, 3), v)) for v in (1.0, 2.0)],
    "grow": lambda table: table.insert(torch.arange(1000, 200_000), torch.zeros(199_000, 3)),
    "erase": lambda table: table.erase(torch.arange(0, 60, 3)),
    "erase all": lambda table: table.erase(torch.arange(100)),
    "erase and add": lambda table: (table.erase(torch.arange(50)), table(torch.arange(500, 600))),
    "clear": lambda table: table.clear(),
    "clear and add": lambda table: (table.clear(), table(torch.arange(500, 700))),
    "a new slot": lambda table: (table.add_slot("late", ()), table(torch.arange(500, 600))),
    "all at once": lambda table: (
        table.erase(torch.arange(0, 100, 7)),
        table(torch.arange(90, 400)),
        table.insert(torch.arange(100), torch.ones(100, 3)),
        table.erase(torch.arange(50, 300)),
        table.clear(),
        table.insert(torch.arange(30), torch.ones(30, 3)),
    ),
}


@mostly_slow("change")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before the first row", "between two rows", "after the ids"])
def test_a_snapshot_is_of_its_moment(change, when):
    table = table_of(100)
    expected = state_of(table)
    snapshot = table.store.snapshot("t")
    seen = {}
    if when == "after the ids":
        assert snapshot.ids.to_tensor(100).tolist() == table.ids().tolist()
    if when == "between two rows":
        seen |= read(snapshot, np.arange(40, 70))
    CHANGES[change](table)
    assert snapshot.ids.to_tensor(100).tolist() == list(range(100))
    assert torch.cat(list(snapshot.ids.pieces(10, 90))).tolist() == list(range(10, 90))
    rest = np.array([row for row in range(100) if row not in {int(i) for i in seen}], np.uint32)
    seen |= read(snapshot, rest[::2])
    CHANGES[change](table)
    seen |= read(snapshot, rest[1::2])
    assert seen == expected


def test_rows_are_copied_aside_once_and_only_those_that_change_while_somebody_wants_them():
    table = table_of(100)
    snapshot = table.store.snapshot("t")
    for _ in range(3):
        table.insert(torch.arange(10), torch.zeros(10, 3))
    assert snapshot.n_kept == 10
    read(snapshot, np.arange(50))
    table.insert(torch.arange(50), torch.zeros(50, 3))
    assert snapshot.n_kept == 10, "what is written already is nobody's any more"
    table(torch.arange(1000, 1100))
    assert snapshot.n_kept == 10, "new rows are not of the snapshot"
    ids = snapshot.ids
    del snapshot
    gc.collect()
    table.erase(torch.arange(50))
    assert ids.to_tensor(100).tolist() == list(range(100)), "its ids keep it alive"
    del ids
    other = table.store.snapshot("t")
    other.close()
    table.insert(torch.arange(100), torch.zeros(100, 3))
    assert other.n_kept == 0, "it is closed"
    del other
    gc.collect()
    table.insert(torch.arange(100), torch.zeros(100, 3))
    last = table.store.snapshot("t")
    assert len(table.store._observers._snapshots) == 1
    assert last.n_kept == 0


def test_the_memory_of_a_snapshot_serves_the_next():
    table, addresses = table_of(1000), set()
    for value in range(3):
        snapshot, expected = table.store.snapshot("t"), state_of(table)
        table.insert(torch.arange(1000), torch.full((1000, 3), float(value)))
        [block] = snapshot._slots._opened()[1].columns[EMBEDDING].blocks
        addresses.add(block.data_ptr())
        assert read(snapshot, np.arange(1000)) == expected
        snapshot.close()
    assert len(addresses) == 1
    assert table.store._observers._spare_logs[1].columns[EMBEDDING].blocks[0].data_ptr() in addresses


def test_memory_beyond_a_limit_goes_back_when_a_snapshot_is_over(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(store_module, "_SPARE_BYTES", 5000)
    table = table_of(5000)
    snapshot = table.store.snapshot("t")
    table.insert(torch.arange(5000), torch.zeros(5000, 3))
    log = snapshot._slots._opened()[1]
    used = sum(column.nbytes for column in log.columns.values())
    snapshot.close()
    assert sum(column.nbytes for column in log.columns.values()) <= 5000 + 2 * 1024 < used
    assert log.places.cells.nbytes < 5000 * 16


def test_a_row_cannot_be_read_for_the_second_time_and_a_closed_snapshot_not_at_all():
    table = table_of(100)
    snapshot = table.store.snapshot("t")
    read(snapshot, np.arange(50))
    with pytest.raises(RuntimeError, match="row 49 of a snapshot is read for the second time"):
        read(snapshot, np.arange(49, 60))
    snapshot.close()
    snapshot.close()
    for attempt in (lambda: read(snapshot, np.arange(5)), lambda: snapshot.ids.to_tensor(5)):
        with pytest.raises(RuntimeError, match="closed"):
            attempt()


def test_closing_under_a_reader_gives_it_no_rows_of_the_next_snapshot(monkeypatch):
    table = table_of(100)
    snapshot = table.store.snapshot("t")
    table.insert(torch.arange(100), torch.zeros(100, 3))
    lay_over = Column.lay_over

    def closing(*args):
        snapshot.close()
        lay_over(*args)

    monkeypatch.setattr(Column, "lay_over", closing)
    with pytest.raises(RuntimeError, match="closed"):
        read(snapshot, np.arange(100))


def test_without_memory_to_copy_to_the_snapshot_is_lost_and_training_goes_on(monkeypatch):
    table = table_of(100)
    snapshot = table.store.snapshot("t")

    def fail(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Column, "copy_rows", fail)
        table.insert(torch.arange(10), torch.zeros(10, 3))
    assert table.embeddings()[:10].count_nonzero() == 0
    with pytest.raises(MemoryError, match="no room"):
        read(snapshot, np.arange(50, 60))
    snapshot.close()
    other, expected = table.store.snapshot("t"), state_of(table)
    table.insert(torch.arange(10), torch.ones(10, 3))
    assert read(other, np.arange(100)) == expected


@pytest.mark.parametrize(
    ("owner", "place"), [(Column, "copy_rows"), (IdIndex, "claim"), (pre_images_module, "keep_rows")]
)
def test_who_is_interrupted_while_copying_aside_leaves_a_whole_snapshot(monkeypatch, owner, place):
    table = table_of(100)
    expected, snapshot = state_of(table), table.store.snapshot("t")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            snapshot.keep(np.arange(10), with_ids=False)
    table.store.write(np.arange(5, 30), {"moment": torch.zeros(25)})
    assert read(snapshot, np.arange(100)) == expected


@pytest.mark.parametrize("n_rows", [0, 1, 7, 8, 9, 63, 64, 65])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64])
def test_tables_of_any_size_and_dtype_have_snapshots(n_rows, dtype):
    table = HashTable((2, 1), name="t", dtype=dtype)
    table.insert(torch.arange(n_rows), torch.full((n_rows, 2, 1), 5, dtype=dtype))
    snapshot = table.store.snapshot("t")
    table.insert(torch.arange(n_rows + 3), torch.full((n_rows + 3, 2, 1), 9, dtype=dtype))
    table.erase(torch.arange(0, n_rows, 2))
    ids, values = np.empty(n_rows, np.int64), torch.empty(n_rows, 2, 1, dtype=dtype)
    read_column(snapshot, 0, np.arange(n_rows), ids.view(np.uint8), is_last=False)
    read_column(snapshot, 1, np.arange(n_rows), values.view(torch.uint8).numpy().reshape(-1), is_last=True)
    assert ids.tolist() == list(range(n_rows))
    assert (values == 5).all()


def test_a_copy_of_a_table_is_no_concern_of_its_snapshots():
    table = table_of(100)
    expected = state_of(table)
    snapshot = table.store.snapshot("t")
    twin = copy.deepcopy(table)
    twin.insert(torch.arange(100), torch.zeros(100, 3))
    assert snapshot.n_kept == 0
    table.insert(torch.arange(100), torch.ones(100, 3))
    assert state_of(twin) != expected
    assert read(snapshot, np.arange(100)) == expected


def test_several_threads_may_change_a_table_that_is_being_saved():
    table = table_of(20_000)
    expected = state_of(table)
    snapshot = table.store.snapshot("t")

    def change(part):
        for value in range(5):
            table.store.write(part, {"moment": torch.full((len(part),), float(value))})

    found = {}
    with ThreadPoolExecutor(4) as pool:
        changes = [
            pool.submit(change, part) for part in np.array_split(np.random.default_rng(0).permutation(20_000), 3)
        ]
        for rows in np.array_split(np.arange(20_000), 20):
            found |= read(snapshot, rows)
        for change_ in changes:
            change_.result()
    assert found == expected


@mostly_slow()
@pytest.mark.parametrize("seed", range(3))
def test_readers_and_training_at_full_speed_never_mix_two_moments(seed):
    table = table_of(10_000, dim=16)
    for step in range(1, 4):
        expected = state_of(table)
        snapshot = table.store.snapshot("t")
        order = np.random.default_rng(seed).permutation(snapshot.n_rows).astype(np.uint32)
        found, failed = {}, []

        def write(order=order, snapshot=snapshot, found=found, failed=failed):
            try:
                for rows in np.array_split(order, 8):
                    found.update(read(snapshot, rows))
            except BaseException as error:
                failed.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        round_ = 0
        while writer.is_alive():
            round_ += 1
            ids = torch.from_numpy(np.random.default_rng(round_).integers(0, 11_000, 1500))
            table.insert(ids, torch.full((1500, 16), float(step * 1000 + round_)))
            table.erase(ids[:10])
        writer.join()
        assert not failed
        assert found == expected
