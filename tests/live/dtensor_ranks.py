"""What real ranks do for test_dtensor.py: run it as ``dtensor_ranks.py ROOT CASES SIZE...``.

Each run of ranks restores what that before it has saved, saves a chain, restores it and trains on; one rank alone has
plain embeddings.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from support.live_runs import rows_by_id
from support.rank_processes import fork_ranks
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.inspect.verify import verify
from recckpt.live import live_tables

N_USERS, N_ITEMS = 61, 4  # which no number of ranks divides; which three ranks have in two parts and nothing
DELTAS = Deltas(max_dirty=1, max_chain_bytes=100)
RULES = {
    "Adagrad": lambda weights: optim.Adagrad(weights, lr=0.1),
    "Adam": lambda weights: optim.Adam(weights, lr=0.1, amsgrad=True),
    "momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9),
    "foreach": lambda weights: optim.Adam(weights, lr=0.1, foreach=True),
    "fused": lambda weights: optim.AdamW(weights, lr=0.1, fused=True),
}
OF_DTENSORS_ALONE = ("foreach", "fused")  # torch refuses those beside plain tensors


class Clicks(nn.Module):
    """Users and items, as plain embeddings, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(N_USERS, 3)
        self.items = nn.EmbeddingBag(N_ITEMS, 3, mode="sum")
        self.top = nn.Linear(6, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.users(ids[:, 0]), self.items(ids % N_ITEMS)], -1))


def by_fsdp(model, size):
    """Users give back some or all of the rows that they gather; items keep them, as torch does for a root."""
    fully_shard(model.users, reshard_after_forward=2 if size == 4 else True)
    fully_shard(model)


def by_hybrid_fsdp(model, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "parts"))
    fully_shard(model.users, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def by_rows(model, size):
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"users": RowwiseParallel(input_layouts=Replicate())})


def by_copies(model, size):
    mesh = init_device_mesh("cpu", (size,))
    distribute_module(
        model.users,
        mesh,
        input_fn=lambda module, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Replicate()]),),
        output_fn=lambda module, output, mesh: output.to_local(),
    )


LAYOUTS = {"fsdp": by_fsdp, "hybrid": by_hybrid_fsdp, "rows": by_rows, "copies": by_copies}


def fits(layout, rule, size):
    return (size in (1, 2, 4) or layout != "hybrid") and (layout in ("fsdp", "hybrid") or rule not in OF_DTENSORS_ALONE)


class Rank:
    """The run of one rank: a model that lies as a layout says, and this rank's part of each batch."""

    def __init__(self, rank, size, output_dir, layout, rule, seed=0):
        torch.manual_seed(seed)
        self.part = slice(rank, None, size) if layout in ("fsdp", "hybrid") else slice(None)
        self.model = Clicks()
        if size > 1:
            LAYOUTS[layout](self.model, size)
        of_all = layout == "fsdp"  # then one optimizer trains all, and is registered for the rest
        tables = [self.model.users.weight, self.model.items.weight]
        self.rows = RULES[rule]([*self.model.parameters()] if of_all else tables)
        self.dense = self.rows if of_all else optim.Adam(self.model.top.parameters())
        self.evaluate()
        self.tables = live_tables(self.model, [self.rows], min_rows=1)
        self.saver = Saver(self.model, output_dir=output_dir, tables=self.tables, deltas=DELTAS, max_keep=None)
        self.saver.register_for_checkpointing("dense", self.dense)
        self.manager = CheckpointManager(self.saver, 10**9)

    def evaluate(self):
        """Let FSDP2 leave what it has gathered where the parts were."""
        with torch.no_grad():
            self.model(torch.zeros(2, 2, dtype=torch.int64))

    def train(self, first, end):
        for number in range(first, end):
            ids = torch.randint(0, N_USERS, (4, 2), generator=torch.Generator().manual_seed(number))
            self.model(ids[self.part]).square().sum().backward()
            for one in {self.rows, self.dense}:
                one.step()
                one.zero_grad()

    def state(self):
        """Return the rows of this rank by table and id, the steps, and the dense parameters of this rank."""
        live = {}
        for name, table in self.tables.items():
            rows = rows_by_id({s: t.detach().numpy() for s, t in table.live.tensors().items()})
            live[name] = {table.live.box().rows[0] + row: values for row, values in rows.items()}
        self.model.state_dict()  # which puts all parts in their places
        top = [getattr(one, "_local_tensor", one).detach().numpy().tobytes() for one in self.model.top.parameters()]
        return {"rows": live, "steps": {name: table.live.scalars() for name, table in self.tables.items()}, "top": top}


def run(rank, size, root, *, cases, number):
    return {case: chain(rank, size, root, *case, number) for case in cases if fits(*case, size)}


def chain(rank, size, root, layout, rule, number):
    """Restore, save a full checkpoint and two deltas, the last beside training; restore that, and train on alike."""
    where = str(root.parent / f"{layout}-{rule}")
    one = Rank(rank, size, where, layout, rule, seed=size)
    outcome = {"found": one.manager.restore(), "restored": one.state(), "printed": str(one.tables), "kinds": []}
    saved = []
    for k in range(3):
        one.train(k, k + 1)
        one.evaluate()
        expected = one.state()
        if k < 2:
            saved.append(one.saver.save(f"{number}-{k}", step=10 * number + k))
    handle = one.saver.save_async(f"{number}-2", step=10 * number + 2)
    one.train(3, 8)
    saved.append(handle.wait())
    outcome["kinds"] = [record.kind for record in saved]
    outcome["upserts"] = [{t.name: t.delta.upserts for t in record.tables if t.delta} for record in saved]
    outcome["dense"] = sorted(name.text for name in one.saver.loader.live_state().inventory if "dense" in name.group)
    outcome["saved"], end = expected, one.state()
    one.saver.close()
    other = Rank(rank, size, where, layout, rule, seed=99)
    assert other.manager.restore() == 10 * number + 2
    assert other.state() == expected
    other.train(3, 8)
    assert other.state() == end
    other.saver.close()
    return outcome


if __name__ == "__main__":
    root, cases, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    cases = [tuple(case.split("-")) for case in cases.split()]  # layout and rule
    for number, size in enumerate(map(int, sizes), 1):
        (Path(root) / f"run-{number}").mkdir()
        fork_ranks(size, Path(root) / f"run-{number}", partial(run, cases=cases, number=number))
    for layout, rule in cases:
        if any(fits(layout, rule, int(size)) for size in sizes):
            assert verify(str(Path(root) / f"{layout}-{rule}")) == []
