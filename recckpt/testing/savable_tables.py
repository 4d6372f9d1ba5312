"""The contract of a :class:`recckpt.types.SavableTable`, as a pytest suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recckpt.checkpoint.read_again import problems
from recckpt.errors import StateMismatchError
from recckpt.format.buckets import Slice, gen_slice
from recckpt.output_dir.at_path import locate_path
from recckpt.saver import Saver
from recckpt.sparse.table.checks import check_slot_name, spec_of
from recckpt.sparse.table.table import HashTable
from recckpt.testing.rows import ModelOf, Rows, rows_by_id, rows_of, saved_rows, some_values, writer_held
from recckpt.types import EMBEDDING, ITEM_BYTES, SavableTable, check_table_name, is_hashtable

_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


class SavableTableContract:
    """The contract of a savable table; to test yours, subclass this in a test file, with a name such as ``TestMine``.

    Attributes:
        ids: the ids that the tests insert. In checkpoints every int64 is a valid id.
    """

    ids: tuple[int, ...] = (_LEAST, _LEAST + 1, -(1 << 33), -2, -1, 0, 1, 2, 7, 65536, 1 << 40, _GREATEST)

    def make(self) -> SavableTable:
        """Return a new empty table, each time with the same name and slots."""
        raise NotImplementedError("return a new empty table of your class")

    def make_part(self, part: Slice) -> SavableTable:
        """Return an empty table for one rank of several, whose ``slice`` is ``part``: that rank's ids. Optional."""
        pytest.skip("make_part() is not overridden, so the table is tested on one rank only")

    def erase(self, table: SavableTable, ids: Tensor) -> None:
        """Drop the rows of ids with ``table.erase``; override this if the table's method has another name."""
        if not hasattr(table, "erase"):
            pytest.skip("the table has no method erase, so its rows cannot be dropped")
        table.erase(ids)

    def filled(self, n_ids: int | None = None, seed: int = 0) -> SavableTable:
        """Return a table with rows for the first ``n_ids`` of the ids; None for all."""
        table = self.make()
        self.put(table, self.ids[:n_ids], seed)
        return table

    def put(self, table: SavableTable, ids: tuple[int, ...], seed: int) -> Rows:
        """Insert rows of ids, and return them."""
        slots = {
            name: some_values(like, len(ids), seed + number)
            for number, (name, like) in enumerate([(EMBEDDING, table.embeddings()), *table.slots.items()])
        }
        rows = rows_by_id(ids, slots)
        embeddings = slots.pop(EMBEDDING)
        table.insert(torch.tensor(ids), embeddings, slots)
        return rows

    def saver(self, output_dir: Path, *tables: SavableTable, **options: Any) -> Saver:
        """Return a saver of tables."""
        return Saver(ModelOf(*tables), output_dir=str(output_dir), max_keep=None, **options)

    def test_an_empty_table_says_its_name_and_slots(self) -> None:
        """An empty table has names, shapes and dtypes, because a load compares them with the checkpoint."""
        table, other = self.make(), self.make()
        assert is_hashtable(table), "the table lacks a method of recckpt.types.SavableTable"
        assert check_table_name(table.name) == other.name, "make() gives each table the same name"
        assert table.ids().dtype == torch.int64
        assert len(table) == 0
        assert table.ids().shape == (0,)
        for name, values in {EMBEDDING: table.embeddings(), **table.slots}.items():
            assert values.dim() > 0, f"{name}: the first dimension counts the rows"
            assert len(values) == 0, f"{name}: an empty table has no rows"
            assert 0 not in values.shape[1:], f"{name}: a row has at least one value"
            assert spec_of(name, values).dtype in ITEM_BYTES, f"{name}: {values.dtype} cannot be saved"
        for name in table.slots:
            check_slot_name(table.name, name)

    def test_what_is_inserted_is_there_bit_for_bit(self) -> None:
        """Every int64 is a valid id; ids, embeddings and slots are in the same order; there are no other rows."""
        table = self.make()
        rows = self.put(table, self.ids, seed=1)
        assert rows_of(table) == rows
        assert len(table) == len(table.ids()) == len(rows)

    def test_a_row_that_is_inserted_again_is_replaced_and_new_ones_are_added(self) -> None:
        """Each id has one row, with the values that were inserted last."""
        table = self.filled(6)
        before = rows_of(table)
        after = self.put(table, self.ids[3:9], seed=2)
        assert len({*table.ids().tolist()}) == len(table), "an id has two rows"
        assert rows_of(table) == {**before, **after}

    def test_rows_may_come_without_slots(self) -> None:
        """If rows are inserted without slots, the table chooses the values of the slots."""
        table = self.make()
        values = some_values(table.embeddings(), 2, seed=3)
        table.insert(torch.tensor(self.ids[:2]), values)
        rows = rows_of(table)
        assert {id_: row[EMBEDDING] for id_, row in rows.items()} == {
            id_: row[EMBEDDING] for id_, row in rows_by_id(self.ids[:2], {EMBEDDING: values}).items()
        }
        assert all(row.keys() == {EMBEDDING, *table.slots} for row in rows.values())

    def test_clear_drops_all_rows(self) -> None:
        """A load clears the table, then inserts rows."""
        table = self.filled()
        table.clear()
        assert (len(table), rows_of(table)) == (0, {})
        assert self.put(table, self.ids[:3], seed=4) == rows_of(table)

    def test_a_checkpoint_has_all_rows_and_a_load_gives_them_back(self, tmp_path: Path) -> None:
        """A load into a new table restores all rows; readers find each row by its id."""
        table, twin = self.filled(), self.make()
        rows = rows_of(table)
        self.saver(tmp_path, table).save("a")
        assert rows_of(table) == rows, "a save has changed the table"
        assert saved_rows(tmp_path, "a", table.name, [EMBEDDING, *table.slots]) == rows
        assert [*problems(*locate_path(str(tmp_path / "a")), 1)] == []
        self.saver(tmp_path, twin).load()
        assert rows_of(twin) == rows

    def test_a_load_replaces_what_was_there(self, tmp_path: Path) -> None:
        """A load drops rows that the checkpoint lacks, and sets the others to their values in the checkpoint."""
        table = self.filled(8)
        rows, saver = rows_of(table), self.saver(tmp_path, table)
        saver.save("a")
        self.put(table, self.ids[5:], seed=5)
        saver.load()
        assert rows_of(table) == rows

    def test_rows_that_are_merged_in_leave_the_others(self, tmp_path: Path) -> None:
        """A load with ``"hashtable_clear": False`` adds and replaces rows, and keeps all other rows."""
        self.saver(tmp_path, self.filled(6, seed=6)).save("a")
        table = self.filled(9)
        expected = {**rows_of(table), **rows_of(self.filled(6, seed=6))}
        bank = {"path": str(tmp_path), "load": ["*"], "hashtable_clear": False}
        self.saver(tmp_path / "other", table).load_by_config(bank)
        assert rows_of(table) == expected

    def test_an_empty_table_is_saved_and_empties_another(self, tmp_path: Path) -> None:
        """A checkpoint without rows can be saved; loading it empties the table."""
        self.saver(tmp_path, self.make()).save("a")
        table = self.filled()
        self.saver(tmp_path, table).load()
        assert (len(table), rows_of(table)) == (0, {})

    def test_a_save_in_the_background_has_the_rows_of_its_moment(self, tmp_path: Path) -> None:
        """Training changes rows while the save writes; the save still has their old values."""
        table = self.filled(9)
        rows, saver = rows_of(table), self.saver(tmp_path, table)
        with writer_held() as let_on:
            handle = saver.save_async("a")
            self.put(table, self.ids[4:], seed=7)
            let_on()
            handle.wait()
        assert saved_rows(tmp_path, "a", table.name, [EMBEDDING, *table.slots]) == rows

    def test_each_checkpoint_of_a_chain_has_the_rows_of_its_moment(self, tmp_path: Path) -> None:
        """With ``deltas=True``, each checkpoint has the rows at the time of its save, with new and changed rows."""
        table = self.filled(5)
        saver, moments = self.saver(tmp_path, table, deltas=True), dict[str, Rows]()
        for number, ckpt_id in enumerate("abcd"):
            moments[ckpt_id] = rows_of(table)
            saver.save(ckpt_id)
            self.put(table, self.ids[2 + number : 7 + number], seed=8 + number)
        for ckpt_id, rows in moments.items():
            assert saved_rows(tmp_path, ckpt_id, table.name, [EMBEDDING, *table.slots]) == rows
            saver.load(ckpt_id=ckpt_id)
            assert rows_of(table) == rows

    def test_what_was_erased_is_in_no_later_checkpoint(self, tmp_path: Path) -> None:
        """A delta records erased ids; an id that was erased and inserted again has its new row."""
        table = self.filled()
        saver = self.saver(tmp_path, table, deltas=True)
        saver.save("a")
        self.erase(table, torch.tensor(self.ids[:4]))
        expected = {id_: row for id_, row in rows_of(self.filled()).items() if id_ not in self.ids[:4]}
        assert rows_of(table) == expected
        saver.save("b")
        expected |= self.put(table, self.ids[:1], seed=12)
        saver.save("c")
        for ckpt_id, rows in (("b", expected.keys() - {self.ids[0]}), ("c", expected.keys())):
            saver.load(ckpt_id=ckpt_id)
            assert rows_of(table) == {id_: expected[id_] for id_ in rows}

    def test_a_checkpoint_of_other_shapes_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        """A load compares shapes with the table's slots, and refuses the checkpoint before it changes a row."""
        table = self.filled()
        rows, embeddings = rows_of(table), table.embeddings()
        wider = HashTable((*embeddings.shape[1:], 2), name=table.name, dtype=embeddings.dtype)
        for name, values in table.slots.items():
            wider.add_slot(name, tuple(values.shape[1:]), dtype=values.dtype)
        wider.insert(torch.tensor([1]), torch.ones(1, *wider.embedding_shape, dtype=wider.dtype))
        self.saver(tmp_path, wider).save("a")
        with pytest.raises(StateMismatchError):
            self.saver(tmp_path, table).load()
        assert rows_of(table) == rows

    def test_the_parts_of_several_ranks_have_all_rows_between_them(self, tmp_path: Path) -> None:
        """Each rank loads the ids of its ``slice``, whatever the number of ranks that saved."""
        table = self.filled()
        self.saver(tmp_path, table).save("a")
        parts = [self.make_part(gen_slice(number, 3)) for number in range(3)]
        for part in parts:
            self.saver(tmp_path, part).load()
        assert sum(map(len, parts)) == len(table)
        assert {id_: row for part in parts for id_, row in rows_of(part).items()} == rows_of(table)
