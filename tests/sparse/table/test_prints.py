"""Fingerprints of rows: what they depend on, what deltas by them hold, and how they audit marks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources import read_column
from support.sweeps import mostly_slow

from recckpt.errors import MissedRowsError
from recckpt.live.attached import AttachedTable
from recckpt.live.store import RowRange
from recckpt.sparse import HashTable
from recckpt.sparse.table import prints as fingerprints_module
from recckpt.sparse.table import tracker as tracker_module
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.prints import fingerprints, prints_on_device
from recckpt.sparse.table.snapshot import Log, PreImages, Snapshot
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import EMBEDDING, Box, SlotSpec

N_ROWS = 300


def table_of(n_rows, dim=4, dtype=torch.float32, **slots):
    table = HashTable(dim, name="t", dtype=dtype)
    table.insert(torch.arange(n_rows), torch.randn(n_rows, dim, generator=torch.Generator().manual_seed(1)).to(dtype))
    for name, shape in slots.items():
        table.add_slot(name, shape)
    return table


def prints_of(table):
    return fingerprints(table.store.snapshot("t"))


@mostly_slow()
@pytest.mark.parametrize("dim", [1, 3, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_bit_of_a_row_changes_its_print_and_no_other(dim, dtype):
    table = table_of(200, dim, dtype, **{"sparse_x": (), "sparse_y": (3,)})
    before = prints_of(table)
    values = table.store.columns["embedding"].blocks[0][:200]
    assert len({*before.tolist()}) == len({row.view(torch.uint8).numpy().tobytes() for row in values})
    for name, column in table.store.columns.items():
        memory = column.blocks[0][:200].contiguous().view(200, -1)
        assert memory.data_ptr() == column.blocks[0].data_ptr()
        n_bytes = memory.dtype.itemsize
        for at in range(memory.shape[1]):
            row = int(np.random.default_rng(at).integers(200))
            byte = memory.view(torch.uint8)[row, n_bytes * at : n_bytes * at + 1]
            byte ^= 1
            assert np.flatnonzero(prints_of(table) != before).tolist() == [row], name
            byte ^= 1
    assert (prints_of(table) == before).all()


def test_zeros_and_negative_zeros_and_two_nans_and_rows_that_swap_their_values_have_other_prints():
    table = HashTable(1, name="t")
    table.insert(torch.arange(4), torch.tensor([[0.0], [-0.0], [float("nan")], [float("nan")]]))
    table.store.columns["embedding"].blocks[0][3].view(torch.int32)[0] += 1
    assert len({*prints_of(table).tolist()}) == 4
    table = table_of(2, 8, sparse_x=(8,))
    table.store.columns["sparse_x"].blocks[0][:2] = torch.randn(2, 8)
    before = prints_of(table)
    rows = table.store.columns["embedding"].blocks[0]
    rows[:2] = rows[[1, 0]].clone()
    assert (prints_of(table) != before).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_rows_of_which_any_two_signs_flip_have_other_prints(dtype):
    table = table_of(200, 12, dtype)
    before = prints_of(table)
    rows = table.store.columns["embedding"].blocks[0][:200]
    for one in range(12):
        for other in range(one):
            rows[:, [one, other]] *= -1
            assert (prints_of(table) != before).all(), (one, other)
            rows[:, [one, other]] *= -1
    assert (prints_of(table) == before).all()


@given(
    n_rows=st.integers(0, 300),
    piece=st.integers(1, 5000),
    is_on_cpu=st.booleans(),
    is_in_place=st.booleans(),
    dim=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
@settings(deadline=None, max_examples=60)
def test_prints_do_not_depend_on_how_rows_are_read(n_rows, piece, is_on_cpu, is_in_place, dim, dtype):
    table = table_of(n_rows, dim, dtype, sparse_x=(3,), sparse_y=())
    table.add_slot("sparse_z", (dim,), dtype=torch.uint8)
    expected = prints_of(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints_module, "_PIECE_BYTES", piece)
        patch.setattr(PreImages, "is_on_cpu", is_on_cpu)  # those of a device are made by torch
        if not is_in_place:
            patch.setattr(Snapshot, "in_place", property(lambda rows: None, lambda rows, images: None), raising=False)
        before = values_of(table)
        assert (prints_of(table) == expected).all()
    assert values_of(table) == before


def values_of(table):
    columns = table.store.columns.items()
    return {slot: column.to_tensor(len(table)).numpy().tobytes() for slot, column in columns}


def test_rows_whose_memory_begins_anywhere_have_the_same_prints_on_a_device():
    memory, spec = torch.randint(256, (1 + 20 * 8,), dtype=torch.uint8), SlotSpec(EMBEDDING, "uint8", (8,))
    for begin in (0, 1):
        values = memory[begin : begin + 160].view(20, 8)
        values[:] = torch.arange(160).view(20, 8)
        columns = {EMBEDDING: Column.over(spec, values)}
        rows = Snapshot("t", 20, RowRange(0, 20), columns, log=Log([spec]), on_close=list)
        assert (prints_on_device(rows, rows.in_place, 3, 17) == fingerprints(rows)[3:17]).all()


def test_rows_that_change_meanwhile_have_the_prints_of_the_snapshot():
    table = table_of(500)
    expected = prints_of(table)
    snapshot = table.store.snapshot("t")
    table.insert(torch.arange(0, 500, 3), torch.zeros(167, 4))
    assert (fingerprints(snapshot) == expected).all()
    assert (prints_of(table) != expected).sum() == 167


class Plain:
    """A live table of one tensor, which announces what it is asked to."""

    name = "t"
    n_rows = N_ROWS

    def __init__(self):
        self.weight = torch.randn(N_ROWS, 4, generator=torch.Generator().manual_seed(1))
        self.door = None

    def box(self):
        return Box((0, N_ROWS))

    def prepare(self):
        pass

    def tensors(self):
        return {EMBEDDING: self.weight}

    def attach(self, door):
        self.door = door
        return lambda: None

    def scalars(self):
        return {}

    def settings(self):
        return {}

    def finish(self, scalars, settings):
        pass

    def write(self, *rows, is_announced=True):
        if is_announced:
            self.door.announce(torch.tensor(rows))
        self.weight[list(rows)] += 1


def printed(**options):
    live = Plain()
    return live, AttachedTable(live, says_what_changes=False, **options)


def written_rows(source):
    """Read a source as a save does, and return its rows."""
    rows = np.arange(source.n_rows)
    target = np.empty(source.n_rows * 16, np.uint8)
    read_column(source, 1, rows, target, is_last=True)
    return source.ids.gather(rows).tolist(), target.view(np.float32).reshape(-1, 4)


def save(tracker, table, base, name):
    frozen = tracker.freeze(table)
    source = frozen.snapshot if base is None or frozen.is_replaced(base) else frozen.delta(base)
    ids, values = written_rows(source)
    source.close()
    frozen.committed(name)
    return ids, values


def test_a_delta_holds_the_rows_that_changed_whoever_wrote_them():
    live, table = printed()
    tracker = Tracker()
    assert len(save(tracker, table, None, "a")[0]) == N_ROWS
    live.write(3, 7)
    live.write(9, is_announced=False)
    ids, values = save(tracker, table, "a", "b")
    assert ids == [3, 7, 9]
    assert np.array_equal(values, live.weight[[3, 7, 9]])
    assert save(tracker, table, "b", "c")[0] == []
    before = live.weight[3].clone()
    live.write(3)
    live.weight[3] = before
    assert save(tracker, table, "c", "d")[0] == [], "it has changed back"


def test_rows_that_change_after_the_moment_and_those_of_a_failed_save_are_in_the_next_delta():
    live, table = printed()
    tracker = Tracker()
    tracker.begin(table, "a")  # as a restore does
    live.write(3)
    before = live.weight.clone()
    frozen = tracker.freeze(table)
    live.write(3, 5)
    source = frozen.delta("a")
    ids, values = written_rows(source)
    assert ids == [3]
    assert np.array_equal(values, before[[3]])
    source.close()
    frozen.committed("b")
    frozen = tracker.freeze(table)
    written_rows(frozen.delta("b"))
    frozen.failed()
    live.write(4)
    assert save(tracker, table, "b", "c")[0] == [3, 4, 5]


def test_the_choice_of_a_full_goes_by_what_had_changed_before():
    live, table = printed()
    tracker = Tracker()
    save(tracker, table, None, "a")
    assert tracker.freeze(table).n_changed == 0, "not known yet"
    live.write(*range(150))
    save(tracker, table, "a", "b")
    assert tracker.freeze(table).n_changed == 150
    live.weight, live.box = live.weight[:0], lambda: Box((0, 0))
    tracker, table = Tracker(), AttachedTable(live, says_what_changes=False)
    for base, name in ((None, "a"), ("a", "b")):
        save(tracker, table, base, name)
    assert tracker.freeze(table).n_changed == 0, "a rank without rows"


def test_a_save_that_read_nothing_is_no_base():
    _, table = printed()
    tracker = Tracker()
    frozen = tracker.freeze(table)
    frozen.snapshot.close()
    frozen.committed("a")
    assert tracker.freeze(table).is_replaced("a")


def test_an_audit_passes_where_all_changes_were_announced():
    live = Plain()
    table, tracker, base = AttachedTable(live, audit=2), Tracker(), None
    for number, rows in enumerate([(1,), (2, 3), (), (4, 200), (4,), (299,)]):
        if rows:
            live.write(*rows)
        ids, _ = save(tracker, table, base, str(number))
        assert ids == (list(rows) if number else list(range(N_ROWS)))
        base = str(number)


@pytest.mark.parametrize("audit", [1, 2, 3])
def test_an_audit_fails_the_save_that_lacks_a_row_and_the_next_holds_all(audit):
    live = Plain()
    table, tracker = AttachedTable(live, audit=audit), Tracker()
    save(tracker, table, None, "0")
    live.write(7, is_announced=False)
    n_saves, error = 0, None
    while error is None:
        live.write(n_saves)
        frozen = tracker.freeze(table)
        try:
            written_rows(frozen.delta(str(n_saves)))
            n_saves += 1
            frozen.committed(str(n_saves))
        except MissedRowsError as missed:
            frozen.failed()
            error = missed
    assert (error.table, error.n_rows, error.ids) == ("t", 1, [7])
    assert "found 1 changed rows that no hook had marked, such as [7]" in str(error)
    assert n_saves < audit
    frozen = tracker.freeze(table)
    assert frozen.is_replaced(str(n_saves))
    frozen.snapshot.close()
    save(tracker, table, None, "x")
    live.write(8, is_announced=False)
    assert save(tracker, table, "x", "y")[0] == [8], "fingerprints from now on"


def test_a_row_that_was_missed_makes_the_save_that_looks_at_it_hold_all(caplog):
    live = Plain()
    table, tracker = AttachedTable(live), Tracker()
    save(tracker, table, None, "a")
    live.write(7, is_announced=False)
    live.write(9)
    assert save(tracker, table, "a", "b")[0] == list(range(N_ROWS))
    [warning] = caplog.messages
    assert "table 't': found 1 rows that changed and were not marked, such as [7]" in warning
    assert "Write to the weight itself, under torch.no_grad()" in warning
    frozen = tracker.freeze(table)
    assert frozen.is_replaced("b"), "what is not seen may have written while that save read"
    frozen.snapshot.close()
    frozen.failed()
    save(tracker, table, None, "c")
    live.write(8, is_announced=False)
    assert save(tracker, table, "c", "d")[0] == [8], "fingerprints from now on"
    rows = tracker.freeze(table)
    live.write(11, is_announced=False)
    assert written_rows(rows.delta("d"))[0] == [], "each snapshot is a copy"


@pytest.mark.parametrize("how", ["saved", "restored"])
def test_whatever_row_was_missed_is_found_in_a_bounded_number_of_saves(monkeypatch, how):
    monkeypatch.setattr(tracker_module, "_FIRST_BYTES", 64 * 16)  # so that each save looks at 64 rows
    for row in (0, 63, 64, 170, N_ROWS - 1):
        live = Plain()
        table, tracker = AttachedTable(live), Tracker()
        save(tracker, table, None, "0") if how == "saved" else tracker.begin(table, "0")
        n_rows = []
        for number in range(1, 9):
            if number == 3:
                live.write(row, is_announced=False)
            live.write(number)
            n_rows.append(len(save(tracker, table, str(number - 1), str(number))[0]))
            if n_rows[-1] == N_ROWS:
                break
        assert n_rows[-1] == N_ROWS
        assert len(n_rows) < 3 + -(-N_ROWS // 64)


def test_rows_that_were_marked_since_they_were_looked_at_are_not_missed(monkeypatch, caplog):
    monkeypatch.setattr(tracker_module, "_FIRST_BYTES", 64 * 16)
    live, random = Plain(), np.random.default_rng(5)
    table, tracker = AttachedTable(live), Tracker()
    save(tracker, table, None, "0")
    for number in range(1, 40):
        rows = np.unique(random.integers(N_ROWS, size=9)).tolist()
        live.write(*rows)
        if number % 7 == 0:
            frozen = tracker.freeze(table)
            written_rows(frozen.delta(str(number - 1)))
            frozen.failed()
        assert save(tracker, table, str(number - 1), str(number))[0] == rows
    assert not caplog.messages


def test_a_table_whose_rows_are_replaced_again_and_again_is_not_looked_at(monkeypatch):
    live = Plain()
    table, tracker = AttachedTable(live), Tracker()
    for number in range(4):
        live.door.announce_all()
        frozen = tracker.freeze(table)
        written_rows(frozen.snapshot)
        is_looked_at = getattr(frozen.snapshot, "known_prints", None) is not None
        assert is_looked_at == (number < 2)
        frozen.committed(str(number))


def audited():
    live = Plain()
    return live, AttachedTable(live, audit=1)


@pytest.mark.parametrize("audit", [None, 1])
def test_a_peek_changes_neither_prints_nor_marks(audit):
    live, table = printed() if audit is None else audited()
    tracker = Tracker()
    save(tracker, table, None, "a")
    live.write(3)
    peeked = tracker.freeze(table, keeps_marks=True)
    assert written_rows(peeked.delta("a"))[0] == [3]
    peeked.committed("b")
    live.write(5)
    assert save(tracker, table, "a", "c")[0] == [3, 5]


def test_prints_and_marks_that_are_audited_go_on_from_a_base_of_which_rows_are_others():
    for (live, table), others in ((printed(), [3, N_ROWS + 1]), (audited(), [3])):
        tracker = Tracker()
        tracker.resume(table, "a", np.array(others), np.empty(0, np.int64))
        live.write(5)
        assert save(tracker, table, "a", "b")[0] == [3, 5]
    live.write(7, is_announced=False)
    with pytest.raises(MissedRowsError):
        save(tracker, table, "b", "c")
