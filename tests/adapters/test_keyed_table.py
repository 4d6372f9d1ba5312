"""Rows whose ids come and go: by any changes of rows and of the map, a chain of deltas gives those of each moment."""

import numpy as np
import pytest
import torch
from support.sources import read_column
from support.sweeps import mostly_slow

from recckpt.adapters.keyed import AttachedKeyedTable, IdMap, KeyedTarget
from recckpt.adapters.torchrec_collision import SharedRows
from recckpt.errors import LiveTableError
from recckpt.sparse.files.owners import EVERY_ID
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import Box

N_ROWS = 130


class Keyed:
    """A table in two tensors, whose map is a dict."""

    name, n_rows, n_ids = "t", N_ROWS, N_ROWS

    def __init__(self):
        self.held = {"embedding": torch.arange(N_ROWS * 2.0).view(N_ROWS, 2), "sparse_sum": torch.zeros(N_ROWS)}
        self.rows, self.counts, self.doors = {}, {}, []

    def box(self):
        return Box((0, N_ROWS))

    def prepare(self):
        pass

    def tensors(self):
        return self.held

    def attach(self, door):
        self.doors.append(door)
        return lambda: self.doors.remove(door)

    def scalars(self):
        return {}

    settings = scalars

    def finish(self, scalars, settings):
        pass

    def id_map(self):
        ids = sorted(self.rows)
        rows, counts = ([of[id_] for id_ in ids] for of in (self.rows, self.counts))
        as_tensor = [torch.tensor(values, dtype=torch.int64) for values in (ids, rows, counts)]
        return IdMap(*as_tensor[:2], {"zch_counts": as_tensor[2]})

    owned_ids = EVERY_ID

    def place(self, ids, meta, *, drops):
        return torch.arange(len(ids))

    def take_ids(self, id_map):
        self.rows = dict(zip(id_map.ids.tolist(), id_map.rows.tolist(), strict=True))
        self.counts = dict(zip(id_map.ids.tolist(), id_map.meta["zch_counts"].tolist(), strict=True))

    def change(self, draw):
        """Train some rows, let ids go, come, and take the row of another."""
        written = draw.integers(N_ROWS, size=5)
        for door in self.doors:
            door.announce(torch.from_numpy(written))
        self.held["embedding"][written] += 1
        for id_ in draw.permutation(list(self.rows))[:3].tolist():
            row, other = self.rows.pop(id_), int(draw.integers(500))
            del self.counts[id_]
            if other not in self.rows and draw.random() < 0.7:
                self.rows[other], self.counts[other] = row, 1
        for id_ in draw.integers(500, size=6).tolist():
            free = sorted({*range(N_ROWS)} - {*self.rows.values()})
            if free and id_ not in self.rows:
                self.rows[id_], self.counts[id_] = int(draw.choice(free)), 1
        for id_ in draw.permutation(list(self.rows))[:2].tolist():
            self.counts[id_] += 1

    def truth(self):
        return {
            id_: (self.held["embedding"][row].tolist(), self.held["sparse_sum"][row].item(), self.counts[id_])
            for id_, row in self.rows.items()
        }


def read(source):
    rows = np.arange(source.n_rows)
    ids = source.ids.to_tensor(source.n_rows).tolist()
    targets = [np.zeros((len(rows), slot.row_bytes), np.uint8) for slot in source.slots]
    for column, target in enumerate(targets, 1):
        read_column(source, column, rows, target.reshape(-1), is_last=column == len(targets))
    values = {slot.name: target.view(slot.dtype) for slot, target in zip(source.slots, targets, strict=True)}
    return {
        id_: (values["embedding"][i].tolist(), values["sparse_sum"][i].item(), values["zch_counts"][i].item())
        for i, id_ in enumerate(ids)
    }


@mostly_slow()
@pytest.mark.parametrize("how", [{}, {"says_what_changes": False}, {"audit": 2}])
def test_a_chain_of_deltas_gives_the_rows_of_each_moment(how):
    draw, live, tracker = np.random.default_rng(0), Keyed(), Tracker()
    table = AttachedKeyedTable(live, **how)
    replayed, before, base = {}, {}, ""
    for number in range(40):
        live.change(draw)
        frozen, truth = tracker.freeze(table), live.truth()
        source = frozen.snapshot if frozen.is_replaced(base) else frozen.delta(base)
        live.change(draw)  # beside the save
        deletes = source.deletes().tolist()
        upserts = read(source)
        assert frozen.is_replaced(base) == (number == 0)
        replayed = {id_: row for id_, row in replayed.items() if id_ not in deletes} | upserts
        if number % 5 == 3:
            frozen.failed()
            replayed = before
        else:
            assert replayed == truth
            base, before = f"c{number}", replayed
            frozen.committed(base)
        source.close()


def test_rows_that_a_filter_looks_at_can_be_read_until_they_are_released():
    draw, live, tracker = np.random.default_rng(1), Keyed(), Tracker()
    for how in ({}, {"says_what_changes": False}, {"audit": 1}):
        table = AttachedKeyedTable(live, **how)
        live.change(draw)
        tracker = Tracker()
        tracker.begin(table, "base")
        frozen, truth = tracker.freeze(table), live.truth()
        changes = frozen.delta("base", narrows=False)
        assert changes.n_rows == 0
        live.change(draw)
        assert read(frozen.snapshot) == truth
        changes.close()


def test_what_is_unchanged_since_a_base_has_the_same_map():
    live, tracker = Keyed(), Tracker()
    table = AttachedKeyedTable(live)
    live.change(np.random.default_rng(2))
    tracker.begin(table, "base")
    assert tracker.is_unchanged(table, "base")
    live.counts[min(live.counts)] += 1
    assert not tracker.is_unchanged(table, "base")


def test_values_are_set_by_id_and_ids_are_not_made_so():
    live = Keyed()
    table = AttachedKeyedTable(live)
    live.change(np.random.default_rng(3))
    ids = torch.tensor(sorted(live.rows))
    table.insert(ids[:2], torch.full((2, 2), 7.0))
    assert table.embeddings()[:2].tolist() == [[7, 7], [7, 7]]
    assert table.ids().tolist() == ids.tolist()
    assert table.slots["zch_counts"].tolist() == [live.counts[id_] for id_ in ids.tolist()]
    with pytest.raises(LiveTableError, match="found 1 ids without a row"):
        table.insert(torch.tensor([501]), torch.zeros(1, 2))


def test_a_map_that_gives_a_row_twice_is_refused():
    live = Keyed()
    table = AttachedKeyedTable(live)
    live.rows, live.counts = {1: 4, 2: 4}, {1: 1, 2: 1}
    with pytest.raises(LiveTableError, match="repeated ids or rows, or rows outside 0 to 129"):
        Tracker().freeze(table)


def test_a_load_that_takes_nothing_leaves_the_ids_as_they_are():
    live = Keyed()
    target = KeyedTarget(AttachedKeyedTable(live))
    live.change(np.random.default_rng(4))
    truth = live.truth()
    target.begin()
    assert target.finish() == 0
    assert live.truth() == truth


class Door:
    def __init__(self):
        self.heard = []

    def announce(self, rows):
        self.heard.append(rows.tolist())


def test_the_rows_of_two_tables_are_hooked_once_and_announced_to_both():
    live, doors = Keyed(), [Door(), Door()]
    shared = SharedRows(live)
    ends = [shared.attach(door) for door in doors]
    [weak] = live.doors
    weak.announce(torch.tensor([3]))
    ends[0]()
    weak.announce(torch.tensor([4]))
    assert [door.heard for door in doors] == [[[3]], [[3], [4]]]
    assert live.doors == [weak]
    ends[1]()
    assert live.doors == []
