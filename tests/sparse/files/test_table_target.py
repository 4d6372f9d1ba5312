import numpy as np
import pytest
import torch
from support.foreign import ForeignTable

from recckpt.sparse import HashTable
from recckpt.sparse.files.table_target import target_of

IDS, ROWS = np.array([3, 5]), torch.ones(2, 2)


@pytest.fixture(params=["own", "foreign"])
def table(request):
    if request.param == "own":
        return HashTable(2, name="t")
    return ForeignTable("t", torch.empty(0, dtype=torch.int64), torch.empty(0, 2))


def rows_of(table):
    return dict(zip(table.ids().tolist(), map(tuple, table.embeddings().tolist()), strict=True))


def test_a_table_with_rows_takes_others_at_once(table):
    table.insert(torch.tensor([5, 7]), torch.zeros(2, 2))
    target = target_of(table)
    target.begin()
    assert (target.was_empty, target.aside, len(target)) == (False, None, 2)
    assert target.merge(IDS, {"embedding": ROWS}, {}) == 2
    assert rows_of(table) == {3: (1.0, 1.0), 5: (1.0, 1.0), 7: (0.0, 0.0)}


def test_what_was_empty_is_empty_again_after_an_error_and_what_had_rows_keeps_them(table):
    target = target_of(table)
    target.begin()
    table.insert(torch.from_numpy(IDS), ROWS)
    target.undo(is_cleared=False)
    assert len(table) == 0
    table.insert(torch.from_numpy(IDS), ROWS)
    target.begin()
    target.undo(is_cleared=False)
    assert len(table) == 2
    target.undo(is_cleared=True)
    assert len(table) == 0


def test_a_table_of_ours_gets_what_was_gathered_aside_when_the_load_is_over():
    table = HashTable(2, name="t")
    target = target_of(table)
    target.begin()
    claimed = target.aside.claim(IDS)
    target.aside.put(claimed, claimed.of_batch, {"embedding": ROWS}, None)
    assert (len(target), len(table)) == (2, 0)
    target.finish()
    assert (target.aside, rows_of(table)) == (None, {3: (1.0, 1.0), 5: (1.0, 1.0)})


def test_a_table_of_others_refuses_single_slots_and_rows_that_go():
    target = target_of(ForeignTable("t", torch.tensor([3]), torch.zeros(1, 2)))
    for refused in (lambda: target.write_present(IDS, {}), lambda: target.erase(IDS)):
        with pytest.raises(TypeError, match="'t' is not a recckpt HashTable"):
            refused()
