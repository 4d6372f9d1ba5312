"""Fingerprints of rows: of what they depend, and of what not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recckpt.live.row_range import RowRange
from recckpt.sparse import HashTable
from recckpt.sparse.table import fingerprints as fingerprints_module
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.device_prints import prints_on_device
from recckpt.sparse.table.fingerprints import fingerprints
from recckpt.sparse.table.pre_images import Log
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import EMBEDDING, SlotSpec


def table_of(n_rows, dim=4, dtype=torch.float32, **slots):
    table = HashTable(dim, name="t", dtype=dtype)
    table.insert(torch.arange(n_rows), torch.randn(n_rows, dim, generator=torch.Generator().manual_seed(1)).to(dtype))
    for name, shape in slots.items():
        table.add_slot(name, shape)
    return table


def prints_of(table):
    return fingerprints(table.store.snapshot("t"))


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


def test_zeros_and_negative_zeros_and_two_nans_differ():
    table = HashTable(1, name="t")
    table.insert(torch.arange(4), torch.tensor([[0.0], [-0.0], [float("nan")], [float("nan")]]))
    table.store.columns["embedding"].blocks[0][3].view(torch.int32)[0] += 1
    assert len({*prints_of(table).tolist()}) == 4


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


def test_rows_that_swap_their_values_or_slots_have_other_prints():
    table = table_of(2, 8, sparse_x=(8,))
    table.store.columns["sparse_x"].blocks[0][:2] = torch.randn(2, 8)
    before = prints_of(table)
    rows = table.store.columns["embedding"].blocks[0]
    rows[:2] = rows[[1, 0]].clone()
    assert (prints_of(table) != before).all()


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
        patch.setattr(Snapshot, "is_on_cpu", is_on_cpu)  # those of a device are made by torch
        patch.setattr(Snapshot, "is_in_place", is_in_place)
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
        assert (prints_on_device(rows, 3, 17) == fingerprints(rows)[3:17]).all()


def test_rows_that_change_meanwhile_have_the_prints_of_the_snapshot():
    table = table_of(500)
    expected = prints_of(table)
    snapshot = table.store.snapshot("t")
    table.insert(torch.arange(0, 500, 3), torch.zeros(167, 4))
    assert (fingerprints(snapshot) == expected).all()
    assert (prints_of(table) != expected).sum() == 167
