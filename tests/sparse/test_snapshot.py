"""A snapshot holds the rows of its moment, whatever happens to the table afterwards."""

import gc
import threading

import numpy as np
import pytest
import torch

from recckpt.sparse import HashTable
from recckpt.sparse.snapshot import Snapshot
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
    snapshot.read(rows, [array.view(np.uint8).reshape(-1) for array in (ids, embedding, moment)])
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


def test_rows_are_copied_aside_once_and_only_those_that_change():
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


def test_a_closed_or_forgotten_snapshot_costs_nothing():
    table = table_of(100)
    snapshot = table.store.snapshot("t")
    snapshot.close()
    table.insert(torch.arange(100), torch.zeros(100, 3))
    assert snapshot.n_kept == 0
    del snapshot
    gc.collect()
    table.insert(torch.arange(100), torch.zeros(100, 3))
    other = table.store.snapshot("t")
    assert len(table.store._snapshots) == 1
    assert other.n_kept == 0


def test_two_snapshots_each_have_their_moment():
    table = table_of(50)
    first, expected = table.store.snapshot("t"), state_of(table)
    table.insert(torch.arange(20), torch.ones(20, 3))
    second, expected_then = table.store.snapshot("t"), state_of(table)
    table.insert(torch.arange(10, 40), torch.zeros(30, 3))
    assert read(first, np.arange(50)) == expected
    assert read(second, np.arange(50)) == expected_then


def test_the_memory_of_a_snapshot_serves_the_next():
    table = table_of(1000)
    for _ in range(2):
        snapshot = table.store.snapshot("t")
        table.insert(torch.arange(1000), torch.zeros(1000, 3))
        snapshot.close()
        del snapshot
        gc.collect()
        blocks = [block.data_ptr() for block in table.store._spare_log[EMBEDDING].blocks]
    assert len(blocks) == 1
    snapshot = table.store.snapshot("t")
    assert not table.store._spare_log
    table.insert(torch.arange(1000), torch.ones(1000, 3))
    assert read(snapshot, np.arange(1000)) == {i: (np.zeros(3, np.float32).tobytes(), -float(i)) for i in range(1000)}


@pytest.mark.parametrize("seed", range(3))
def test_readers_and_training_at_full_speed_never_mix_two_moments(seed):
    table = table_of(20_000, dim=16)
    for step in range(1, 6):
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
            ids = torch.from_numpy(np.random.default_rng(round_).integers(0, 21_000, 3000))
            table.insert(ids, torch.full((3000, 16), float(step * 1000 + round_)))
            table.erase(ids[:10])
        writer.join()
        assert not failed
        assert found == expected
