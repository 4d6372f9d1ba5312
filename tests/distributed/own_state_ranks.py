"""What real ranks do for test_own_state.py: run it as ``own_state_ranks.py ROOT SIZE...``.

Each run of ranks loads what those before it have saved.
"""

import logging
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support.rank_processes import fork_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from recckpt import CheckpointManager, Saver
from recckpt.errors import StateMismatchError
from recckpt.inspect.verify import verify


class Value:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return {"value": self.state}

    def load_state_dict(self, state):
        self.state = state["value"]


def error_of(work):
    try:
        work()
    except StateMismatchError as error:
        return error
    return None


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def groups(model):
    first, second = (list(model[number].parameters()) for number in (0, 2))
    return [{"params": first, "lr": 0.02}, {"params": second}]


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(6, 5)).square().sum().backward()
    optimizer.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def straight():
    """Return the weights after five steps of one process, whose learning rate changes after the second."""
    model = layers(0)
    optimizer = torch.optim.Adam(groups(model), lr=0.01)
    for number in range(5):
        step(model, optimizer, number)
        optimizer.param_groups[0]["lr"] = 0.02 if number < 1 else 0.005
    return weights(model)


def spread(rank, size, root):
    """Take up the runs of ZeRO of other numbers of ranks, and save one; an ordinary Adam is taken up, too."""
    for source in sorted(root.glob("spread-*")):
        model = layers(1)
        zero = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.01)
        step(model, zero, 77)  # what it has is not kept
        manager = CheckpointManager(saver_of(model, source, "zero", zero), 10**9)
        assert manager.restore() == 3
        rates = [group["lr"] for group in zero.param_groups]
        assert rates == [0.005, 0.01], (source, rates)
        for number in (3, 4):
            step(model, zero, number)
        assert torch.equal(weights(model), straight()), source
    dist.barrier()
    model = layers(0)
    zero = ZeroRedundancyOptimizer(groups(model), torch.optim.Adam, lr=0.01)
    saver = saver_of(model, root / f"spread-{size}", "zero", zero)
    for number in range(3):
        step(model, zero, number)
        zero.param_groups[0]["lr"] = 0.02 if number < 1 else 0.005
    handle = saver.save_async("c", step=3, overwrite=True)
    step(model, zero, 99)
    handle.wait()
    if rank == 0:
        model = layers(0)
        optimizer = torch.optim.Adam(groups(model), lr=0.01)
        saver = saver_of(model, root / "spread-plain", "zero", optimizer)
        for number in range(3):
            step(model, optimizer, number)
            optimizer.param_groups[0]["lr"] = 0.02 if number < 1 else 0.005
        saver.save("c", 0, 1, step=3, overwrite=True)


def saver_of(model, root, name, obj, **kwargs):
    saver = Saver(model, output_dir=str(root))
    saver.register_for_checkpointing(name, obj, **kwargs)
    return saver


def own(rank, size, root):
    """Each rank has a value of its own, which as many ranks get back, and others may leave out."""
    url, model = root / "own-2", nn.Linear(1, 1)
    if size == 2:
        saver_of(model, url, "v", Value(10 + rank), per_rank=True).save("c", overwrite=True)
        value = Value()
        saver_of(model, url, "v", value, per_rank=True).load()
        assert value.state == 10 + rank
        unregistered = Saver(model, output_dir=str(url))
        unregistered.load()
        assert unregistered.get_extra_data("v") == {"value": 10 + rank}
        error = error_of(saver_of(model, url, "v", value).load)
        expected = "one for all ranks: register it with per_rank=True, or leave it out with 'exclude': ['v']"
        assert error.mismatched == {"v": ("states of 2 ranks, one each", expected)}
        assert verify(str(url)) == []
        return
    saver = saver_of(model, url, "v", value := Value(5), per_rank=True)
    bank = [{"path": str(url)}]
    for refused in (saver.load, partial(saver.load_by_config, bank), partial(saver.plan, bank)):
        expected = f"states of {size} ranks: leave it out with 'exclude': ['v']"
        assert error_of(refused).mismatched == {"v": ("states of 2 ranks, one each", expected)}
    saver.load(load_conf={"exclude": ["v"]})
    assert value.state == 5
    saver_of(model, root / f"common-{size}-{rank}", "v", Value(3)).save("c", 0, 1)
    saver.load(str(root / f"common-{size}-{rank}"))
    assert value.state == 3, "what was one for all goes to each"


class Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def differing(rank, size, root):
    """What ranks do not have in common is said once, by name."""
    logging.disable(logging.NOTSET)
    logging.getLogger("recckpt").addHandler(told := Told())
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, rank)
    saver = saver_of(model, root / f"differing-{size}", "v", Value(rank))
    saver.register_for_checkpointing("same", Value(7))
    saver.register_for_checkpointing("own", Value(rank), per_rank=True)
    for ckpt_id in "abc":
        saver.save(ckpt_id)
    logging.getLogger("recckpt").removeHandler(told)
    logging.disable(logging.CRITICAL)
    names = [text.partition(":")[0] for text in told.texts if " differs on " in text]
    others = "rank 1" if size == 2 else "ranks 1, 2"
    expected = [f"dense 'weight' differs on {others}", f"register_for_checkpointing 'v' differs on {others}"]
    assert names == (expected if rank == 0 else []), told.texts


def flattened(rank, size, root):
    """The ranks of FullyShardedDataParallel gather its state dict together: no rank may ask for it alone."""
    states = []
    for seed in (0, 1):
        model = FullyShardedDataParallel(layers(seed), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        manager = CheckpointManager.attach(
            model, optimizer, output_dir=str(root / f"flattened-{size}"), save_interval=10
        )
        manager.restore()
        states.append(model.state_dict())
        manager.step()
        manager.save()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def work(rank, size, root):
    logging.disable(logging.CRITICAL)
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for scene in (spread, own, *((differing, flattened) if size > 1 else ())):
        scene(rank, size, root.parent)
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, size in enumerate(map(int, sys.argv[2:])):
        (root := Path(sys.argv[1], f"run-{number}")).mkdir()
        fork_ranks(size, root, work)
