"""What each of several real processes does for test_sharded_ranks.py: run it as ``sharded_ranks.py ROOT SIZE...``."""

import sys
from pathlib import Path

import torch
import torch._dynamo  # of which every rank would import its own
import torch.distributed as dist
from support.rank_processes import fork_ranks
from torch.distributed.fsdp import fully_shard

from recckpt import Saver
from recckpt.errors import LookupFailedError
from recckpt.policies.admit import Bloom, MinCount, Probability
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam, SparseSGD

START = Normal(0.0, 0.1, seed=3)


class Model(torch.nn.Module):
    """Tables of two shapes and a dense layer."""

    def __init__(self, make=ShardedHashTable):
        super().__init__()
        kinds = {"user": 4, "item": 4, "context": 2}
        tables = [make(dim, name=name, initializer=START) for name, dim in kinds.items()]
        self.tables = EmbeddingCollection(tables) if make is ShardedHashTable else torch.nn.ModuleList(tables)
        self.top = torch.nn.Linear(sum(kinds.values()), 1)

    def forward(self, ids):
        if isinstance(self.tables, EmbeddingCollection):
            rows = self.tables({name: ids[:, i] for i, name in enumerate(("user", "item", "context"))})
        else:
            rows = {table.name: table(ids[:, i]) for i, table in enumerate(self.tables)}
        return self.top(torch.cat(list(rows.values()), 1)).squeeze(1)


def batch(step):
    """Return the ids and targets of all ranks."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(-40, 40, (16, 3), generator=draw), torch.rand(16, generator=draw)


def train(model, optim, call, step, rank, size):
    ids, targets = batch(step)
    loss = (call(ids[rank::size]) - targets[rank::size]).square().mean()
    optim.zero_grad()
    model.top.zero_grad()
    loss.backward()
    optim.step()
    with torch.no_grad():
        for parameter in model.top.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.item()


def rows_of(model):
    """Return table -> id -> values of all slots."""
    found = {}
    for table in filter_out_sparse_param(model).values():
        columns = torch.cat([table.embeddings(), *table.slots.values()], 1)
        found[table.name] = dict(zip(table.ids().tolist(), columns.tolist(), strict=True))
    return found


def beside_ddp(rank, size, root):
    torch.manual_seed(rank)  # DDP gives all ranks the dense weights of the first
    model = Model()
    call = torch.nn.parallel.DistributedDataParallel(model)
    optim = SparseAdam(filter_out_sparse_param(model), lr=0.05)
    losses = [train(model, optim, call, step, rank, size) for step in range(5)]
    saver = Saver(model, optim, str(root / f"runs-{size}"))
    saver.save("trained", rank, size)
    return {"losses": losses, "rows": rows_of(model), "dense": [p.tolist() for p in model.top.parameters()]}


def fail_and_go_on(rank, size, root):
    table = ShardedHashTable(2, name="t", initializer=START)
    try:
        table(torch.tensor([1], dtype=torch.int16 if rank == 1 else torch.int64))
        failed = None
    except LookupFailedError as error:
        failed = error.rank, str(error), len(table)
    rows = table(torch.arange(4))
    try:
        if rank != 1:  # which goes on to its next step
            rows.sum().backward()
        table(torch.arange(4))
        forgotten = None
    except LookupFailedError as error:
        forgotten = error.rank, str(error)
    return failed, forgotten, table(torch.arange(4)).tolist()


def send_all_and_nothing(rank, size, root):
    """Rows of several sizes, of megabytes to and from one rank alone, and none at all."""
    found = []
    for dtype, dim in ((torch.float32, 300), (torch.bfloat16, 1), (torch.int8, 3)):
        table = ShardedHashTable(dim, name=str(dtype), dtype=dtype)
        for n_ids in (0, 5000 if rank == 0 else 0, 1 + rank):
            rows = table(torch.arange(n_ids))
            if dtype.is_floating_point:
                rows.sum().backward()
            found.append(tuple(rows.shape))
        taken = table.take_gradients() if dtype.is_floating_point else None
        found.append((len(table), None if taken is None else taken[1].double().sum().item()))
    return found


def share_between_two(rank, size, root):
    """Tables of which every two ranks have one of their own."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    table = ShardedHashTable(1, name="t", group=groups[rank // 2], gradients="sum")
    table(torch.arange(10) + rank // 2 * 100).sum().backward()
    _, grads = table.take_gradients()
    outside = None
    if size > 2:
        try:
            ShardedHashTable(1, name="u", group=groups[1 - rank // 2])
        except ValueError as error:
            outside = str(error)
    return sorted(table.ids().tolist()), grads.flatten().tolist(), outside


def count_together(rank, size, root):
    """Tables of which one counts, one knows the time, and one tracks nothing, looked up together."""
    tracks = {"user": ("count", "step", "time"), "item": ("time",), "context": ()}
    tables = [ShardedHashTable(2, name=name, track=track) for name, track in tracks.items()]
    collection = EmbeddingCollection(tables)
    for step in range(3):
        for table in tables:
            table.step, table.event_time = step, step / 2
        ids = batch(step)[0][rank::size]
        collection({name: ids[:, i] for i, name in enumerate(tracks)})
    found = {}
    for table in tables:
        slots = [some.tolist() for some in table.slots.values()]
        found[table.name] = dict(zip(table.ids().tolist(), zip(*slots, strict=True), strict=bool(slots)))
    return found


class Admitting(torch.nn.Module):
    """Tables that admit by exact counts, by a filter, by a coin, and all."""

    def __init__(self, make):
        super().__init__()
        admits = {"exact": MinCount(3), "bloom": MinCount(3, Bloom(1000, 0.01)), "coin": Probability(0.2), "all": None}
        options = {"initializer": START, "track": "count"}
        self.tables = torch.nn.ModuleList(make(2, name=name, admit=admit, **options) for name, admit in admits.items())

    def train_on(self, steps, rank, size):
        optim = SparseSGD(list(self.tables), lr=0.05)
        for step in steps:
            ids = torch.randint(-30, 30, (12,), generator=torch.Generator().manual_seed(step))
            for table in self.tables:
                table.step = step
                (table(ids[rank::size]) * ids[rank::size].view(-1, 1) * size).sum().backward()
                table(torch.arange(-40, 40), admit=False)
            optim.step()
            optim.zero_grad()

    def rows(self):
        """Return table -> id -> embedding, and its count; and of candidates."""
        candidates = [table.candidates for table in self.tables if table.candidates is not None]
        found = {}
        for table in [*self.tables, *candidates]:
            columns = torch.cat([table.embeddings().double(), *(some.view(-1, 1) for some in table.slots.values())], 1)
            found[table.name] = dict(zip(table.ids().tolist(), columns.tolist(), strict=True))
        return found


def admit_together(rank, size, root):
    """Half of the steps, a save, and the other half; and the other half from what fewer ranks have saved."""
    model = Admitting(ShardedHashTable)
    model.train_on(range(3), rank, size)
    Saver(model, None, str(root / f"admitting-{size}")).save("half", rank, size)
    model.train_on(range(3, 6), rank, size)
    other = model
    if size > 2:
        other = Admitting(ShardedHashTable)
        Saver(other, None, str(root / "own")).load(root / "admitting-2" / "half")
        other.train_on(range(3, 6), rank, size)
    return model.rows(), other.rows()


class Towers(torch.nn.Module):
    """Tables of which a step may leave one out, and which may be frozen."""

    def __init__(self, make):
        super().__init__()
        self.user, self.item = (make(2, name=name, initializer=START) for name in ("user", "item"))
        self.top = torch.nn.Linear(2, 1)

    def forward(self, ids, names):
        tables = [getattr(self, name) for name in names]
        return self.top(sum(table(ids) + table.bag(ids[:, None]) for table in tables)).sum()


def freeze_what_is_wrapped(rank, size, root):
    """Which tables moved in each step: all of them there, one left out, one frozen after the model was wrapped."""
    found = {}
    for make in (HashTable, ShardedHashTable):
        for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
            model = Towers(make)
            call, tables = wrap(model), {"user": model.user, "item": model.item}
            optims = SparseSGD(tables, lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
            moved = []
            for names, frozen in ((["user", "item"], ""), (["user"], ""), (["user", "item"], "item"), (["item"], "")):
                for name, table in tables.items():
                    table.requires_grad_(name != frozen)
                before = {name: table.embeddings() for name, table in tables.items()}
                call(torch.arange(5) + rank, names).backward()
                for optim in optims:
                    optim.step()
                    optim.zero_grad()
                moved.append([name for name in tables if not torch.equal(tables[name].embeddings(), before[name])])
            found[make.__name__, wrap.__name__] = moved
    return found


SCENES = [
    admit_together,
    beside_ddp,
    count_together,
    fail_and_go_on,
    freeze_what_is_wrapped,
    send_all_and_nothing,
    share_between_two,
]


def play(rank, size, root):
    return {scene.__name__: scene(rank, size, root) for scene in SCENES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in map(int, sys.argv[2:]):
        fork_ranks(size, Path(sys.argv[1]), play)
