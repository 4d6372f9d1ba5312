"""A job whose rows follow from their ids, for test_resharding.py; as a script, its saves and restores by real ranks.

``resharding.py ROOT N,... M,...``: each of the first numbers of ranks saves, each of the second restores all of that.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable, SparseAdam, gen_slice
from support.rank_processes import fork_ranks

TABLES = {"wide": 32, "narrow": 2}
STEP = 7


class Job:
    """One rank of it.

    Args:
        url: where it saves.
        rank, size: this rank of how many.
        connect: gives a saver its ranks; None for those of the process group.
        batch_bytes: of rows; that of real tables would be all of a small one.
    """

    def __init__(self, url, rank, size, *, connect=None, batch_bytes=64 << 10):
        self._rank, self._size, self.own = rank, size, gen_slice(rank, size)
        self.tables = {name: HashTable(dim, name=name, slice=self.own) for name, dim in TABLES.items()}
        self.top = nn.Linear(3, 1)
        model = nn.ModuleDict({**self.tables, "top": self.top})
        optim = SparseAdam(list(self.tables.values()))
        self.saver = Saver(model, optim, str(url), concurrency=2)
        self.saver._to = replace(self.saver._to, sparse_saver=SparseSaver(2, batch_bytes=batch_bytes))
        if connect:
            connect(self.saver)
        self.manager = CheckpointManager(self.saver, 10**9, shard_id=rank, shard_num=size)

    def save(self, n_rows):
        self.saver.register_for_checkpointing("note", {"rows": n_rows})
        with torch.no_grad():
            self.top.weight.copy_(torch.arange(3.0))
        for name, table in self.tables.items():
            columns = truth(name, n_rows)
            own = self.own.owns(columns["id"])
            mine = {column: values[own] for column, values in columns.items()}
            table.insert(mine.pop("id"), mine.pop("embedding"), mine)
        return self.saver.save(f"ckpt_{STEP}", self._rank, self._size, step=STEP)

    def restore(self):
        """Restore, and return all that is there then."""
        report = self.manager.load_model_bank([])
        columns = {
            name: {"id": table.ids(), "embedding": table.embeddings(), **table.slots}
            for name, table in self.tables.items()
        }
        return {
            "step": self.manager.global_step,
            "note": self.saver.get_extra_data("note"),
            "weight": self.top.weight.detach().flatten().tolist(),
            "bytes_read": report.bytes_read,
            "owned": all(bool(self.own.owns(table.ids()).all()) for table in self.tables.values()),
            "tables": {t: {c: values.clone() for c, values in found.items()} for t, found in columns.items()},
        }


def truth(name, n_rows):
    """Return the columns of a table: every bit follows from the id."""
    ids = torch.arange(n_rows if name == "wide" else 50) * 0x9E3779B97F4A7C15 - 2**62
    dim = TABLES[name]
    columns = {"id": ids}
    for number, column in enumerate(("embedding", "sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"), start=1):
        bits = (ids[:, None] ^ (torch.arange(dim) * 0x632BE59BD9B4E019 * number)) >> 20
        columns[column] = bits.to(torch.int32).view(torch.float32)
    return columns


def check(ranks, n_rows):
    """Check that the ranks that restored have every row, with every bit, once and where it belongs."""
    for rank in ranks:
        assert (rank["step"], rank["note"], rank["weight"]) == (STEP, {"rows": n_rows}, [0, 1, 2])
        assert rank["owned"]
    for name in TABLES:
        expected = truth(name, n_rows)
        order = expected["id"].argsort()
        found = {c: torch.cat([rank["tables"][name][c] for rank in ranks]) for c in expected}
        at = found["id"].argsort()
        assert torch.equal(found["id"][at], expected["id"][order]), "every id, and none twice"
        for column in expected.keys() - {"id"}:
            assert torch.equal(found[column][at].view(torch.int32), expected[column][order].view(torch.int32))


def save_as_rank(rank, size, root, *, n_rows):
    Job(root / f"runs-{size}", rank, size, batch_bytes=8 << 10).save(n_rows)


def restore_as_rank(rank, size, root, *, sizes):
    return {n: Job(root.parent / f"save-{n}" / f"runs-{n}", rank, size).restore() for n in sizes}


def main():
    torch.set_num_threads(1)
    root, n_rows = Path(sys.argv[1]), int(sys.argv[2])
    saving, restoring = ([int(size) for size in sizes.split(",")] for sizes in sys.argv[3:5])
    for size in saving:
        (root / f"save-{size}").mkdir()
        fork_ranks(size, root / f"save-{size}", partial(save_as_rank, n_rows=n_rows))
    for size in restoring:
        (root / f"restore-{size}").mkdir()
        fork_ranks(size, root / f"restore-{size}", partial(restore_as_rank, sizes=saving))


if __name__ == "__main__":
    main()
