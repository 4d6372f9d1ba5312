"""The rows of a live table as a store: snapshots, marks, and what its door is told."""

import logging

import numpy as np
import pytest
import torch

from recckpt.errors import LiveTableError
from recckpt.live.store import LiveStore
from recckpt.sparse.table.mark_set import marked_rows
from recckpt.sparse.table.marks import Marks
from recckpt.types import Box


class Memory:
    """A live table in two tensors, without an optimizer."""

    name = "t"

    def __init__(self, n_rows=20, box=None):
        self.n_rows, self._box = n_rows, box or Box((0, n_rows))
        rows = self._box.rows[1] - self._box.rows[0]
        self.held = {"embedding": torch.arange(rows * 2.0).view(rows, 2), "sparse_sum": torch.zeros(rows)}

    def box(self):
        return self._box

    def tensors(self):
        return self.held


def made(**options):
    table = Memory(**options)
    store = LiveStore(table)
    marks = Marks(store)
    marks.begin("base")
    return table, store, marks


def read(snapshot, slot="embedding"):
    target = np.zeros((snapshot.n_rows, 2), np.float32)
    snapshot.peek(np.arange(snapshot.n_rows), {slot: target.view(np.uint8).reshape(-1)})
    return target


def changed(marks):
    [marked, *_] = marks.sets
    return None if marked.is_replaced else marked_rows(marked.share(20), 20).tolist()


def test_a_snapshot_stays_as_announced_rows_change():
    table, store, _ = made()
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    store.announce(torch.tensor([[3, 4], [4, 3]], dtype=torch.int32))  # of any shape and type, with repeats
    table.held["embedding"][3:5] = -1
    assert np.array_equal(read(snapshot), before)


def test_a_snapshot_stays_as_any_row_changes_once_that_is_announced():
    table, store, marks = made()
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    store.announce_all()
    table.held["embedding"].fill_(-1)
    assert np.array_equal(read(snapshot), before)
    assert changed(marks) is None


def test_memory_that_is_freed_for_now_is_refused():
    table, store, _ = made()
    table.held["embedding"].untyped_storage().resize_(0)
    with pytest.raises(LiveTableError, match="whose memory is freed for now: save and load where it is there"):
        store.snapshot("t")


def test_rows_that_were_announced_are_marked():
    _, store, marks = made()
    store.announce(torch.tensor([3, 3, 9]))
    assert changed(marks) == [3, 9]


def test_rows_that_the_table_does_not_have_mark_nothing():
    _, store, marks = made()
    store.announce(torch.tensor([-1, 20, 1 << 40, 5]))
    assert changed(marks) == [5]


def test_a_copy_of_several_saves_its_part_of_the_rows_and_has_all_of_them():
    table, store, marks = made(box=Box((0, 20), replica=1, n_replicas=3))
    assert (store.ids.first, len(store)) == (6, 7)
    assert len(store.columns["embedding"].blocks[0]) == 20
    assert np.array_equal(read(store.snapshot("t")), table.held["embedding"][6:13])
    store.announce(torch.tensor([5, 6, 12, 13]))
    assert changed(marks) == [0, 6]
    store.write(np.array([0, 7]), {"sparse_sum": torch.tensor([1.0, 2.0])})
    assert table.held["sparse_sum"].nonzero().flatten().tolist() == [0, 7]
    assert changed(marks) == [0, 1, 6]


def test_the_copies_of_a_table_save_each_row_once():
    rows = [row for i in range(7) for row in range(*Box((3, 23), replica=i, n_replicas=7).own_rows)]
    assert rows == list(range(3, 23))


def test_what_is_loaded_is_announced_like_any_change():
    table, store, marks = made()
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    store.write(np.array([1]), {"embedding": torch.full((1, 2), 9.0)})
    assert table.held["embedding"][1].tolist() == [9, 9]
    assert np.array_equal(read(snapshot), before)
    assert changed(marks) == [1]


def test_a_replaced_table_has_no_snapshot_to_read_any_more():
    _, store, marks = made()
    snapshot = store.snapshot("t")
    store.replaced()
    assert changed(marks) is None
    with pytest.raises(LiveTableError, match=r"'t': its rows were changed while they were being saved.*settle"):
        read(snapshot)
    with pytest.raises(LiveTableError, match="changed while"):
        snapshot.check()


@pytest.mark.parametrize("change", ["moved", "new slot", "fewer slots"])
def test_memory_that_is_not_that_of_before_is_a_change_of_all_rows(change):
    table, store, marks = made()
    if change == "moved":
        table.held["sparse_sum"] = table.held["sparse_sum"].clone()
    elif change == "new slot":
        table.held["sparse_late"] = torch.zeros(20)
    else:
        del table.held["sparse_sum"]
    store.snapshot("t")
    assert changed(marks) is None


def test_a_snapshot_of_memory_that_was_replaced_stays_as_it_was():
    table, store, _ = made()
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    table.held["embedding"] = torch.full((20, 2), -1.0)
    store.announce(torch.tensor([2]))
    table.held["embedding"][2] = -2
    assert np.array_equal(read(snapshot), before)


def test_a_table_that_nobody_announces_is_copied():
    table = Memory()
    store = LiveStore(table, is_announced=False)
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    table.held["embedding"].fill_(-1)
    store.replaced()  # which the snapshot has nothing to fear of
    store.announce_all()
    assert np.array_equal(read(snapshot), before)


def test_an_error_of_a_hook_is_logged_and_raised_by_the_next_save_alone(caplog):
    _, store, marks = made()
    with caplog.at_level(logging.ERROR):
        store.announce("no tensor")
    assert "changes were not seen" in caplog.text
    assert changed(marks) is None
    with pytest.raises(LiveTableError, match="its changes were not seen: AttributeError"):
        store.snapshot("t")
    assert store.snapshot("t").n_rows == 20


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(20, 2, dtype=torch.complex64), "expected one of the dtypes"),
        (torch.zeros(19, 2), "expected 20 rows"),
        (torch.zeros(20, 2, device="meta"), "materialize it first"),
        (torch.zeros(2, 20).T, "not contiguous"),
        (torch.zeros(20, 0), "values in each row"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused_by_name(tensor, problem):
    table, store, _ = made()
    table.held["sparse_sum"] = tensor
    with pytest.raises(LiveTableError, match=f"table 't': sparse_sum is .*{problem}"):
        store.snapshot("t")


def test_a_table_without_an_embedding_is_refused():
    table, store, _ = made()
    del table.held["embedding"]
    with pytest.raises(LiveTableError, match="expected 'embedding' among them"):
        store.snapshot("t")
