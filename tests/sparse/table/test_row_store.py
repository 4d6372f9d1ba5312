import numpy as np
import pytest
import torch
from support.sources import read_column

from recckpt.sparse.table import column as column_module
from recckpt.sparse.table import rows as rows_module
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.row_store import RowStore
from recckpt.types import SlotSpec


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 512)


ELSEWHERE = torch.device("cpu:0")  # to a store another device than its own, so it changes rows as on a GPU


def store_of(ids, device: torch.device | None = None) -> RowStore:
    """A store whose embedding names the id, and whose scalar slot is its double."""
    store = RowStore(device or torch.device("cpu"))
    store.add_column(SlotSpec("embedding", "float32", (2,)))
    store.add_column(SlotSpec("twice", "float32", ()), initial=0.5)
    insert(store, np.array(ids, np.int64))
    return store


def insert(store: RowStore, ids) -> None:
    values = torch.from_numpy(ids).float()
    store.insert(ids, {"embedding": values[:, None].expand(-1, 2), "twice": 2 * values})


def check(store: RowStore) -> set[int]:
    """Check that ids, index and all slots agree; return the ids."""
    ids = store.ids.to_tensor(len(store))
    assert store.find(ids.numpy()).tolist() == list(range(len(store)))
    assert torch.equal(store.columns["embedding"].to_tensor(len(store))[:, 1], ids.float())
    assert torch.equal(store.columns["twice"].to_tensor(len(store)), 2 * ids.float())
    return set(ids.tolist())


@pytest.mark.parametrize("erased", [[], [0], [499], list(range(500)), list(range(0, 500, 3)), [7, 7, 1000]])
def test_erasing_moves_the_last_rows_into_the_gaps(erased):
    store = store_of(list(range(500)))
    assert store.erase(np.array(erased, np.int64)) == len(set(erased) & set(range(500)))
    assert check(store) == set(range(500)) - set(erased)


def test_random_erases_and_adds_keep_all_columns_together():
    rng = np.random.default_rng(0)
    store = store_of([5, 3, 9])
    assert store.find(np.array([9, 5, 4])).tolist() == [2, 0, -1], "in order of arrival"
    live = check(store)
    for _ in range(50):
        ids = rng.choice(2000, 100, replace=False)
        if rng.random() < 0.5:
            store.erase(ids)
            live -= set(ids.tolist())
        else:
            insert(store, ids)
            live |= set(ids.tolist())
        assert check(store) == live


def test_slots_start_at_their_initial_value_in_old_rows_and_in_new_ones():
    store = store_of([1])
    store.insert(np.arange(200), {"embedding": torch.zeros(200, 2)})
    assert store.columns["twice"].to_tensor(len(store)).tolist() == [2.0] + [0.5] * 199
    store.add_column(SlotSpec("late", "float64", ()), initial=0.25)
    assert store.columns["late"].to_tensor(200).tolist() == [0.25] * 200


def test_new_rows_get_the_embeddings_that_are_made_for_them():
    store, asked = store_of([1]), []

    def embeddings(ids):
        asked.append(ids.tolist())
        return torch.from_numpy(ids).float()[:, None].expand(-1, 2)

    rows = store.insert(np.array([5, 1, 5, 7]), {}, embeddings)
    assert rows.tolist() == [1, 0, 1, 2]
    assert asked == [[5, 7]]
    assert store.columns["embedding"].to_tensor(3)[:, 0].tolist() == [1, 5, 7]


def test_rows_in_sequence_and_rows_at_random_are_written_alike():
    store = store_of(list(range(100)))
    for rows in (np.arange(20, 90), np.arange(20, 90)[::-1].copy(), np.array([3, 4, 6]), np.array([5])):
        values = torch.rand(len(rows))
        store.write(rows, {"twice": values})
        assert torch.equal(store.columns["twice"].gather(rows), values)


def test_clear_drops_rows_and_memory():
    store = store_of(list(range(1000)))
    before = store.rows.nbytes
    store.clear()
    assert len(store) == 0
    assert store.rows.nbytes < before / 4
    assert store.find(np.array([1])).tolist() == [-1]
    store.insert(np.array([1]), {})
    assert len(store) == 1


@pytest.mark.parametrize("device", [None, ELSEWHERE], ids=["cpu", "elsewhere"])
def test_memory_goes_back_when_half_of_the_rows_are_gone_and_not_before(device):
    store = store_of(list(range(1000)), device)
    before, era = store.rows.nbytes, store.rows.era
    store.erase(np.arange(499))
    assert store.rows.nbytes == before
    store.erase(np.array([600]))
    assert store.rows.nbytes <= before / 2 + 2 * 512
    assert check(store) == {*range(499, 1000)} - {600}
    assert store.rows.era is era, "what waits for rows is not forgotten"
    insert(store, np.arange(2000))
    assert check(store) == {*range(2000)}


def test_a_store_that_is_emptied_row_by_row_ends_as_small_as_a_new_one():
    store = store_of(list(range(3000)))
    for first in range(0, 3000, 30):
        store.erase(np.arange(first, first + 30))
        check(store)
    assert store.rows.nbytes <= store_of(list(range(64))).rows.nbytes


def test_reserve_makes_room_for_all_columns_once_and_it_stays_while_the_table_has_not_shrunk():
    store = store_of(list(range(100)))
    store.reserve(10_000)
    before = store.rows.nbytes
    store.erase(np.arange(30))
    assert store.rows.nbytes == before
    store.insert(np.arange(10_000), {})
    assert store.rows.nbytes == before


def test_a_snapshot_is_of_its_moment_though_the_memory_of_its_rows_has_gone_back():
    store = store_of(list(range(1000)))
    snapshot = store.snapshot("t")
    store.erase(np.arange(0, 900))
    insert(store, np.arange(5000, 6000))
    ids, embeddings, twice = np.empty(1000, np.int64), np.empty((1000, 2), np.float32), np.empty(1000, np.float32)
    for column, some in enumerate((ids, embeddings, twice)):
        read_column(snapshot, column, np.arange(1000), some.reshape(-1).view(np.uint8), is_last=column == 2)
    assert sorted(ids.tolist()) == [*range(1000)]
    assert (embeddings[:, 1] == ids).all()
    assert (twice == 2 * ids).all()
    snapshot.close()


def test_a_copy_is_independent():
    store = store_of([1, 2, 3])
    twin = store.to(torch.device("cpu"))
    store.erase(np.array([1]))
    store.write(np.array([0]), {"embedding": torch.zeros(1, 2)})
    assert check(twin) == {1, 2, 3}
    assert twin.rows.initial["twice"] == 0.5


def test_on_another_device_rows_move_only_while_look_ups_know_that_they_may(monkeypatch):
    store, versions, scatter = store_of(list(range(500)), ELSEWHERE), [], Column.scatter

    def watched(column, rows, values):
        versions.append(store.rows.index.version)
        scatter(column, rows, values)

    monkeypatch.setattr(Column, "scatter", watched)
    store.erase(np.arange(0, 500, 3))
    assert len(versions) == 2
    assert all(version % 2 for version in versions)
    assert store.rows.index.version % 2 == 0
    assert check(store) == set(range(500)) - set(range(0, 500, 3))


def interrupt_at(monkeypatch, name: str, is_done: bool) -> None:
    """Let an interrupt come just after, or just before, the compiled call that changes ids."""
    change = getattr(rows_module, name)

    def interrupted(*args):
        if is_done:
            change(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module, name, interrupted)


@pytest.mark.parametrize("is_done", [False, True])
def test_on_another_device_an_interrupt_at_the_end_of_a_change_leaves_all_or_nothing(monkeypatch, is_done):
    store, erased = store_of(list(range(100)), ELSEWHERE), np.arange(0, 50, 3)
    interrupt_at(monkeypatch, "erase_rows", is_done)
    with pytest.raises(KeyboardInterrupt):
        store.erase(erased)
    assert check(store) == set(range(100)) - (set(erased.tolist()) if is_done else set())
    assert store.rows.index.version % 2 == 0
    interrupt_at(monkeypatch, "write_rows", is_done)
    [row] = store.find(np.array([7]))
    with pytest.raises(KeyboardInterrupt):
        store.write(np.array([row]), {"twice": torch.zeros(1)})
    assert store.columns["twice"].to_tensor(len(store))[row] == (0 if is_done else 14)
