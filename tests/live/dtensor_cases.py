"""Cases of embeddings of DTensors on two real ranks for test_dtensor.py: ``dtensor_cases.py ROOT``."""

import re
import sys
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import fork_ranks
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from recckpt import Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.live.boxes import box_of
from recckpt.storage.local import LocalStorage


def laid_out(mesh, placements, n_rows=7, **options):
    """Return a module whose weight lies as placements say."""
    module = nn.Embedding(n_rows, 4, **options)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return module


def holds_all(record):
    """Say whether a save holds all rows of its table."""
    return record.kind == "full" or record.tables[0].delta.replaced


def text(module, make=optim.Adam):
    model = nn.Sequential(module)
    return str(live_tables(model, make(model.parameters()), min_rows=1))


def rows_are_those_that_torch_gives(mesh):
    """Of meshes of one and two dimensions, of one rank too, and of tables with fewer rows than ranks."""
    meshes = [mesh, init_device_mesh("cpu", (2, 1)), init_device_mesh("cpu", (1, 2))]
    for n_rows in (1, 2, 7, 8):
        for one in meshes:
            for placements in ([first, Shard(0)][-one.ndim :] for first in (Shard(0), Replicate())):
                weight = laid_out(one, placements, n_rows).weight
                shape, offset = compute_local_shape_and_global_offset(weight.shape, one, placements)
                rows = (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)
                assert box_of(weight).rows == rows, (n_rows, one, placements)


def what_is_not_rows_stays_dense(mesh):
    for placements, why in (
        ([Shard(1)], "its columns are sharded (Shard(dim=1)), which is not yet saved by rows: shard it by rows"),
        ([_StridedShard(0, split_factor=2)], "its rows are not one range per rank, as with FSDP2 over TP"),
    ):
        module = nn.Embedding(8, 4)
        local = module.weight.detach().chunk(2, placements[0].dim)[mesh.get_local_rank()].contiguous()
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
        assert why in text(module), text(module)
    module.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 4), mesh, [Partial()], run_check=False))
    assert "its rows are partial sums (Partial(sum))" in text(module)
    alone = DeviceMesh("cpu", [dist.get_rank()])
    assert "its mesh has 1 of 2 ranks: make a mesh of all ranks" in text(laid_out(alone, [Shard(0)]))
    assert "its max_norm writes in forward passes" in text(laid_out(mesh, [Shard(0)], max_norm=1.0))
    model, cpu = nn.Sequential(nn.Embedding(8, 4)), torch.device("cpu")
    flat = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    assert "FullyShardedDataParallel flattens weights; use fully_shard" in text(flat)


def based(mesh, placements, output_dir):
    """Return a model with a base of deltas, its optimizer, and the saver."""
    model = nn.Sequential(laid_out(mesh, placements, 9))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tables = live_tables(model, optimizer, min_rows=1)
    saver = Saver(model, output_dir=str(output_dir), tables=tables, deltas=True)
    saver.save("base")
    return model, optimizer, saver


def gradients_mark_their_rows_however_they_lie(mesh, root):
    """Rowwise parallel layers have gradients of all rows, data parallel ones partial sums."""
    whole = torch.zeros(9, 4).index_fill(0, torch.tensor([1, 7]), 1.0)
    for name, placements, gradient in (
        ("alike", [Shard(0)], distribute_tensor(whole, mesh, [Shard(0)])),
        ("whole", [Shard(0)], distribute_tensor(whole, mesh, [Replicate()])),
        ("sums", [Replicate()], DTensor.from_local(whole, mesh, [Partial()], run_check=False)),
    ):
        model, optimizer, saver = based(mesh, placements, root / name)
        before = model[0].weight.detach().full_tensor().clone()  # a copy of it, where that is what lies here
        model[0].weight.grad = gradient
        optimizer.step()
        changed = (model[0].weight.detach().full_tensor() != before).any(1).nonzero().flatten().tolist()
        assert changed == [1, 7], (name, changed)
        record = saver.save("next")
        written = None if holds_all(record) else record.tables[0].delta.upserts
        assert written == (None if name == "sums" else 2), (name, record)
        saver.close()


def writes_that_nobody_announced_are_noticed(mesh, root):
    def to_all():
        with torch.no_grad():
            model[0].weight.fill_(2.0)

    def to_part():
        with torch.no_grad():
            model[0].weight.to_local()[:] = 3.0

    for number, write in enumerate((to_all, to_part)):
        model, _, saver = based(mesh, [Shard(0)], root / f"writes-{number}")  # a table that was distrusted is copied
        is_written, create = Event(), LocalStorage.create

        def create_once_written(storage, name, is_written=is_written, create=create):
            is_written.wait(60)
            return create(storage, name)

        with patch.object(LocalStorage, "create", create_once_written):  # else the save may be done before the write
            handle = saver.save_async(f"torn-{number}")
            write()
            is_written.set()
            with pytest.raises(LiveTableError, match=r"call saver\.settle"):
                handle.wait()
        assert holds_all(saver.save(f"whole-{number}"))
        saver.close()


def a_state_of_another_layout_is_refused(mesh):
    """Torch makes the momentum of a first step as the gradient lies, which is whole in rowwise parallel layers."""
    module = laid_out(mesh, [Shard(0)])
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module.weight.grad = distribute_tensor(torch.ones(7, 4), mesh, [Replicate()])
    optimizer.step()
    expected = "sparse_sgd_momentum as (7, 4) (Replicate(),), expected (7, 4) (Shard(dim=0),), the layout of its weight"
    with pytest.raises(LiveTableError, match=re.escape(expected)):
        live_tables(nn.Sequential(module), optimizer, min_rows=1)


def another_weight_is_refused_and_another_place_is_not(root):
    model = nn.Sequential(nn.Embedding(9, 4))
    fully_shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tables = live_tables(model, optimizer, min_rows=1)
    saver = Saver(model, output_dir=str(root / "moved"), tables=tables, deltas=True)
    saver.save("base")
    model.to(torch.float64)
    model.to(torch.float32)
    assert holds_all(saver.save("moved"))
    model[0].weight = nn.Parameter(torch.zeros(9, 4))
    with pytest.raises(LiveTableError, match="the model's weights were replaced"):
        saver.save("other")


def work(rank, size, root):
    mesh = init_device_mesh("cpu", (size,))
    rows_are_those_that_torch_gives(mesh)
    what_is_not_rows_stays_dense(mesh)
    gradients_mark_their_rows_however_they_lie(mesh, root.parent)
    writes_that_nobody_announced_are_noticed(mesh, root.parent)
    a_state_of_another_layout_is_refused(mesh)
    another_weight_is_refused_and_another_place_is_not(root.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "run").mkdir()
    fork_ranks(2, Path(sys.argv[1]) / "run", work)
