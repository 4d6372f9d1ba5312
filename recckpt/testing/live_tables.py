"""The contract of a :class:`recckpt.types.LiveTable`, as a pytest suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from recckpt.checkpoint.read_again import problems
from recckpt.errors import CheckpointExistsError, LiveTableError, StateMismatchError
from recckpt.format.manifest import Manifest
from recckpt.live import LiveTables, live_tables
from recckpt.output_dir.at_path import locate_path
from recckpt.policies.deltas import Deltas
from recckpt.saver import Saver
from recckpt.sparse.table.checks import check_slot_name, spec_of
from recckpt.sparse.table.table import HashTable
from recckpt.testing.rows import ModelOf, Rows, bytes_of, rows_by_id, saved_rows, writer_held
from recckpt.types import EMBEDDING, ITEM_BYTES, LiveTable, check_table_name


class NotingDoor:
    """A door that records the values of each row when the table first notifies it of a change to the row."""

    def __init__(self, table: LiveTable) -> None:
        self._table = table
        self.noted: Rows = {}  # key: index in the box
        self.is_replaced = False

    def announce(self, rows: Tensor) -> None:
        """Record rows, given by index or mask, unless they were recorded before."""
        numbers = (rows.nonzero() if rows.dtype == torch.bool else rows).detach().cpu().flatten()
        n_rows = len(self._table.tensors()[EMBEDDING])
        assert not len(numbers) or 0 <= int(numbers.min()) <= int(numbers.max()) < n_rows, (
            f"rows {numbers.tolist()} are in the notification, expected indices in the box, 0 to {n_rows - 1}"
        )
        now = rows_by_id(range(n_rows), self._table.tensors())
        self.noted = {**{row: now[row] for row in numbers.tolist()}, **self.noted}

    def announce_all(self) -> None:
        """Record all rows that were not recorded before."""
        self.announce(torch.arange(len(self._table.tensors()[EMBEDDING])))

    def replaced(self) -> None:
        """Record that the table reports the replacement of all its rows."""
        self.is_replaced = True

    def failed(self, error: Exception) -> None:
        """Fail the test."""
        raise AssertionError("the table no longer knows what changes") from error


class LiveTableContract:
    """The contract of a live table; to test yours, subclass this in a test file, with a name that begins with ``Test``.

    Attributes:
        options: options of ``live_tables``, such as ``{"marks": "fingerprints"}``.
        says_which: whether training changes exactly the rows passed to :meth:`train`, and notifies of exactly these;
            False if it may change, or notify of, other rows too.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    says_which: ClassVar[bool] = True

    def make(self) -> LiveTable:
        """Return a new table of at least 20 rows, each time with the same name, rows and slots."""
        raise NotImplementedError("return a new table of your class")

    def train(self, table: LiveTable, rows: Tensor) -> None:
        """Change rows, given by int64 index in the box, as training does; no other rows if ``says_which`` is True."""
        raise NotImplementedError("change these rows of the table")

    def attached(self, table: LiveTable, output_dir: Path) -> tuple[LiveTables, Saver]:
        """Return the :class:`LiveTables` of a table, and a saver that makes deltas of them."""
        model = nn.Module()
        tables = live_tables(model, adapters=[table], **self.options)
        options: dict[str, Any] = {"max_keep": None, "deltas": Deltas(max_dirty=1, max_chain_bytes=100)}
        return tables, Saver(model, output_dir=str(output_dir), tables=tables, **options)

    def test_it_says_what_it_is(self) -> None:
        """A checkpoint can store the table's name, rows, slots, scalars and settings."""
        table, other = self.make(), self.make()
        assert isinstance(table, LiveTable), "the table lacks a method of recckpt.types.LiveTable"
        assert check_table_name(table.name) == other.name, "make() gives each table the same name"
        first, end = table.box().rows
        assert 0 <= first < end <= table.n_rows
        assert end - first >= 20, "make() returns a table of at least 20 rows"
        table.prepare()
        tensors = table.tensors()
        assert EMBEDDING in tensors
        for name, values in tensors.items():
            assert len(values) == end - first, f"{name}: one row per row of the box, in this order"
            assert values.is_contiguous(), name
            assert spec_of(name, values).dtype in ITEM_BYTES, f"{name}: {values.dtype} cannot be saved"
        for name in tensors.keys() - {EMBEDDING}:
            check_slot_name(table.name, name)
        assert all(type(value) in (int, float) for value in table.scalars().values())
        assert all(type(name) is str for name in table.settings())

    def test_its_tensors_are_the_memory_and_no_copies(self) -> None:
        """Training changes the tensors in place; a second call returns tensors at the same addresses."""
        table = self.make()
        remove = table.attach(NotingDoor(table))
        self.train(table, torch.arange(20))  # some optimizers create their states at the first step
        table.prepare()
        tensors = table.tensors()
        before = bytes_of(tensors[EMBEDDING])
        self.train(table, torch.tensor([3]))
        table.prepare()
        again = table.tensors()
        assert {name: values.data_ptr() for name, values in tensors.items()} == {
            name: values.data_ptr() for name, values in again.items()
        }
        changed = [row for row, now in enumerate(bytes_of(tensors[EMBEDDING])) if now != before[row]]
        assert changed == [3] or (3 in changed and not self.says_which), "tensors() does not return the trained memory"
        remove()

    def test_a_row_is_announced_before_it_changes(self) -> None:
        """A change without a notification is missing from deltas; after a late one, a save may have half a change."""
        table = self.make()
        self.train(table, torch.arange(20))
        door = NotingDoor(table)
        remove = table.attach(door)
        for rows in ([0], [5, 5, 19, 1], [1, 2]):
            door.noted.clear()
            before = live_rows(table)
            self.train(table, torch.tensor(rows))
            changed = {row for row, now in live_rows(table).items() if now != before[row]}
            assert changed == {*rows} or not self.says_which, "train() changes exactly the rows passed to it"
            assert not changed - door.noted.keys(), f"rows {changed - door.noted.keys()} changed without a notification"
            late = [row for row in changed if door.noted[row] != before[row]]
            assert not late, f"the notification for rows {late} came after they had changed"
            assert not door.is_replaced, "training must not call replaced(), which is for loads and ends a running save"
        remove()

    def test_what_ends_the_announcements_ends_them(self) -> None:
        """The function that ``attach`` returned ends the notifications; training continues without them."""
        table = self.make()
        door = NotingDoor(table)
        table.attach(door)()
        self.train(table, torch.tensor([4]))
        assert (door.noted, door.is_replaced) == ({}, False)

    def test_a_checkpoint_has_all_rows_and_a_load_gives_them_back(self, tmp_path: Path) -> None:
        """A load restores rows bit for bit, and the optimizer's scalars; readers find each row by its id."""
        table, twin = self.make(), self.make()
        tables, saver = self.attached(table, tmp_path)
        self.train(table, torch.arange(0, 20, 2))
        self.train(table, torch.tensor([3]))
        rows = live_rows(table)
        saver.save("a")
        assert live_rows(table) == rows, "a save has changed the table"
        assert self.saved(tables, tmp_path, "a") == rows
        assert [*problems(*locate_path(str(tmp_path / "a")), 1)] == []
        _, loader = self.attached(twin, tmp_path)
        self.train(twin, torch.arange(1, 12))
        loader.load()
        assert live_rows(twin) == rows
        assert dict(twin.scalars()) == dict(table.scalars()), "finish() has not set the scalars"

    def test_a_load_writes_where_the_rows_lie(self, tmp_path: Path) -> None:
        """A load overwrites later changes, in place; saves after the load have the table's present rows."""
        table = self.make()
        tables, saver = self.attached(table, tmp_path)
        self.train(table, torch.arange(20))
        rows, addresses = live_rows(table), {name: t.data_ptr() for name, t in table.tensors().items()}
        saver.save("a")
        self.train(table, torch.arange(3, 9))
        saver.save("b")
        saver.load(ckpt_id="a")
        assert live_rows(table) == rows
        assert {name: t.data_ptr() for name, t in table.tensors().items()} == addresses
        saver.save("c")
        self.train(table, torch.tensor([7]))
        saver.save("d")
        assert self.saved(tables, tmp_path, "c") == rows
        assert self.saved(tables, tmp_path, "d") == live_rows(table)

    def test_a_delta_has_the_rows_that_changed(self, tmp_path: Path) -> None:
        """A delta writes only changed rows; each checkpoint of the chain still has all rows at the time of its save."""
        table = self.make()
        tables, saver = self.attached(table, tmp_path)
        self.train(table, torch.arange(20))
        saver.save("base")
        for ckpt_id, rows in (("a", [2]), ("b", [7, 2, 7]), ("c", [11, 0])):
            self.train(table, torch.tensor(rows))
            n_written = upserts(saver.save(ckpt_id))
            assert self.saved(tables, tmp_path, ckpt_id) == live_rows(table)
            if self.says_which:
                assert n_written == len({*rows}), f"a delta has {n_written} rows, expected the {len({*rows})} changed"

    def test_a_change_is_in_one_delta_and_not_in_the_next(self, tmp_path: Path) -> None:
        """Saving the table sends no notifications; rows that a failed save did not write are in the next delta."""
        table = self.make()
        tables, saver = self.attached(table, tmp_path)
        self.train(table, torch.arange(20))
        saver.save("base")
        self.train(table, torch.tensor([5, 6]))
        with pytest.raises(CheckpointExistsError):
            saver.save("base")
        self.train(table, torch.tensor([6, 7]))
        n_written = upserts(saver.save("a"))
        assert self.saved(tables, tmp_path, "a") == live_rows(table)
        assert upserts(saver.save("b")) == 0
        assert n_written == 3 or not self.says_which

    def test_a_save_in_the_background_has_the_rows_of_its_moment(self, tmp_path: Path) -> None:
        """Training changes rows while the save writes; the save still has their old values."""
        table = self.make()
        tables, saver = self.attached(table, tmp_path)
        for ckpt_id in ("full", "delta"):
            self.train(table, torch.arange(12))
            rows = live_rows(table)
            with writer_held() as let_on:
                handle = saver.save_async(ckpt_id)
                self.train(table, torch.arange(6, 20))
                self.train(table, torch.tensor([0]))
                let_on()
                handle.wait()
            assert self.saved(tables, tmp_path, ckpt_id) == rows
        saver.save("last")
        assert self.saved(tables, tmp_path, "last") == live_rows(table)

    def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        """A load refuses other shapes, and ids without a row in the table, before it changes any row."""
        table = self.make()
        _, saver = self.attached(table, tmp_path / "own")
        self.train(table, torch.arange(20))
        rows, embeddings = live_rows(table), table.tensors()[EMBEDDING]
        shapes = ((*embeddings.shape[1:], 2), tuple(embeddings.shape[1:]))
        for number, (shape, id_) in enumerate(zip(shapes, (0, table.n_rows), strict=True)):
            other = HashTable(shape, name=table.name, dtype=embeddings.dtype)
            other.insert(torch.tensor([id_]), torch.ones(1, *shape, dtype=other.dtype))
            url = str(tmp_path / str(number))
            Saver(ModelOf(other), output_dir=url).save("a")
            with pytest.raises((StateMismatchError, LiveTableError)):
                saver.load_by_config({"path": url, "load": ["*@id", "*@embedding"]})
            assert live_rows(table) == rows

    @staticmethod
    def saved(tables: LiveTables, output_dir: Path, ckpt_id: str) -> Rows:
        """Return the rows of a checkpoint by index in the box."""
        [table] = tables.values()
        first = table.live.box().rows[0]
        rows = saved_rows(output_dir, ckpt_id, table.name, [spec.name for spec in table.specs])
        return {id_ - first: row for id_, row in rows.items()}


def live_rows(table: LiveTable) -> Rows:
    """Return the present rows of a table by index in the box."""
    table.prepare()
    tensors = table.tensors()
    return rows_by_id(range(len(tensors[EMBEDDING])), tensors)


def upserts(record: Manifest) -> int:
    """Return how many rows the save of a single table wrote."""
    [entry] = record.tables
    return entry.rows if entry.delta is None else entry.delta.upserts
