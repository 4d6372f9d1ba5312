import numpy as np
import pytest
import torch

from recckpt.sparse.table.table import HashTable


def rows_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def gradients(table: HashTable) -> dict[int, list[float]]:
    taken = table.take_gradients()
    assert taken is not None
    rows, grads = taken
    return dict(zip(table.ids()[torch.from_numpy(rows)].tolist(), grads.tolist(), strict=True))


def table_of(dtype: torch.dtype = torch.float32, dim: int = 2) -> HashTable:
    return HashTable(dim, name="t", dtype=dtype)


def test_gradients_of_an_id_that_occurs_several_times_add_up():
    table = table_of()
    weights = torch.tensor([[1.0, 10], [2, 20], [4, 40]])
    (table(rows_of(7, 8, 7)) * weights).sum().backward()
    assert gradients(table) == {7: [5, 50], 8: [2, 20]}
    table(rows_of(1, 2)).sum().backward()
    table(rows_of(2, 3)).sum().backward()
    assert gradients(table) == {1: [1, 1], 2: [2, 2], 3: [1, 1]}, "of several backward passes"
    (table(rows_of(1)) + 2 * table(rows_of(1))).sum().backward()
    assert gradients(table) == {1: [3, 3]}, "of one pass through two look-ups"


def test_gradients_equal_those_of_an_embedding():
    torch.manual_seed(0)
    table, embedding = HashTable((3,), name="t"), torch.nn.Embedding(50, 3, sparse=True)
    table.insert(torch.arange(50), embedding.weight.detach())
    for _ in range(3):
        ids, weights = torch.randint(0, 50, (4, 5)), torch.randn(4, 5, 3)
        for lookup in (table, embedding):
            torch.sigmoid(lookup(ids) * weights).sum().backward()
    expected = embedding.weight.grad.coalesce()
    rows, grads = table.take_gradients()
    order = np.argsort(rows)
    assert rows[order].tolist() == expected.indices()[0].tolist()
    torch.testing.assert_close(grads[torch.from_numpy(order)], expected.values())


def test_rows_that_were_erased_meanwhile_drop_out_and_others_are_followed():
    table = table_of()
    (table(rows_of(1, 2, 3, 4)) * torch.tensor([[1.0], [2], [3], [4]])).sum().backward()
    table.erase(rows_of(1, 3))
    assert gradients(table) == {2: [2, 2], 4: [4, 4]}
    out = table(rows_of(4, 2, 3))
    table.erase(rows_of(4))
    (out * torch.tensor([[1.0], [2], [3]])).sum().backward()
    assert gradients(table) == {2: [2, 2], 3: [3, 3]}, "erased between forward and backward"


def test_unseen_ids_of_eval_mode_no_ids_no_grad_and_integer_tables_have_no_gradient():
    table = table_of()
    table(rows_of(1))
    table.eval()
    table(rows_of(1, 99)).sum().backward()
    assert gradients(table) == {1: [1, 1]}
    assert len(table) == 1
    table.train()(rows_of()).sum().backward()
    assert list(map(len, table.take_gradients())) == [0, 0]
    with torch.no_grad():
        assert not table(rows_of(1)).requires_grad
    integers = HashTable(2, name="i", dtype=torch.int64)
    assert not integers(rows_of(1)).requires_grad


def test_ids_and_output_may_be_changed_in_place_before_the_backward_pass():
    table, ids = table_of(), rows_of(1, 2)
    out = table(ids)
    ids.fill_(3)
    out.mul_(3)
    out.sum().backward()
    assert gradients(table) == {1: [3, 3], 2: [3, 3]}


def test_gradients_share_no_memory_with_autograd():
    table, bias = table_of(), torch.zeros(1, 2, requires_grad=True)
    for _ in range(3):  # from the second pass on, torch adds to bias.grad in place
        (table(rows_of(1)) + bias).sum().backward()
    assert gradients(table) == {1: [3, 3]}
    assert bias.grad.tolist() == [[3, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_are_summed_in_float32_at_least(dtype):
    table = table_of(dtype)
    table(torch.ones(3000, dtype=torch.int64)).sum().backward()
    assert table.grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradients(table) == {1: [3000, 3000]}


def test_gradients_that_nobody_takes_do_not_pile_up(monkeypatch):
    table, ids = table_of(dim=3), torch.arange(100)
    for _ in range(200):
        table(ids).sum().backward()
    entries = table.pending_gradients._entries
    assert sum(len(entry.ids) for entry in entries) <= 64 * len(ids), "no more than the rows take"
    assert table.pending_gradients.passes_waiting(table.store) == 200
    assert gradients(table) == dict.fromkeys(range(100), [200.0] * 3)
    assert table.pending_gradients.passes_waiting(table.store) == 0
    monkeypatch.setattr("recckpt.sparse.table.gradients._MAX_ENTRIES", 4)
    table = table_of()
    for step in range(11):
        table(rows_of(step % 2)).sum().backward()
        assert len(table.pending_gradients._entries) < 4
    assert gradients(table) == {0: [6, 6], 1: [5, 5]}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_on_cuda_add_up():
    table = HashTable(2, name="t", device="cuda")
    (table(rows_of(7, 8, 7).cuda()) * torch.tensor([[1.0], [2], [4]]).cuda()).sum().backward()
    rows, grads = table.take_gradients()
    assert grads.device.type == "cuda"
    assert rows.tolist() == [0, 1]
    assert grads.tolist() == [[5, 5], [2, 2]]


def test_passes_are_counted_and_gradients_there_until_they_are_used_or_forgotten():
    table = table_of()
    table(rows_of(1))
    assert table.take_gradients() is None
    for forget in (table.take_gradients, table.zero_grad, table.clear, lambda: setattr(table, "grad", None)):
        for n_passes in (1, 2, 3):
            table(rows_of(1, 2)).sum().backward()
            assert table.pending_gradients.passes_waiting(table.store) == n_passes
        forget()
        assert table.pending_gradients.passes_waiting(table.store) == 0
        assert table.take_gradients() is None
