import numpy as np
import pytest
import torch

from recckpt.errors import LiveTableError
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.checks import spec_of
from recckpt.sparse.table.column import Column
from recckpt.types import ITEM_BYTES, SlotSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1024)


def column_of(values: torch.Tensor) -> Column:
    spec = SlotSpec("x", str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]))
    column = Column(spec, values.device)
    column.reserve(len(values))
    column.write(0, values)
    return column


def counting(n: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(n * int(np.prod(shape))).view(n, *shape).to(dtype)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ITEM_BYTES])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_what_is_written_is_read_back_over_many_blocks(dtype, shape):
    values = counting(700, *shape, dtype=dtype)
    column = column_of(values)
    assert len(column.blocks) > 1 or column.nbytes <= 1024
    assert torch.equal(column.to_tensor(700), values)
    rows = np.array([699, 0, 63, 64, 128, 64])
    assert torch.equal(column.gather(rows), values[rows])


def test_full_blocks_never_move():
    column = column_of(counting(100, 4))
    addresses = [block.data_ptr() for block in column.blocks]
    column.reserve(5000)
    assert [block.data_ptr() for block in column.blocks][: len(addresses)] == addresses
    assert torch.equal(column.to_tensor(100), counting(100, 4))


def test_the_first_block_doubles_and_keeps_its_rows(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 1 << 20)
    column = column_of(counting(10, 4))
    for n_rows in (64, 65, 1000, 100_000):
        column.reserve(n_rows)
        assert column.capacity >= n_rows
        assert torch.equal(column.to_tensor(10), counting(10, 4))


@pytest.mark.parametrize(("n_bytes", "align"), [(64, 64), (1 << 20, 64), (4 << 20, 2 << 20), (32 << 20, 2 << 20)])
def test_blocks_begin_at_a_line_of_the_cache_and_large_ones_at_a_huge_page(monkeypatch, n_bytes, align):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 32 << 20)
    column = Column(SlotSpec("x", "float32", (16,)), CPU)
    column.reserve(n_bytes // 64)
    assert column.memory.addresses[0] % align == 0


def test_scatter_sets_these_rows_only():
    expected = counting(300, 4)
    column = column_of(expected)
    rows = np.array([299, 5, 64])
    column.scatter(rows, torch.full((3, 4), -1.0))
    expected[rows] = -1
    assert torch.equal(column.to_tensor(300), expected)


def test_scatter_rounds_to_the_dtype_of_the_column():
    column = column_of(torch.zeros(4, 2, dtype=torch.bfloat16))
    column.scatter(np.array([1]), torch.full((1, 2), 1 / 3))
    assert column.to_tensor(4)[1].tolist() == [torch.tensor(1 / 3).bfloat16().item()] * 2


def test_gather_into_copies_the_bytes():
    values = counting(200, 3)
    target = np.zeros(2 * 12, np.uint8)
    column_of(values).gather_into(np.array([150, 3], np.uint32), target)
    assert target.view(np.float32).tolist() == values[[150, 3]].flatten().tolist()


def test_every_bit_of_a_nan_survives():
    bits = torch.tensor([0x7FC00001, 0x7F800123, -1], dtype=torch.int32)
    column = column_of(bits.view(torch.float32).view(3, 1))
    read = column.gather(np.array([2, 1, 0])).view(torch.int32).flatten()
    assert torch.equal(read, bits.flip(0))


def test_a_tensor_is_wrapped_without_a_copy_and_pieces_cover_a_range_once():
    values = counting(500, 4)
    column = Column.over(SlotSpec("x", "float32", (4,)), values)
    assert column.blocks[0].data_ptr() == values.data_ptr()
    assert torch.equal(column.gather(np.array([499, 1])), values[[499, 1]])
    for some in (column, column_of(values)):
        assert torch.equal(torch.cat(list(some.pieces(50, 333))), values[50:333])
    empty = Column(SlotSpec("x", "float32", (4,)), CPU)
    assert empty.to_tensor(0).shape == empty.gather(np.empty(0, np.int64)).shape == (0, 4)
    assert empty.nbytes == 0


def test_blocks_made_in_inference_mode_can_be_written_outside_of_it_and_leave_graphs_behind():
    with torch.inference_mode():
        column = column_of(torch.zeros(10, 2))
    column.write(0, torch.ones(10, 2, requires_grad=True) * 2)
    column.scatter(np.array([3]), torch.ones(1, 2, requires_grad=True) * 2)
    assert not any(block.requires_grad for block in column.blocks)
    twin = column.to(CPU)
    column.write(0, torch.zeros(10, 2))
    assert torch.equal(twin.to_tensor(10), torch.full((10, 2), 2.0))


def test_memory_that_is_freed_or_moved_under_a_column_is_noticed():
    values = torch.ones(10, 2)
    memory = Column.over(spec_of("embedding", values), values).memory
    memory.check_unmoved()
    values.untyped_storage().resize_(0)
    with pytest.raises(LiveTableError, match=r"freed while they were being saved.*call saver.settle"):
        memory.check_unmoved()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_column_on_cuda_reads_and_writes_like_one_on_the_cpu():
    values = counting(700, 3)
    column = column_of(values.cuda())
    rows = np.array([699, 0, 63, 64, 128])
    assert torch.equal(column.gather(rows).cpu(), values[rows])
    column.scatter(rows, torch.zeros(5, 3))
    values[rows] = 0
    assert torch.equal(column.to_tensor(700).cpu(), values)
    target = np.zeros(2 * 12, np.uint8)
    column.gather_into(np.array([650, 3], np.uint32), target)
    assert target.view(np.float32).tolist() == values[[650, 3]].flatten().tolist()
