"""A job whose ranks save a chain and restore it, for test_shared_reads.py; as a script, by real ranks.

``shared_reads.py ROOT N,... M,...``: each of the first numbers of ranks saves, each of the second restores all of that.
``shared_reads.py ROOT killed``: three ranks restore what two have saved, and one is killed when it begins to read.
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import RecckptError
from recckpt.policies import Transfers
from recckpt.policies.deltas import Deltas
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable, gen_slice
from recckpt.sparse.files import link_pass
from recckpt.sparse.files.part_reader import LinkBatches
from support.rank_processes import fork_ranks, whole_life

TABLES = {"wide": (12, 1500), "narrow": (2, 40)}  # name -> values of a row, ids at first
LAST_STEP = 3


def versions(name, step):
    """Return what a table holds after a step: id -> the step that set it."""
    _, n_ids = TABLES[name]
    rows = dict.fromkeys(range(n_ids), 1)
    if step >= 2:
        rows = {id_: 2 if id_ % 5 == 0 else at for id_, at in rows.items() if id_ % 7 != 1}
        rows |= dict.fromkeys(range(n_ids, n_ids + n_ids // 10), 2)
    if step >= 3:
        rows = {id_: 3 if id_ % 9 == 0 else at for id_, at in rows.items() if id_ % 11 != 2}
        rows |= dict.fromkeys(range(1, n_ids, 14), 3)  # deleted by the step before
    return rows


def values(name, ids, steps):
    """Return the embeddings of ids that some steps set."""
    at = torch.arange(TABLES[name][0])
    return (torch.tensor(ids)[:, None] * 100 + torch.tensor(steps)[:, None] * 7 + at).float()


def expected(name, step=LAST_STEP, keeps=lambda id_: True):
    """Return the rows of a table after a step, id -> numbers."""
    rows = {id_: at for id_, at in versions(name, step).items() if keeps(id_)}
    return dict(zip(rows, values(name, list(rows), list(rows.values())).tolist(), strict=True))


class ChainJob:
    """One rank.

    Args:
        url: where it saves.
        rank, size: this rank of how many.
        connect: gives a saver its ranks; None for those of the process group.
        names: of its tables: name -> that of the table in TABLES which it is like.
    """

    def __init__(self, url, rank, size, *, connect=None, names=None, **options):
        self.rank, self.size, self.own = rank, size, gen_slice(rank, size)
        self.names = names or {name: name for name in TABLES}
        self.tables = {name: HashTable(TABLES[like][0], name=name, slice=self.own) for name, like in self.names.items()}
        model = nn.ModuleDict(self.tables)
        deltas = Deltas(full_every=10, max_chain_bytes=100.0)
        self.saver = Saver(model, output_dir=str(url), deltas=deltas, concurrency=2, **options)
        self.saver._to = replace(self.saver._to, sparse_saver=SparseSaver(2, batch_bytes=4 << 10))
        if connect:
            connect(self.saver)
        self.manager = CheckpointManager(self.saver, 10**9, shard_id=rank, shard_num=size)

    def set_state(self, step):
        """Make the tables what they are after a step, where the one before has left them."""
        for name, table in self.tables.items():
            before, after = (versions(self.names[name], at) if at else {} for at in (step - 1, step))
            gone = torch.tensor([id_ for id_ in before if id_ not in after], dtype=torch.int64)
            table.erase(gone[self.own.owns(gone)])
            ids = [id_ for id_, at in after.items() if before.get(id_) != at]
            ids = np.array(ids, np.int64)[self.own.owns(np.array(ids, np.int64))].tolist()
            table.insert(torch.tensor(ids), values(self.names[name], ids, [after[id_] for id_ in ids]))

    def save_chain(self, last=LAST_STEP):
        """Save a full checkpoint, and a delta a step."""
        for step in range(1, last + 1):
            self.set_state(step)
            kind = self.saver.save(f"ckpt_{step}", self.rank, self.size, step=step).kind
            assert kind == ("full" if step == 1 else "delta")

    def rows(self):
        """Return the rows of this rank: name of a table -> id -> numbers."""
        return {
            name: dict(zip(table.ids().tolist(), table.embeddings().tolist(), strict=True))
            for name, table in self.tables.items()
        }


def union(of_ranks):
    """Return the rows of all ranks; no two have an id."""
    rows = {}
    for tables in of_ranks:
        for name, some in tables.items():
            assert rows.setdefault(name, {}).keys().isdisjoint(some)
            rows[name] |= some
    return rows


def save_as_rank(rank, size, root):
    ChainJob(root / "runs", rank, size).save_chain()


def restore_as_rank(rank, size, root, *, sizes):
    link_pass.WINDOW_BYTES = 10_000  # several rounds
    found = {}
    for n_ranks in sizes:
        job = ChainJob(root.parent / f"save-{n_ranks}" / "runs", rank, size)
        report = job.manager.load_model_bank([])
        found[n_ranks] = job.rows(), report.bytes_read
    return found


def be_killed(rank, size, root):
    """Restore on a rank that is killed, or on one that says what it has raised then."""
    job = ChainJob(root / "runs", rank, size, transfers=Transfers(timeout_sec=30.0))
    if rank == 1:
        LinkBatches.reader = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        job.manager.restore()
    except RecckptError as error:
        lost = getattr(error, "ranks", None)
        (root / f"met-{rank}").write_text(f"{type(error).__name__} {lost} {[len(t) for t in job.tables.values()]}")


def fork_all(size, root, work):
    """Do work on ranks of which one may die."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            with whole_life():
                import torch.distributed as dist

                dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=size)
                work(rank, size, root)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def main():
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    if sys.argv[2] == "killed":
        fork_ranks(2, root, save_as_rank)
        fork_all(3, root, be_killed)
        return
    saving, restoring = ([int(size) for size in sizes.split(",")] for sizes in sys.argv[2:4])
    for size in saving:
        (root / f"save-{size}").mkdir()
        fork_ranks(size, root / f"save-{size}", save_as_rank)
    for size in restoring:
        (root / f"restore-{size}").mkdir()
        fork_ranks(size, root / f"restore-{size}", partial(restore_as_rank, sizes=saving))


if __name__ == "__main__":
    main()
