"""A job whose live tables lie on its ranks by rows, on one of them, or as copies, for test_shared_live_reads.py."""

from dataclasses import replace

import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.live.attached import FoundTable
from recckpt.live.boxes import AbsentTable, RankPart
from recckpt.live.tables import LiveTables
from recckpt.policies.deltas import Deltas
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable, SparseAdagrad, gen_slice
from recckpt.sparse.table.checks import spec_of
from recckpt.types import Box

TABLES = {"wide": (1500, 12), "narrow": (40, 2), "tiny": (3, 4)}  # name -> rows, values of one
SUM = "sparse_adagrad_sum"
SETTINGS = {"lr": 0.1}
LAST_STEP = 3
LAYOUTS = {
    "rows": {"wide": "rows", "narrow": "rows", "tiny": "rows"},
    "uneven": {"wide": "uneven", "narrow": "uneven", "tiny": "first"},
    "tables": {"wide": "last", "narrow": "first", "tiny": "last"},
    "copies": {"wide": "copies", "narrow": "copies", "tiny": "copies"},
    "mixed": {"wide": "rows", "narrow": "copies", "tiny": "last"},
    "ours": {"wide": "ours", "narrow": "ours", "tiny": "ours"},  # HashTables
    "both": {"wide": "ours", "narrow": "rows", "tiny": "copies"},
}


class Part:
    """The rows of a live table on one rank, in two tensors, without an optimizer that counts."""

    def __init__(self, name, n_rows, dim, box):
        self.name, self.n_rows, self._box, self.loaded = name, n_rows, box, 0
        rows = box.rows[1] - box.rows[0]
        self._tensors = {"embedding": torch.full((rows, dim), -1.0), SUM: torch.full((rows, dim), -1.0)}

    def box(self):
        return self._box

    def prepare(self):
        """Do nothing: there is no cache."""

    def tensors(self):
        return self._tensors

    def attach(self, door):
        self.door = door
        return lambda: None

    def scalars(self):
        return {}

    def settings(self):
        return SETTINGS

    def finish(self, scalars, settings):
        """Keep nothing."""

    def set(self, rows, step):
        """Set some rows of the table, those of them that are here."""
        own = rows[(rows >= self._box.rows[0]) & (rows < self._box.rows[1])]
        at = own - self._box.rows[0]
        self.door.announce(at)
        for slot, values in values_of(own, step, self._tensors[SUM].shape[1]).items():
            self._tensors[slot][at] = values


def values_of(ids, step, dim):
    """Return what a step sets rows to, by slot."""
    value = (ids[:, None] * 100 + step * 7 + torch.arange(dim)).float()
    return {"embedding": value, SUM: value * 3 + 1}


def changed_by(n_rows, step):
    """Return the rows that a step sets: the first one all of them."""
    rows = torch.arange(n_rows)
    return rows if step == 1 else rows[rows % (2 * step + 1) == 0]


def truth(name, step=LAST_STEP, tables=TABLES):
    """Return the bytes of all rows after a step."""
    n_rows, dim = tables[name]
    of_slots = {"embedding": torch.empty(n_rows, dim), SUM: torch.empty(n_rows, dim)}
    for at in range(1, step + 1):
        rows = changed_by(n_rows, at)
        for slot, values in values_of(rows, at, dim).items():
            of_slots[slot][rows] = values
    return {slot: dict(enumerate(map(tuple, values.tolist()))) for slot, values in of_slots.items()}


def box_of(how, n_rows, rank, size):
    """Return the rows of a rank."""
    if how == "copies":
        return Box((0, n_rows), rank, size)
    if how in ("first", "last"):
        return Box((0, n_rows) if rank == (0 if how == "first" else size - 1) else (0, 0))
    edges = [n_rows * i // size for i in range(size + 1)]
    if how == "uneven":  # the first has few, the others less and less
        edges[1:-1] = [n_rows // 10 + n_rows * 8 * i // (10 * size) for i in range(1, size)]
    return Box((edges[rank], edges[rank + 1]) if edges[rank] < edges[rank + 1] else (0, 0))


class LiveJob:
    """One rank.

    Args:
        url: where it saves.
        rank, size: this rank of how many.
        connect: gives a saver its ranks.
        layout: a key of LAYOUTS.
        tables: name -> rows, values of one.
    """

    def __init__(self, url, rank, size, layout, *, connect, tables=TABLES, batch_bytes=4 << 10):
        self.rank, self.size, self.shapes = rank, size, tables
        hows = {name: how for name, how in LAYOUTS[layout].items() if name in tables}
        self.own = gen_slice(rank, size)
        self.ours = {n: HashTable(tables[n][1], name=n, slice=self.own) for n, how in hows.items() if how == "ours"}
        self.model = nn.ModuleDict(self.ours)
        optimizer = SparseAdagrad(list(self.ours.values())) if self.ours else None
        found = [self._found(name, how) for name, how in hows.items() if how != "ours"]
        self.live = LiveTables(self.model, found, {})
        deltas = Deltas(full_every=10, max_chain_bytes=100.0, max_dirty=1.0)
        self.saver = Saver(self.model, optimizer, str(url), tables=self.live, deltas=deltas, concurrency=2)
        self.saver._to = replace(self.saver._to, sparse_saver=SparseSaver(2, batch_bytes=batch_bytes))
        connect(self.saver)
        self.manager = CheckpointManager(self.saver, 10**9, shard_id=rank, shard_num=size)

    def _found(self, name, how):
        n_rows, dim = self.shapes[name]
        box = box_of(how, n_rows, self.rank, self.size)
        live = Part(name, n_rows, dim, box)
        if box.rows == (0, 0):
            slots = tuple(spec_of(slot, values) for slot, values in live.tensors().items())
            live = AbsentTable(name, RankPart(n_rows, slots=slots, settings=SETTINGS), box)
        return FoundTable(live, name, "Part", (), lambda: (), "gradient", is_announced=True)

    def set_state(self, step):
        """Make the tables what they are after a step, where the one before has left them."""
        for name, (n_rows, dim) in self.shapes.items():
            rows = changed_by(n_rows, step)
            if name in self.ours:
                own = rows[self.own.owns(rows)]
                values = values_of(own, step, dim)
                self.ours[name].insert(own, values.pop("embedding"), values)
            elif isinstance(self.live[name].live, Part):
                self.live[name].live.set(rows, step)

    def save_chain(self, last=LAST_STEP):
        """Save a full checkpoint, and a delta a step."""
        for step in range(1, last + 1):
            self.set_state(step)
            info = self.saver.save(f"ckpt_{step}", self.rank, self.size, step=step)
            assert info.kind == ("full" if step == 1 else "delta")
        return info

    def rows(self):
        """Return table -> slot -> id -> numbers, of this rank."""
        rows = {
            name: _rows(table.ids().tolist(), {"embedding": table.embeddings(), **table.slots})
            for name, table in self.ours.items()
        }
        for name, table in self.live.items():
            rows[name] = _rows(range(*table.live.box().rows), table.live.tensors())
        return rows


def _rows(ids, slots):
    return {slot: dict(zip(ids, map(tuple, values.tolist()), strict=True)) for slot, values in slots.items()}


def check(of_ranks, layout, expected):
    """Check that the ranks have every row with every bit: of a copy each all of them, of others each once."""
    for name, slots in expected.items():
        of_table = [rank[name] for rank in of_ranks]
        for slot, rows in slots.items():
            if LAYOUTS[layout][name] == "copies":
                assert all(of_rank[slot] == rows for of_rank in of_table), (name, slot)
            else:
                assert sum(len(of_rank[slot]) for of_rank in of_table) == len(rows)
                assert {id_: row for of_rank in of_table for id_, row in of_rank[slot].items()} == rows, (name, slot)
