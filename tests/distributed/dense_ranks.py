"""What real ranks do for test_sharded_dense.py: run it as ``dense_ranks.py ROOT SIZE...``.

Each run of ranks loads what those before it have saved.
"""

import logging
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from support.builders import flip_bit
from support.rank_processes import fork_ranks
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

from recckpt import CheckpointManager, Saver
from recckpt.errors import SaveFailedError, StateMismatchError
from recckpt.inspect.consolidate import consolidate
from recckpt.inspect.verify import verify
from recckpt.storage.local import LocalStorage

TRUTH = {
    "w": torch.randn(10, 7, generator=torch.Generator().manual_seed(0)),
    "bf16": torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "count": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "plain": torch.randn(3, generator=torch.Generator().manual_seed(2)),
}


class Model(nn.Module):
    """Tensors that lie as a layout says, and a plain one."""

    def __init__(self, layout, size, truth=None):
        super().__init__()
        for name, value in TRUTH.items():
            value = value.clone() if truth is None else torch.zeros_like(value)
            self.register_buffer(name, value if name == "plain" else laid_out(value, layout, size))

    def whole(self):
        return {name: whole(value) for name, value in self.state_dict().items()}


def laid_out(value, layout, size):
    if size == 1:
        return value
    mesh, placements = LAYOUTS[layout](size)
    return distribute_tensor(value, mesh, [p if dim_of(p) < value.dim() else Replicate() for p in placements])


def dim_of(placement):
    return placement.dim if isinstance(placement, Shard) else -1


def flat(*placements):
    return lambda size: (init_device_mesh("cpu", (size,)), placements)


def grid(*placements):
    return lambda size: (init_device_mesh("cpu", (2, 2)), placements)


LAYOUTS = {
    "replicated": flat(Replicate()),
    "rows": flat(Shard(0)),
    "columns": flat(Shard(1)),
    "grid": grid(Shard(0), Shard(1)),
    "hybrid": grid(Replicate(), Shard(0)),
}


def layouts(size):
    return [name for name in LAYOUTS if size == 4 or name not in ("grid", "hybrid")][: 1 if size == 1 else None]


def whole(value):
    if isinstance(value, sharded_tensor.ShardedTensor):
        pieces = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, [(s.metadata.shard_offsets[0], s.tensor) for s in value.local_shards()])
        return torch.cat([tensor for _, tensor in sorted(chain(*pieces), key=lambda piece: piece[0])])
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def tensors(rank, size, root, *, last):
    """Load what others saved into all layouts that this many ranks can have, and save each of them."""
    for source in sorted(root.glob("tensors-*")):
        for layout in layouts(size):
            model = Model(layout, size, truth="none")
            report = Saver(model, output_dir=str(root / "unused")).load(str(source), "c", shard_id=rank)
            assert len(report.items) == len(TRUTH) + 1
            same(model.whole(), TRUTH)
    if size > 1:
        dist.barrier()  # before a glob sees what is new
    for layout in () if last else layouts(size):
        Saver(Model(layout, size), output_dir=str(root / f"tensors-{layout}-{size}")).save("c", rank, size)


def trained(size, *, seed, tensor_parallel=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    if tensor_parallel and size == 4:  # rows of the same weights twice: by FSDP, and within its shards
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def by_rows(name, layer, mesh):
            for key, value in layer.named_parameters(recurse=False):
                layer.register_parameter(key, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))

        distribute_module(model[0], mesh["tp"], by_rows)
        fully_shard(model[0], mesh=mesh["dp"])
    elif size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(6, 5)).square().sum().backward()
    optimizer.step()


def state_of(model, optimizer):
    names = [name for name, _ in model.named_parameters()]
    state = {f"model {name}": whole(value) for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"{names[index]} {key}": whole(value) for key, value in values.items()}
    return state


def training(rank, size, root):
    """Take up runs of other numbers of ranks under FSDP2, with the moments of Adam, and save one."""
    for source in sorted(root.glob("training-*")):
        model, optimizer = trained(size, seed=1)
        saver = Saver(model, output_dir=str(source))
        saver.register_for_checkpointing("optimizer", optimizer)
        assert CheckpointManager(saver, 10**9).restore() == 3
        same(state_of(model, optimizer), torch.load(root / f"truth-{source.name}"))
        step(model, optimizer, seed=9)
    if size > 1:
        dist.barrier()
    model, optimizer = trained(size, seed=0)
    for number in range(3):
        step(model, optimizer, seed=number)
    name = f"training-{size}"
    saver = Saver(model, output_dir=str(root / name))
    saver.register_for_checkpointing("optimizer", optimizer)
    handle = saver.save_async("c", rank, size, step=3, overwrite=True)
    truth = state_of(model, optimizer)
    step(model, optimizer, seed=4)  # changes all that is being saved
    handle.wait()
    saver.close()
    if rank == 0:
        torch.save(truth, root / f"truth-{name}")
    if size > 1:
        dist.barrier()


def same_rows_twice(rank, size, root):
    model, _ = trained(size, seed=3, tensor_parallel=True)
    truth = {name: whole(value) for name, value in model.state_dict().items()}
    Saver(model, output_dir=str(root / "twice")).save("c", rank, size)
    other, _ = trained(size, seed=4, tensor_parallel=True)
    Saver(other, output_dir=str(root / "unused")).load(str(root / "twice"), "c", shard_id=rank)
    same({name: whole(value) for name, value in other.state_dict().items()}, truth)
    fresh, _ = trained(1, seed=5)
    Saver(fresh, output_dir=str(root / "unused")).load(str(root / "twice"), "c", shard_id=rank)
    same(fresh.state_dict(), truth)


def first_fsdp(rank, size, root):
    """The older wrapper, whose sharded state comes as ShardedTensor, or as DTensor where it has a mesh."""
    for mesh in (None, init_device_mesh("cpu", (size,))):
        models = []
        for seed in (6, 7):
            torch.manual_seed(seed)
            layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
            models.append(FullyShardedDataParallel(layers, device_id=torch.device("cpu"), device_mesh=mesh))
            FullyShardedDataParallel.set_state_dict_type(models[-1], StateDictType.SHARDED_STATE_DICT)
        url = str(root / f"first-{mesh is None}")
        Saver(models[0], output_dir=url).save("c", rank, size)
        Saver(models[1], output_dir=str(root / "unused")).load(url, "c", shard_id=rank)
        one, other = ([parameter.detach() for parameter in model.parameters()] for model in models)
        assert all(map(torch.equal, one, other))


class Legacy(nn.Module):
    """A ShardedTensor, kept as its authors said."""

    def __init__(self, size, value):
        super().__init__()
        self._register_state_dict_hook(sharded_tensor.state_dict_hook)
        self._register_load_state_dict_pre_hook(sharded_tensor.pre_load_state_dict_hook, True)
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(size)])
        self.w = sharded_tensor.full(spec, (11, 3), float(value))
        for shard in self.w.local_shards():
            shard.tensor += torch.arange(shard.metadata.shard_offsets[0], 11)[: len(shard.tensor), None] * float(value)


def legacy(rank, size, root, *, number):
    """ShardedTensors load what other ranks saved of them, and plain tensors do."""
    expected = (torch.arange(11.0) + 1)[:, None].expand(11, 3)
    if number:
        model = Legacy(size, 0)
        Saver(model, output_dir=str(root / "unused")).load(str(root / "legacy"), "c", shard_id=rank)
        assert torch.equal(whole(model.w), expected)
    else:
        Saver(Legacy(size, 1), output_dir=str(root / "legacy")).save("c", rank, size)


def error_of(work):
    try:
        work()
    except Exception as error:
        return error
    return None


def refusals(rank, size, root):
    """What cannot be saved or loaded changes nothing, on any rank."""
    model = Model("rows", size, truth="none")
    saver = Saver(model, output_dir=str(root / "refusals"))
    mesh = init_device_mesh("cpu", (size,))
    source = str(next(root.glob("tensors-columns-*")))

    model.w = distribute_tensor(torch.zeros(10, 8), mesh, [Shard(0)])
    error = error_of(lambda: saver.load(source, "c", shard_id=rank))
    assert isinstance(error, StateMismatchError)
    assert error.mismatched == {"w": ("float32 (10, 7)", "float32 (10, 8)")}
    assert not model.whole()["count"].any()
    saver.load(source, "c", {"on_mismatch": {"w": "resize"}, "exclude": ["count"]}, shard_id=rank)
    assert torch.equal(whole(model.w), torch.nn.functional.pad(TRUTH["w"], (0, 1)))
    assert not model.whole()["count"].any()
    model.w = distribute_tensor(torch.ones(24, 7), mesh, [Shard(0)])  # one rank has none of the rows that are there
    saver.load(source, "c", {"on_mismatch": {"w": "resize"}, "exclude": ["count"]}, shard_id=rank)
    assert torch.equal(whole(model.w), torch.nn.functional.pad(TRUTH["w"], (0, 0, 0, 14), value=1.0))
    model.w = distribute_tensor(torch.zeros(10, 7, dtype=torch.float64), mesh, [Shard(1)])
    saver.load(source, "c", {"on_mismatch": {"w": "cast"}}, shard_id=rank)
    assert torch.equal(whole(model.w), TRUTH["w"].double())

    model.w = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    error = error_of(lambda: saver.save("partial", rank, size))
    assert isinstance(error, ValueError)
    assert str(error).startswith("w: ")

    model.w = DTensor.from_local(torch.ones(2 + rank), mesh, [Replicate()])
    error = error_of(lambda: saver.save("apart", rank, size))
    assert isinstance(error, SaveFailedError)
    assert "w" in str(error)

    own = {0: 3, 1: 1}.get(rank, 2)  # as many in all as there are, but not where the layout has them
    model.w = DTensor.from_local(torch.ones(own), mesh, [Shard(0)], shape=torch.Size([2 * size]), stride=(1,))
    error = error_of(lambda: saver.save("uneven", rank, size))
    assert isinstance(error, ValueError if rank < 2 else SaveFailedError)
    assert f"w: found ({own if rank < 2 else 3},) of ({2 * size},) on this rank, expected (2,)" in str(error), error

    model.w = distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)])
    error = error_of(lambda: Saver(model, output_dir=str(root / f"alone-{rank}")).save("c", 0, 1))
    assert isinstance(error, SaveFailedError)
    assert "sharded tensor w: found 35 values on 1 ranks, expected 70" in str(error), error

    create = LocalStorage.create
    if rank == 1:
        LocalStorage.create = full
    error = error_of(lambda: saver.save("full", rank, size))
    LocalStorage.create = create
    assert isinstance(error, SaveFailedError)
    assert (error.rank, "No space" in str(error)) == (1, True)
    dist.barrier()
    assert not list((root / "refusals").glob("*/manifest.json"))
    saver.save("full", rank, size)


def damage_for_one(rank, size, root):
    """All ranks go back to the checkpoint before, though only one of them reads what is damaged."""
    mesh, url = init_device_mesh("cpu", (size,)), root / "damage"
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=mesh)
    manager = CheckpointManager(Saver(model, output_dir=str(url), max_keep=2), 1)
    for number in (1.0, 2.0):
        with torch.no_grad():
            model.weight.to_local().fill_(number)
        manager.step()
    dist.barrier()
    if rank == 0:
        flip_bit(url / "ckpt_2/dense/00001-of-00002.bin")
    dist.barrier()
    assert manager.restore() == 1
    assert whole(model.weight).eq(1).all()


def one_rank_in_a_process_group(root):
    """A mesh of one rank, and a store in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=mesh)
    truth = {name: whole(value) for name, value in model.state_dict().items()}
    manifest = Saver(model, output_dir="memory://one").save("c")
    assert [file.name for file in manifest.files if "dense" in file.name] == [
        "dense/00000-of-00001.bin",
        "dense/00000-of-00001.json",
    ]
    torch.manual_seed(8)
    model = nn.Linear(5, 3)
    Saver(model, output_dir="memory://one").load()
    same(model.state_dict(), truth)
    assert verify("memory://one") == []
    consolidate("memory://one", str(root / "one.pt"))
    same(torch.load(root / "one.pt", weights_only=True), truth)
    dist.destroy_process_group()


def full(self, name):
    if name.endswith(".bin"):
        raise OSError(28, "No space left on device", name)
    raise AssertionError(name) if "dense" in name else OSError(28, "No space left on device", name)


def work(rank, size, root, *, number, last):
    logging.disable(logging.CRITICAL)
    tensors(rank, size, root.parent, last=last)
    training(rank, size, root.parent)
    if size > 1:
        legacy(rank, size, root.parent, number=number)
    if size == 4 and not number:
        same_rows_twice(rank, size, root.parent)
        first_fsdp(rank, size, root.parent)
    if size == 1:
        one_rank_in_a_process_group(root.parent)
    if size == 2:
        refusals(rank, size, root.parent)
        damage_for_one(rank, size, root.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sizes = list(map(int, sys.argv[2:]))
    torch.save(TRUTH, Path(sys.argv[1], "truth.pt"))
    for number, size in enumerate(sizes):
        (root := Path(sys.argv[1], f"run-{number}")).mkdir()
        fork_ranks(size, root, partial(work, number=number, last=number == len(sizes) - 1))
