"""Several threads that change one table."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from recckpt.sparse import HashTable, Normal
from recckpt.sparse.optim import SparseSGD
from recckpt.sparse.optim.optimizer import options
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.nn_module import embedding_reader
from recckpt.sparse.table.rows import Rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1 << 12)


def at_once(*work) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(one) for one in work]:
            done.result(timeout=120)


def batches(seed: int, n_ids: int, n_batches: int = 60) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(n_ids * i // n_batches + 10, (300,), generator=generator) for i in range(n_batches)]


def check_whole(table: HashTable) -> None:
    ids = table.ids()
    assert len(set(ids.tolist())) == len(ids) == len(table)
    assert table.store.find(ids.numpy()).tolist() == list(range(len(ids)))


def test_new_ids_from_several_threads_each_get_one_row_with_their_first_values():
    table, alone = (HashTable(4, name="t", initializer=Normal()) for _ in range(2))

    def look_up(seed):
        for ids in batches(seed, 8000):
            alone_values = alone.initializer.values(ids.numpy(), alone.seed, alone.spec)
            assert torch.equal(table(ids), alone_values)

    at_once(*[lambda seed=seed: look_up(seed) for seed in range(4)])
    check_whole(table)
    assert set(table.ids().tolist()) == {i for seed in range(4) for ids in batches(seed, 8000) for i in ids.tolist()}


def test_steps_of_several_threads_all_count():
    table = HashTable(2, name="t")
    table.insert(torch.arange(500), torch.zeros(500, 2))
    optim = SparseSGD([table], lr=1.0)

    def train():
        for _ in range(40):
            table(torch.arange(500)).sum().backward()
            optim.step()

    at_once(*[train] * 4)
    optim.step()
    assert torch.equal(table.embeddings(), torch.full((500, 2), -160.0))
    assert table.take_gradients() is None


def test_look_ups_beside_erases_inserts_and_clears_read_rows_of_their_ids():
    """Each row holds its id: a look-up finds that or nothing, whatever moves meanwhile."""
    table, n_ids = HashTable(3, name="t").eval(), 3000
    stop = []

    def insert(ids):
        table.insert(ids, ids[:, None].expand(-1, 3).float() + 1)

    def change(seed):
        for number, ids in enumerate(batches(seed, n_ids)):
            insert(ids)
            table.erase(ids[::3])
            if number % 10 == 9:
                table.erase(torch.arange(0, n_ids, 2))
                table.erase(torch.arange(1, n_ids, 2)[: n_ids // 3])  # memory goes back
            if number % 20 == 19:
                table.clear()
        stop.append(seed)

    def look_up():
        ids = torch.arange(n_ids)
        while len(stop) < 2:
            values, found = table.lookup(ids)
            expected = torch.where(found, ids.float() + 1, 0.0)[:, None].expand(-1, 3)
            assert torch.equal(values, expected)

    insert(torch.arange(n_ids))
    at_once(lambda: change(0), lambda: change(1), look_up, look_up)
    check_whole(table)


def test_a_look_up_that_begins_while_memory_goes_back_is_repeated(monkeypatch):
    """It has the rows of before, whose whole blocks the next erase changes."""
    table = HashTable(1, name="t")
    table.insert(torch.arange(4000), torch.arange(4000.0)[:, None])
    has_begun, may_read, found = threading.Event(), threading.Event(), []

    def take(columns, rows):
        has_begun.set()
        may_read.wait(60)
        return embedding_reader(table)(columns, rows)

    reader = threading.Thread(target=lambda: found.append(table.store.look_up(np.arange(10), take)))
    fitted = Rows.fitted

    def begin_to_read(rows):
        if not reader.is_alive():
            reader.start()
            has_begun.wait(60)
        return fitted(rows)

    monkeypatch.setattr(Rows, "fitted", begin_to_read)
    table.erase(torch.arange(1500, 4000))
    table.erase(torch.arange(0, 5))
    may_read.set()
    reader.join(60)
    assert found[0].flatten().tolist() == [0, 0, 0, 0, 0, 5, 6, 7, 8, 9]


def test_look_ups_of_known_ids_wait_for_nobody():
    table = HashTable(2, name="t")
    table.insert(torch.arange(10), torch.ones(10, 2))
    with table.store.lock:  # as a writer would
        at_once(lambda: table(torch.arange(10)), lambda: table.lookup(torch.arange(20)))


def test_snapshots_beside_several_writers_have_every_id_once():
    table, stop = HashTable(2, name="t"), []

    def change(seed):
        for ids in batches(seed, 5000):
            table(ids)
            table.erase(ids[::2])
        stop.append(seed)

    def save():
        while len(stop) < 2:
            snapshot = table.store.snapshot("t")
            ids = snapshot.ids.to_tensor(snapshot.n_rows).numpy()
            assert len(np.unique(ids)) == snapshot.n_rows
            snapshot.close()

    at_once(lambda: change(0), lambda: change(1), save)
    check_whole(table)


def test_gradients_that_another_thread_looks_at_during_a_step_are_used_once():
    table = HashTable(1, name="t")
    table.insert(torch.arange(2), torch.zeros(2, 1))

    def look() -> None:
        table(torch.tensor([1])).sum().backward()
        assert table.grad is not None

    class Watched(SparseSGD):
        other = None

        def _update(self, *args, **kwargs):
            super()._update(*args, **kwargs)
            if self.other is None:
                self.other = threading.Thread(target=look)
                self.other.start()
                self.other.join(0.2)  # it waits for the end of this step

    optim = Watched([table], lr=1.0)
    table(torch.tensor([0])).sum().backward()
    optim.step()
    optim.other.join()
    optim.step()
    assert table.embeddings().tolist() == [[-1.0], [-1.0]]


def test_the_step_of_one_table_is_not_counted_by_the_step_of_another():
    """Else a thread that steps one table may write an older count of the other over a newer one."""
    tables = [HashTable(1, name=name) for name in "ab"]
    optim = SparseSGD(tables, lr=1.0)
    (group,) = optim.param_groups
    one, other = group["params"]
    with tables[0].store.lock:  # as a thread has it that has stepped this table, and not counted that yet
        optim._under_way[one] = 1, np.ones(1, np.int64)
        tables[1](torch.tensor([1])).sum().backward()
        at_once(lambda: optim._step_table(other, options(group)))
        assert one not in optim.state
    assert optim.state_dict()["state"] == {"a": {"step": 1}, "b": {"step": 1}}


def test_a_table_that_takes_the_rows_of_another_gets_those_of_one_moment(monkeypatch):
    source, table = HashTable(1, name="t"), HashTable(1, name="t")
    source.insert(torch.arange(3), torch.arange(3.0)[:, None])
    erasing, embeddings = threading.Thread(target=lambda: source.erase(torch.tensor([0]))), source.embeddings

    def embeddings_later():
        erasing.start()
        erasing.join(0.2)  # it waits until all is read
        return embeddings()

    monkeypatch.setattr(source, "embeddings", embeddings_later)
    table.load_state_dict(source.state_dict())
    erasing.join()
    assert dict(zip(table.ids().tolist(), table.embeddings().flatten().tolist(), strict=True)) == {0: 0, 1: 1, 2: 2}
