"""The contract of tables that are saved whole, held against those that there are; and what it finds in wrong ones."""

import pytest
import torch
from support.broken_contracts import broken
from support.foreign import ForeignTable

from recckpt.sparse import HashTable, ShardedHashTable
from recckpt.testing import SavableTableContract


class TestHashTable(SavableTableContract):
    def make(self):
        return self.with_slots(HashTable(3, name="t"))

    def make_part(self, part):
        return self.with_slots(HashTable(3, name="t", slice=part))

    @staticmethod
    def with_slots(table):
        table.add_slot("sparse_sum", (3,))
        table.add_slot("count", (), dtype=torch.int64)
        return table


@pytest.mark.slow
class TestHalfPrecision(SavableTableContract):
    def make(self):
        return HashTable((2, 2), name="item/ü", dtype=torch.bfloat16)


@pytest.mark.slow
class TestShardedHashTable(SavableTableContract):
    def make(self):
        return ShardedHashTable(2, name="t")


class TestForeignTable(SavableTableContract):
    table = ForeignTable

    def make(self):
        return self.table("t", torch.empty(0, dtype=torch.int64), torch.empty(0, 2), {"sparse_sum": torch.empty(0)})

    def make_part(self, part):
        table = self.make()
        table.slice = part
        return table


class AddsWhereItShouldReplace(ForeignTable):
    def clear(self):
        pass


class HasAnIdTwice(ForeignTable):
    def insert(self, ids, embeddings, slots=None):
        self._ids, self._embeddings = torch.cat([self._ids, ids]), torch.cat([self._embeddings, embeddings])
        for name, values in self._slots.items():
            self._slots[name] = torch.cat([values, slots[name]])


class DropsASlot(ForeignTable):
    @property
    def slots(self):
        return {} if len(self) else self._slots


class StartsSlotsAnew(ForeignTable):
    def insert(self, ids, embeddings, slots=None):
        super().insert(ids, embeddings)


class HasNoRowFor(ForeignTable):
    missing = -1

    def insert(self, ids, embeddings, slots=None):
        kept = ids != self.missing
        super().insert(ids[kept], embeddings[kept], {name: values[kept] for name, values in (slots or {}).items()})


class HasNoRowForTheLeast(HasNoRowFor):
    missing = -(1 << 63)


class GivesIdsInAnotherOrder(ForeignTable):
    def ids(self):
        return self._ids.flip(0)


class ForgetsSlotsOfRowsWithoutThem(ForeignTable):
    def insert(self, ids, embeddings, slots=None):
        if slots is None:
            kept, self._slots = self._slots, {}
            super().insert(ids, embeddings)
            self._slots = kept
        else:
            super().insert(ids, embeddings, slots)


class ChangesRowsAsTheyAreRead(ForeignTable):
    def embeddings(self):
        return self._embeddings.nan_to_num_(posinf=0.0, neginf=0.0)


class LosesTheSignOfZero(ForeignTable):
    def insert(self, ids, embeddings, slots=None):
        super().insert(ids, embeddings + 0.0, slots)


class IsReadWhileItChanges(ForeignTable):
    """Its rows are new with each look, as those of a table that trains in another thread."""

    def embeddings(self):
        return self._embeddings.add_(1) if len(self) else self._embeddings


WRONG = {
    AddsWhereItShouldReplace: "test_a_load_replaces_what_was_there",
    HasAnIdTwice: "test_a_row_that_is_inserted_again_is_replaced_and_new_ones_are_added",
    DropsASlot: "test_what_is_inserted_is_there_bit_for_bit",
    StartsSlotsAnew: "test_what_is_inserted_is_there_bit_for_bit",
    HasNoRowFor: "test_what_is_inserted_is_there_bit_for_bit",
    HasNoRowForTheLeast: "test_what_is_inserted_is_there_bit_for_bit",
    GivesIdsInAnotherOrder: "test_what_is_inserted_is_there_bit_for_bit",
    ForgetsSlotsOfRowsWithoutThem: "test_rows_may_come_without_slots",
    ChangesRowsAsTheyAreRead: "test_what_is_inserted_is_there_bit_for_bit",
    LosesTheSignOfZero: "test_what_is_inserted_is_there_bit_for_bit",
    IsReadWhileItChanges: "test_a_checkpoint_has_all_rows_and_a_load_gives_them_back",
}


@pytest.mark.parametrize(("table", "name"), WRONG.items(), ids=[table.__name__ for table in WRONG])
def test_the_contract_finds_a_wrong_table(table, name, tmp_path):
    assert broken(type("Wrong", (TestForeignTable,), {"table": table}), tmp_path, only=name) == [name]


def test_what_a_team_has_not_written_is_named():
    with pytest.raises(NotImplementedError, match="return a new empty table of your class"):
        SavableTableContract().make()
