"""What real ranks do for test_ddp.py: run it as ``ddp_ranks.py ROOT SIZE... [BUG]``, with a bug to plant.

Each run of ranks loads what that before it has saved.
"""

import logging
import sys
from functools import partial
from pathlib import Path

import torch
from faults.plants import plant
from support.live_runs import DENSE, N_ROWS, SPARSE, Clicks, rows_by_id
from support.rank_processes import fork_ranks
from torch import nn, optim

from recckpt import Deltas, Saver
from recckpt.inspect.verify import verify
from recckpt.live import live_tables

RULES = {
    name: {**SPARSE, **DENSE}[name] for name in ("sparse Adagrad", "Adagrad", "SparseAdam", "Adam", "SGD momentum")
}


class Rank:
    """The run of one rank: a model under DDP, and this rank's part of each batch."""

    def __init__(self, rank, size, root, rule, seed=0):
        torch.manual_seed(seed)
        self.rank, self.size = rank, size
        self.module = Clicks(sparse=rule in SPARSE)
        self.model = nn.parallel.DistributedDataParallel(self.module) if size > 1 else self.module
        self.rows = RULES[rule]([self.module.users.weight, self.module.items.weight])
        self.dense = optim.Adam(self.module.top.parameters())
        self.tables = live_tables(self.model, self.rows, min_rows=10)
        self.saver = Saver(
            self.model,
            output_dir=str(root / rule),
            tables=self.tables,
            deltas=Deltas(max_dirty=1, max_chain_bytes=100),
            max_keep=None,
        )
        self.saver.register_for_checkpointing("dense", self.dense)
        self.random = torch.Generator().manual_seed(7)

    def train(self, n_steps=2):
        for _ in range(n_steps):
            ids = torch.randint(0, N_ROWS, (4, 2), generator=self.random)
            self.model(ids[self.rank :: self.size]).square().sum().backward()
            for one in (self.rows, self.dense):
                one.step()
                one.zero_grad()

    def state(self):
        live = {
            name: rows_by_id({s: t.detach().numpy() for s, t in table.live.tensors().items()})
            for name, table in self.tables.items()
        }
        steps = {name: table.live.scalars() for name, table in self.tables.items()}
        return {"rows": live, "steps": steps, "top": self.module.top.weight.detach().numpy().tobytes()}


def said_of_copies(one, size):
    """Let the copies differ, save twice, and return what is said of that."""
    said, log = [], logging.getLogger("recckpt")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    with torch.no_grad():
        one.module.users.weight[5] += one.rank
    for time in range(2):
        one.saver.save(f"apart-{size}-{time}", step=size * 10 + 3)
    log.removeHandler(handler)
    return [text for text in said if "copies" in text]


def run(rank, size, root, before):
    outcome = {}
    for rule in RULES:
        one = Rank(rank, size, root, rule, seed=size)
        of_rule = outcome[rule] = {}
        if before:
            report = one.saver.load(ckpt_id=f"last-{before}")
            of_rule["loaded"], of_rule["taken"] = one.state(), dict(report.rows_taken)
        one.train()
        of_rule["kinds"] = [one.saver.save(f"first-{size}", step=size * 10).kind]
        one.train(1)
        expected = one.state()
        handle = one.saver.save_async(f"last-{size}", step=size * 10 + 1)
        one.train()
        of_rule["kinds"].append(handle.wait().kind)
        of_rule["saved"], of_rule["own"] = expected, len(one.tables["users"])
        record = one.saver.save(f"third-{size}", step=size * 10 + 2)
        of_rule["upserts"] = {table.name: table.delta and table.delta.upserts for table in record.tables}
        of_rule["said"] = said_of_copies(one, size)
        one.saver.close()
    return outcome


if __name__ == "__main__":
    root, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    before = 0
    if not sizes[-1].isdigit():
        plant(sizes.pop())
    for size in map(int, sizes):
        fork_ranks(size, Path(root), partial(run, before=before))
        before = size
    for rule in RULES:
        assert verify(str(Path(root) / rule)) == []
