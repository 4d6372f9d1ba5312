"""What real ranks do for test_checkpointable.py: run it as ``checkpointable_ranks.py ROOT SIZE...``.

Each run of ranks restores what those before it have saved. Beside its local tensors each rank trains whole ones, which
say what every value has to be.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.checkpointable import Sharded, describe, local_of, spans_of
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import SaveFailedError

N_ROWS = 11


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Parameters and a buffer that lie on several ranks, and a bias that all have."""

    def __init__(self, rank, size, *, seed):
        super().__init__()
        self.spans = spans_of(rank, size, N_ROWS)
        whole = random(N_ROWS, 3, seed=seed)
        self.w = describe(nn.Parameter(local_of(whole, self.spans)), whole, self.spans)  # of torch's own class
        counts = torch.arange(N_ROWS) * seed
        self.register_buffer("counts", describe(local_of(counts, self.spans).as_subclass(Sharded), counts, self.spans))
        self.bias = nn.Parameter(random(2, seed=seed))


class Whole(nn.Module):
    """The same tensors, of one process."""

    def __init__(self, *, seed):
        super().__init__()
        self.w, self.bias = nn.Parameter(random(N_ROWS, 3, seed=seed)), nn.Parameter(random(2, seed=seed))
        self.register_buffer("counts", torch.arange(N_ROWS) * seed)


def made(rank, size, *, seed):
    models = [Model(rank, size, seed=seed), Whole(seed=seed)]
    return [(model, torch.optim.Adam(model.parameters(), lr=0.1)) for model in models]


def step(pairs, seed):
    (model, adam), (whole, of_whole) = pairs
    gradient, of_bias = random(N_ROWS, 3, seed=seed), random(2, seed=seed)
    model.w.grad, whole.w.grad = local_of(gradient, model.spans, padding=0), gradient
    model.bias.grad, whole.bias.grad = of_bias, of_bias.clone()
    adam.step()
    of_whole.step()


def same(pairs):
    (model, adam), (whole, of_whole) = pairs
    assert torch.equal(model.w.detach(), local_of(whole.w.detach(), model.spans))
    assert torch.equal(model.counts.as_subclass(torch.Tensor), local_of(whole.counts, model.spans))
    assert torch.equal(model.bias, whole.bias)
    for name in ("exp_avg", "exp_avg_sq"):
        mine, expected = adam.state[model.w][name], of_whole.state[whole.w][name]
        assert torch.equal(mine[1:], local_of(expected, model.spans)[1:]), name
    assert adam.state[model.w]["step"] == of_whole.state[whole.w]["step"]


def saver_of(model, adam, path):
    saver = Saver(model, output_dir=str(path))
    saver.register_for_checkpointing("adam", adam)
    return saver


def restores_and_saves(rank, size, root):
    for source in sorted(root.glob("run-*")):
        pairs = made(rank, size, seed=5)
        saver = saver_of(*pairs[0], source)
        assert CheckpointManager(saver, 10**9).restore() == 3
        trained = made(rank, size, seed=2)
        for number in range(3):
            step(trained, number)
        pairs = [pairs[0], trained[1]]
        same(pairs)
        step(pairs, 9)
        same(pairs)  # moments and steps go on as those of one process
    if size > 1:
        dist.barrier()  # before a glob sees what is new
    pairs = made(rank, size, seed=2)
    for number in range(3):
        step(pairs, number)
    handle = saver_of(*pairs[0], root / f"run-{size}").save_async("c", rank, size, step=3)
    step(pairs, 8)  # changes all that is being saved
    handle.wait()
    if size == 2:
        refuses(rank, size, root)


def error_of(work):
    try:
        work()
    except Exception as error:
        return error
    return None


def refuses(rank, size, root):
    """What does not make up a whole tensor is refused on all ranks, by name, and nothing is committed."""
    model = Model(rank, size, seed=1)
    saver = Saver(model, output_dir=str(root / "refused"))
    model.w.global_offsets = ((0, 0), (0, 0))
    error = error_of(lambda: saver.save("twice", rank, size))
    assert isinstance(error, SaveFailedError), error
    assert "sharded tensor w: found (" in str(error), error  # as many values as there are
    assert "which another shard also has in part, expected each value once" in str(error), error
    model = Model(rank, size, seed=1)
    saver = Saver(model, output_dir=str(root / "refused"))
    describe(model.w, torch.zeros(N_ROWS, 3), [(0, N_ROWS)])  # more rows than the local tensor has
    error = error_of(lambda: saver.save("outside", rank, size))
    assert isinstance(error, ValueError), error
    assert "w: found global_shape (11, 3), global_offsets ((0, 0),)" in str(error)
    model = Model(0, 1, seed=1)  # the same values on all ranks
    saver = Saver(model, output_dir=str(root / "refused"))
    error = error_of(lambda: saver.save("copies", rank, size))
    assert isinstance(error, SaveFailedError)
    assert "several ranks have the same part" in str(error), error
    dist.barrier()
    assert not list((root / "refused").glob("*/manifest.json"))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for size in map(int, sys.argv[2:]):
        fork_ranks(size, root, restores_and_saves)
