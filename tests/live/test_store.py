"""The rows of a live table as a store: ids, snapshots, marks, what its door is told, and rows noted on a device."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICES, here, on

from recckpt.errors import LiveTableError
from recckpt.live import store as store_module
from recckpt.live.store import LiveStore, RowRange
from recckpt.live.writes import NotedRows
from recckpt.sparse.table.marks import Marks
from recckpt.sparse.table.store import marked_rows
from recckpt.types import Box

N_ROWS = 12  # of the box


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
    snapshot.read_slots(np.arange(snapshot.n_rows), {slot: target.view(np.uint8).reshape(-1)}, is_last=False)
    return target


def changed(marks):
    marks.store().mark_noted()
    [marked, *_] = marks.sets
    return None if marked.is_replaced else marked_rows(marked.share(20), 20).tolist()


@pytest.fixture(params=["here", "apart"])
def place(request, monkeypatch):
    """Where the numbers of rows are: here, or as if on a device, for which no step is to wait."""
    monkeypatch.setattr(store_module, "runs_apart", lambda rows: request.param == "apart")
    return request.param


@pytest.mark.usefixtures("place")
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


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        *(
            ("sparse_sum", tensor, f"table 't': sparse_sum is .*{problem}")
            for tensor, problem in (
                (torch.zeros(20, 2, dtype=torch.complex64), "expected one of the dtypes"),
                (torch.zeros(19, 2), "expected 20 rows"),
                (torch.zeros(20, 2, device="meta"), "materialize it first"),
                (torch.zeros(2, 20).T, "not contiguous"),
                (torch.zeros(20, 0), "values in each row"),
            )
        ),
        ("embedding", None, "expected 'embedding' among them"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_refused_by_name(name, tensor, problem):
    table, store, _ = made()
    if tensor is None:
        del table.held[name]
    else:
        table.held[name] = tensor
    with pytest.raises(LiveTableError, match=problem):
        store.snapshot("t")
    freed, store, _ = made()
    freed.held["embedding"].untyped_storage().resize_(0)
    with pytest.raises(LiveTableError, match="whose memory is freed at the moment: save and load when it is allocated"):
        store.snapshot("t")


@pytest.mark.usefixtures("place")
def test_rows_that_were_announced_and_that_the_table_has_are_marked():
    _, store, marks = made()
    store.announce(torch.tensor([3, 3, 9]))
    store.announce(torch.tensor([-1, 20, 1 << 40, 5]))
    assert changed(marks) == [3, 5, 9]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("has_snapshot", [False, True])
def test_rows_can_be_announced_by_a_mask(has_snapshot):
    table, store, marks = made(box=Box((0, 20), replica=1, n_replicas=3))  # of which rows 6 to 12 are saved here
    snapshot = store.snapshot("t") if has_snapshot else None
    store.announce(torch.tensor([row in {5, 6, 9, 13} for row in range(20)]))
    if snapshot is not None:
        before = table.held["embedding"][6:13].clone()
        table.held["embedding"][[6, 9]] = -1
        assert np.array_equal(read(snapshot), before)
    assert changed(marks) == [0, 3]


def test_rows_that_are_noted_wait_for_whoever_reads_marks_and_are_kept_for_nobody_else(monkeypatch):
    monkeypatch.setattr(store_module, "runs_apart", lambda rows: True)
    noted = []
    monkeypatch.setattr(NotedRows, "note", lambda self, rows: noted.append(rows) or True)
    store = LiveStore(Memory())
    store.announce(torch.tensor([3]))
    marks = Marks(store)  # of which the next checkpoint is a full one
    store.announce(torch.tensor([4]))
    assert not noted
    marks.begin("base")
    store.announce(torch.tensor([5]))
    assert [rows.tolist() for rows in noted] == [[5]]


def test_rows_that_a_device_has_no_room_to_note_are_marked_here(monkeypatch):
    monkeypatch.setattr(store_module, "runs_apart", lambda rows: True)
    monkeypatch.setattr(NotedRows, "note", lambda self, rows: False)
    _, store, marks = made()
    store.announce(torch.tensor([3]))
    assert changed(marks) == [3]


def test_what_was_noted_before_a_base_is_no_change_since_it_and_what_was_noted_after_it_is(monkeypatch):
    monkeypatch.setattr(store_module, "runs_apart", lambda rows: True)
    _, store, marks = made()
    store.announce(torch.tensor([3]))
    assert not marks.is_unchanged("base")
    store.announce(torch.tensor([4]))
    marks.begin("next")
    assert marks.is_unchanged("next")
    frozen = marks.freeze(store, "t", None)
    frozen.snapshot.close()
    del frozen.snapshot
    store.announce(torch.tensor([5]))  # once all is read, before the commit
    frozen.committed("last")
    assert (marks.is_unchanged("last"), changed(marks)) == (False, [5])
    store.announce(torch.tensor([6]))
    assert marked_rows(marks.freeze(store, "t", None, keeps_marks=True).bits, 20).tolist() == [5, 6]
    assert marks.resume("resumed", np.array([7]), np.array([], np.int64))
    assert changed(marks) == [7]


@pytest.mark.usefixtures("place")
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


def test_what_is_loaded_is_announced_like_any_change():
    table, store, marks = made()
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    store.write(np.array([1]), {"embedding": torch.full((1, 2), 9.0)})
    assert table.held["embedding"][1].tolist() == [9, 9]
    assert np.array_equal(read(snapshot), before)
    assert changed(marks) == [1]
    before, snapshot = table.held["embedding"].numpy().copy(), store.snapshot("t")
    table.held["embedding"] = torch.full((20, 2), -1.0)
    store.announce(torch.tensor([2]))
    table.held["embedding"][2] = -2
    assert np.array_equal(read(snapshot), before), "of memory that was replaced"


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
    assert "changes were missed" in caplog.text
    assert changed(marks) is None
    with pytest.raises(LiveTableError, match="changes were missed: AttributeError"):
        store.snapshot("t")
    assert store.snapshot("t").n_rows == 20


def test_the_id_of_a_row_is_its_number_from_the_first_on():
    ids = RowRange(100, 5)
    assert ids.to_tensor(3).tolist() == [100, 101, 102]
    assert ids.gather(np.array([4, 0], np.uint32)).tolist() == [104, 100]
    target = np.zeros(16, np.uint8)
    ids.gather_into(np.array([1, 3], np.uint32), target)
    assert target.view(np.int64).tolist() == [101, 103]
    pieces = list(RowRange(10, 300_000).pieces(5, 300_000))
    assert len(pieces) == 3
    assert np.array_equal(np.concatenate([piece.numpy() for piece in pieces]), np.arange(15, 300_010))
    rows = [row for i in range(7) for row in range(*Box((3, 23), replica=i, n_replicas=7).own_rows)]
    assert rows == list(range(3, 23)), "the copies of a table save each row once"


@pytest.mark.parametrize("device", DEVICES)
@given(
    begin=st.integers(0, N_ROWS),
    n_rows=st.integers(0, N_ROWS),
    calls=st.lists(st.one_of(st.none(), st.lists(st.integers(-3, N_ROWS + 3)), st.sets(st.integers(0, N_ROWS - 1)))),
)
@settings(deadline=None, max_examples=60)
def test_what_was_noted_is_taken_once(device, begin, n_rows, calls):
    """``None`` takes; a list names rows by number, a set by a mask."""
    n_rows = min(n_rows, N_ROWS - begin)
    noted, expected = NotedRows(begin, n_rows), set()
    with on(device):
        for call in [*calls, None]:
            if call is None:
                taken = noted.take().tolist()
                assert sorted(taken) == sorted(expected)
                expected = set()
                continue
            if isinstance(call, set):
                rows = torch.zeros(N_ROWS, dtype=torch.bool, device=here())
                rows[list(call)] = True
            else:
                rows = torch.tensor(call, dtype=torch.int64, device=here())
            noted.note(rows)
            expected |= {row - begin for row in call if begin <= row < begin + n_rows}


def test_numbers_of_any_shape_and_type_are_noted():
    noted = NotedRows(0, 5)
    noted.note(torch.tensor([[1, 3], [3, 1]], dtype=torch.int32))
    with torch.inference_mode():
        noted.note(torch.tensor([4]))
    noted.note(torch.tensor([0], dtype=torch.int16))
    assert noted.take().tolist() == [0, 1, 3, 4]


def test_without_room_for_a_byte_a_row_nothing_is_noted_and_room_is_not_asked_for_again(monkeypatch):
    asked = []

    def full(*args, **kwargs):
        asked.append(args)
        raise torch.OutOfMemoryError

    noted = NotedRows(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        assert not noted.note(torch.tensor([1]))
    assert not noted.note(torch.tensor([1]))
    assert (len(asked), noted.take().tolist()) == (1, [])


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_what_streams_of_several_devices_and_threads_note_is_taken_whole(device):
    with on(device):
        for _ in range(20):
            noted, streams = NotedRows(0, 100_000), [torch.cuda.Stream() for _ in range(4)]
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
                    noted.note(torch.arange(number, 100_000, 5, device=here()))
            noted.note(torch.tensor([4]))  # from the host
            rows = noted.take()
            assert set(rows.tolist()) == {row for row in range(100_000) if row % 5 < 4} | {4}
            assert not len(noted.take())
