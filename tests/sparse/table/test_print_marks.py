"""Marks by fingerprints: what a delta holds of rows that anybody may write, and their audit of other marks."""

import numpy as np
import pytest
import torch

from recckpt.errors import MissedRowsError
from recckpt.live.attached import AttachedTable
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import EMBEDDING, Box

N_ROWS = 300


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
    source.read(1, rows, target, is_last=True)
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


def test_rows_that_change_after_the_moment_are_in_the_next_delta():
    live, table = printed()
    tracker = Tracker()
    save(tracker, table, None, "a")
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
    assert save(tracker, table, "b", "c")[0] == [3, 5]


def test_after_a_failed_save_the_base_stays():
    live, table = printed()
    tracker = Tracker()
    save(tracker, table, None, "a")
    live.write(3)
    frozen = tracker.freeze(table)
    written_rows(frozen.delta("a"))
    frozen.failed()
    live.write(4)
    assert save(tracker, table, "a", "b")[0] == [3, 4]


def test_a_restore_is_a_base():
    live, table = printed()
    tracker = Tracker()
    tracker.begin(table, "a")
    live.write(5, is_announced=False)
    assert save(tracker, table, "a", "b")[0] == [5]


def test_a_row_that_changes_back_is_not_in_the_delta():
    live, table = printed()
    tracker = Tracker()
    save(tracker, table, None, "a")
    before = live.weight[3].clone()
    live.write(3)
    live.weight[3] = before
    assert save(tracker, table, "a", "b")[0] == []


def test_a_rank_without_rows_expects_no_changes():
    live, _ = printed()
    live.weight, live.box = live.weight[:0], lambda: Box((0, 0))
    tracker, table = Tracker(), AttachedTable(live, says_what_changes=False)
    for base, name in ((None, "a"), ("a", "b")):
        save(tracker, table, base, name)
    assert tracker.freeze(table).n_changed == 0


def test_the_choice_of_a_full_goes_by_what_had_changed_before():
    live, table = printed()
    tracker = Tracker()
    save(tracker, table, None, "a")
    assert tracker.freeze(table).n_changed == 0, "not known yet"
    live.write(*range(150))
    save(tracker, table, "a", "b")
    assert tracker.freeze(table).n_changed == 150


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
    assert "found 1 rows that changed and were not marked, such as [7]" in str(error)
    assert n_saves < audit
    frozen = tracker.freeze(table)
    assert frozen.is_replaced(str(n_saves))
    frozen.snapshot.close()
    save(tracker, table, None, "x")
    live.write(8, is_announced=False)
    assert save(tracker, table, "x", "y")[0] == [8], "fingerprints from now on"


def test_an_audit_sees_what_is_missed_after_a_restore():
    live = Plain()
    table, tracker = AttachedTable(live, audit=1), Tracker()
    tracker.begin(table, "a")
    live.write(7, is_announced=False)
    with pytest.raises(MissedRowsError):
        written_rows(tracker.freeze(table).delta("a"))


def audited():
    live = Plain()
    return live, AttachedTable(live, audit=1)


@pytest.mark.parametrize("audit", [None, 1])
def test_a_peek_changes_neither_prints_nor_marks(audit):
    live, table = printed() if audit is None else audited()
    tracker = Tracker()
    save(tracker, table, None, "a")
    live.write(3)
    peeked = tracker.peeking.freeze(table)
    assert written_rows(peeked.delta("a"))[0] == [3]
    peeked.committed("b")
    live.write(5)
    assert save(tracker, table, "a", "c")[0] == [3, 5]


def test_rows_that_are_others_since_a_base_have_other_prints_there():
    live, table = printed()
    tracker = Tracker()
    tracker.resume(table, "a", np.array([3, N_ROWS + 1]), np.empty(0, np.int64))
    live.write(5)
    assert save(tracker, table, "a", "b")[0] == [3, 5]


def test_marks_that_are_audited_go_on_from_a_base_of_which_rows_are_others():
    live, table = audited()
    tracker = Tracker()
    tracker.resume(table, "a", np.array([3]), np.empty(0, np.int64))
    live.write(5)
    assert save(tracker, table, "a", "b")[0] == [3, 5]
    live.write(7, is_announced=False)
    with pytest.raises(MissedRowsError):
        save(tracker, table, "b", "c")
