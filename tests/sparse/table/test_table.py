import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.sweeps import SWEEP_STRIDE
from torch import nn

from recckpt.format.buckets import gen_slice
from recckpt.sparse.table import column as column_module
from recckpt.sparse.table.initializers import Constant, Normal, Uniform
from recckpt.sparse.table.table import HashTable
from recckpt.types import ITEM_BYTES, is_hashtable

EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]
DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def state_of(table: HashTable) -> dict[int, list]:
    """Every bit of a table, by id."""
    tensors = [table.embeddings(), *(table.slots[name] for name in sorted(table.slots))]
    rows = zip(*(t.flatten(1).tolist() if t.dim() > 1 else t.tolist() for t in tensors), strict=True)
    return dict(zip(table.ids().tolist(), map(list, rows), strict=True))


def filled(name: str = "t", n: int = 10, **kwargs) -> HashTable:
    table = HashTable(2, name=name, **kwargs)
    table.add_slot("moment", (2,))
    table.add_slot("count", (), torch.float64, initial=0.5)
    ids = torch.arange(n)
    values = ids[:, None].expand(-1, 2)
    table.insert(ids, values.to(table.dtype), {"moment": values.float() * 10})
    return table


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.table = filled("users", **kwargs)
        self.linear = nn.Linear(2, 1)

    def forward(self, ids):
        return self.linear(self.table(ids))


# Look-ups


def test_an_unseen_id_gets_a_row_in_training_mode_and_reads_the_constant_or_zeros_in_eval_mode():
    table = HashTable(2, name="t", initializer=Constant(0.5))
    assert table(ids_of(7, 8, 7)).tolist() == [[0.5] * 2] * 3
    assert table.ids().tolist() == [7, 8]
    table.eval().insert(ids_of(1), torch.ones(1, 2))
    assert table(ids_of(1, 2)).tolist() == [[1, 1], [0.5, 0.5]]
    assert len(table) == 3
    assert HashTable(2, name="t", initializer=Normal()).eval()(ids_of(1)).tolist() == [[0, 0]]


def test_the_shape_of_the_output_is_that_of_the_ids_and_the_embedding():
    table = HashTable((np.int64(2), 3), name="t")
    for shape in ((), (4,), (2, 5), (0,), (3, 0)):
        assert table(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 2, 3)
    assert filled()(torch.arange(10).view(2, 5).T)[:, :, 0].tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    assert table.embedding_shape == HashTable(torch.Size([2, 3]), name="t").embedding_shape
    assert HashTable(np.int32(4), name="t").embedding_shape == (4,)


def test_every_int64_is_a_legal_id():
    table = HashTable(1, name="t")
    values = torch.arange(5.0, requires_grad=True)[:, None]
    table.insert(ids_of(*EDGES), values)
    assert torch.equal(table(ids_of(*EDGES)), values)
    assert not table.embeddings().requires_grad, "the graph of the values stays behind"
    found, present = table.lookup(ids_of(*EDGES, 2, 2).view(7, 1))
    assert present.tolist() == [[True]] * 5 + [[False]] * 2
    assert found.flatten().tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert len(table) == 5
    assert table.erase(ids_of(*EDGES, 0, 7)) == 5
    assert len(table) == table.erase(ids_of(0)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_keep_every_value(dtype):
    table = HashTable(2, name="t", dtype=dtype)
    values = torch.tensor([[1, 2], [3, 100], [0, 7]], dtype=dtype)
    table.insert(ids_of(5, 6, 7), values)
    assert torch.equal(table(ids_of(5, 6, 7)), values)
    assert torch.equal(table.embeddings(), values)
    assert table(ids_of(9)).dtype == dtype


def test_rows_do_not_depend_on_the_order_of_arrival():
    first, second = (HashTable(4, name="t", initializer=Uniform(-1, 1)) for _ in range(2))
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    first(ids)
    for piece in ids.flip(0).split(7):
        second(piece)
    assert state_of(first) == state_of(second)


def test_growing_over_many_blocks_keeps_every_row(monkeypatch):
    monkeypatch.setattr(column_module, "BLOCK_BYTES", 4096)
    table = filled(n=0)
    for begin in range(0, 5000, 123):
        ids = torch.arange(begin, min(begin + 123, 5000))
        table.insert(ids, ids[:, None].expand(-1, 2).float(), {"moment": ids[:, None].expand(-1, 2) * 10.0})
    assert len(table.store.columns["embedding"].blocks) > 5
    assert state_of(table) == {i: [[i, i], 0.5, [10 * i, 10 * i]] for i in range(5000)}


# Insert, erase, clear, reserve


def test_the_last_of_equal_ids_wins():
    table = HashTable(1, name="t")
    table.insert(ids_of(1, 2, 1, 3, 2), torch.arange(5.0)[:, None])
    assert state_of(table) == {1: [[2]], 2: [[4]], 3: [[3]]}
    table.insert(ids_of(3, 3), torch.tensor([[8.0], [9.0]]))
    assert table(ids_of(3)).item() == 9


def test_a_view_that_stands_for_the_negative_of_its_memory_goes_in_by_its_values():
    table, values = HashTable(3, name="t"), torch.randn(4, 3, dtype=torch.complex64).conj().imag
    assert values.is_neg()
    table.insert(torch.arange(4), values)
    assert torch.equal(table.lookup(torch.arange(4))[0], values)
    table.insert(torch.arange(4), torch.zeros(4, 3))
    table.set_slot("embedding", torch.arange(4), values)
    assert torch.equal(table.lookup(torch.arange(4))[0], values)


@pytest.mark.parametrize(
    ("ids", "embeddings", "slots"),
    [
        (ids_of(1, 50), torch.zeros(2, 3), None),
        (ids_of(1, 50), torch.zeros(1, 2), None),
        (ids_of(1, 50), torch.zeros(2, 2, dtype=torch.float64), None),
        (ids_of(1, 50).int(), torch.zeros(2, 2), None),
        (ids_of(1, 50), torch.zeros(2, 2), {"momentum": torch.zeros(2, 2)}),
        (ids_of(1, 50), torch.zeros(2, 2), {"moment": torch.zeros(2)}),
        (ids_of(1, 50), torch.zeros(2, 2), {"moment": torch.zeros(2, 2), "count": torch.zeros(2)}),
    ],
)
def test_an_insert_that_does_not_fit_changes_nothing(ids, embeddings, slots):
    table = filled()
    before = state_of(table)
    with pytest.raises(ValueError, match=r"expected|must be|no slot"):
        table.insert(ids, embeddings, slots)
    assert state_of(table) == before


def test_clear_drops_all_rows_but_not_the_slots():
    table = filled()
    table.clear()
    assert table
    assert len(table) == 0
    assert table.embeddings().shape == (0, 2)
    assert list(table.slots) == ["moment", "count"]
    table(ids_of(1))
    assert state_of(table)[1][1:] == [0.5, [0, 0]]


def test_nbytes_counts_index_ids_and_slots_and_reserved_room_is_not_allocated_again():
    table = HashTable(16, name="t")
    table.reserve(1 << 16)
    before = table.nbytes
    table.add_slot("moment", (16,))
    assert table.nbytes == before + (1 << 16) * 64
    assert (1 << 16) * (64 + 8 + 16) < before <= (1 << 16) * (64 + 8 + 64)
    table(torch.arange(5000))
    assert table.nbytes == before + (1 << 16) * 64


# Slots


def test_slots_lie_in_the_order_of_the_ids():
    table = filled()
    table.erase(ids_of(0))
    assert torch.equal(table.slots["moment"][:, 0], table.ids() * 10.0)
    assert len(table.slots) == 2
    with pytest.raises(KeyError):
        table.slots["embedding"]


def test_a_slot_declared_again_keeps_its_rows_and_takes_the_new_initial_value():
    table = filled()
    table.add_slot("moment", (2,))
    assert table.slots["moment"][9].tolist() == [90, 90]
    table.add_slot("count", (), torch.float64)
    table(ids_of(100))
    assert table.slots["count"][-1] == 0.5
    table.add_slot("count", (), torch.float64, initial=2.0)
    table(ids_of(101))
    assert table.slots["count"].tolist() == [0.5] * 11 + [2.0]
    for args in (((3,),), ((2,), torch.float64)):
        with pytest.raises(ValueError, match="moment"):
            table.add_slot("moment", *args)


# Slices


def test_a_table_holds_the_ids_of_its_slice_only():
    ids = torch.arange(1000)
    parts = [HashTable(1, name="t", slice=gen_slice(i, 3)) for i in range(3)]
    for part in parts:
        part(ids[part.slice.owns(ids)])
    assert sum(len(part) for part in parts) == 1000
    stranger = ids[~parts[0].slice.owns(ids)][:1]
    for refused in (parts[0], lambda ids: parts[0].insert(ids, torch.zeros(1, 1))):
        with pytest.raises(ValueError, match="outside"):
            refused(torch.cat([ids[parts[0].slice.owns(ids)], stranger])[-1:])
    assert parts[0].lookup(stranger)[1].tolist() == [False]
    table = HashTable(1, name="t", slice=gen_slice(0, 2), initializer=Constant(3)).eval()
    assert table(torch.arange(10)).flatten().tolist() == [3] * 10, "as unseen"


# As a module


def test_a_state_dict_holds_the_table_as_itself_and_printing_a_model_shows_it():
    model = Model()
    state = model.state_dict()
    assert list(state) == ["table.users", "linear.weight", "linear.bias"]
    assert state["table.users"] is model.table
    assert is_hashtable(state["table.users"])
    assert [p for p in model.parameters() if p.numel()] == list(model.linear.parameters())
    assert "'users', rows=10, shape=(2,), dtype=float32" in repr(model)


def test_loading_the_own_state_dict_changes_nothing_and_that_of_another_model_copies_it():
    model = Model()
    before = state_of(model.table)
    assert model.load_state_dict(model.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    assert state_of(model.table) == before
    other = Model(n=3)
    other.load_state_dict(model.state_dict())
    assert state_of(other.table) == state_of(model.table)
    model.table.clear()
    assert len(other.table) == 10


def test_a_copied_state_dict_brings_back_an_older_state_with_slots_that_the_model_lacks():
    model = Model()
    before, kept = state_of(model.table), copy.deepcopy(model.state_dict())
    model.table.erase(torch.arange(5))
    model.table(ids_of(77))
    model.load_state_dict(kept)
    assert state_of(model.table) == before
    empty = nn.ModuleDict({"table": HashTable(2, name="users")})
    empty.load_state_dict({"table.users": model.table})
    assert state_of(empty["table"]) == before


def test_missing_and_unexpected_keys_are_reported_as_by_torch():
    model = Model()
    state = model.state_dict()
    del state["table.users"]
    state["table.items"] = HashTable(2, name="items")
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*table\.users.*|Unexpected.*table\.items"):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["table.users"]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2),
        HashTable(3, name="users"),
        HashTable(2, name="users", dtype=torch.float64),
        filled("users", slice=gen_slice(0, 1)),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(other):
    if is_hashtable(other):
        other.insert(torch.arange(4), torch.ones(4, *other.embedding_shape, dtype=other.dtype))
        if other.embedding_shape == (2,) and other.dtype == torch.float32:
            other.insert(ids_of(-5), torch.zeros(1, 2))
    owned = torch.arange(10)[gen_slice(0, 2).owns(torch.arange(10))]
    table = HashTable(2, name="users", slice=gen_slice(0, 2))
    table(owned)
    before = state_of(table)
    with pytest.raises(RuntimeError, match="users"):
        nn.ModuleDict({"table": table}).load_state_dict({"table.users": other})
    assert state_of(table) == before
    assert list(table.slots) == []


def test_a_slot_that_does_not_fit_is_refused_and_changes_nothing():
    table, other = filled(), HashTable(2, name="t")
    other.add_slot("early", ())
    other.add_slot("moment", (3,))
    other(ids_of(1))
    before = state_of(table)
    with pytest.raises(RuntimeError, match="moment"):
        table.load_state_dict({"t": other})
    assert state_of(table) == before


def test_a_deep_copy_is_independent():
    model = Model()
    model(ids_of(1)).sum().backward()
    twin = copy.deepcopy(model)
    assert state_of(twin.table) == state_of(model.table)
    assert twin.table.take_gradients() is None
    twin.table(ids_of(100, 1))
    twin.table.insert(ids_of(1), torch.full((1, 2), -1.0))
    assert len(model.table) == 10
    assert model.table(ids_of(1)).tolist() == [[1, 1]]
    twin.table.register_forward_hook(lambda *_: 1 / 0)
    model(ids_of(1))


def test_pickling_says_what_to_call_instead(tmp_path):
    model = Model()
    for action in (lambda: pickle.dumps(model), lambda: torch.save(model.state_dict(), tmp_path / "x.pt")):
        with pytest.raises(TypeError, match="Saver"):
            action()


def test_ddp_takes_a_model_with_a_table(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model())
        model(ids_of(3, 50)).sum().backward()
        assert model.module.table.take_gradients()[0].tolist() == [3, 10]
        state = model.state_dict()
        assert state["module.table.users"] is model.module.table
        model.load_state_dict(copy.deepcopy(state))
        assert len(model.module.table) == 11
        with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed"):  # of tables alone it crashed
            nn.parallel.DistributedDataParallel(nn.Sequential(filled()))
    finally:
        dist.destroy_process_group()


def test_the_dtype_of_a_table_is_part_of_what_it_is():
    for convert in (nn.Module.half, nn.Module.double, lambda model: model.to(torch.bfloat16)):
        with pytest.raises(TypeError, match="keeps its dtype"):
            convert(Model())
    assert Model().float().to("cpu").table.dtype == torch.float32


def test_a_table_grown_in_inference_mode_can_be_trained():
    table = HashTable(2, name="t")
    with torch.inference_mode():
        table(ids_of(1))
    table.insert(ids_of(1, 2), torch.ones(2, 2))
    table(ids_of(1, 2)).sum().backward()
    assert len(table.take_gradients()[0]) == 2


# Memory

GROW = """
import json, sys, torch
from recckpt.sparse.table.table import HashTable

def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10

n_rows, table = int(sys.argv[1]), HashTable(64, name="t")
with torch.no_grad():
    table(torch.arange(10_000))  # compiled code and the buffers of a batch belong to the baseline
    table.clear()
    before = peak()
    for begin in range(0, n_rows, 10_000):
        table(torch.arange(begin, min(begin + 10_000, n_rows)))
print(json.dumps({"peak": peak() - before, "table": table.nbytes, "rows": n_rows * (64 * 4 + 8)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("n_rows", [1_000_000, 4_000_000][: 2 if SWEEP_STRIDE < 20 else 1])
def test_growing_needs_no_second_copy_of_the_table(n_rows):
    child = subprocess.run([sys.executable, "-c", GROW, str(n_rows)], check=True, capture_output=True, text=True)
    found = json.loads(child.stdout)
    assert found["peak"] <= 1.25 * found["table"]
    assert found["table"] <= 1.25 * found["rows"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_table_on_cuda_behaves_like_one_on_the_cpu():
    table = filled()
    before = state_of(table)
    nn.ModuleDict({"table": table}).cuda()
    assert table.device.type == "cuda"
    assert table(ids_of(3).cuda()).device.type == "cuda"
    table(ids_of(77))
    table.erase(ids_of(77, 4))
    assert state_of(table) == {i: row for i, row in before.items() if i != 4}
    assert state_of(copy.deepcopy(table)) == state_of(table)


def test_a_table_shows_what_users_may_call_and_nothing_else():
    shown = {name for name in dir(HashTable) if not name.startswith("_")} - {*dir(torch.nn.Module)}
    rows = "add_slot bag clear embeddings erase evict from_embedding ids insert lookup reserve resize set_slot"
    facts = "device embedding_shape evicts n_evicted nbytes now slots spec track"
    settings = "admit candidates event_time grad padding_id requires_grad step take_gradients"
    of_the_room = "admission is_trained sharing"  # fields with a default, no methods
    assert shown == {*rows.split(), *facts.split(), *settings.split(), *of_the_room.split()}
