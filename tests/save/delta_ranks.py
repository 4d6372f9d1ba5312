"""What real ranks do for test_ranks.py: run it as ``delta_ranks.py ROOT``.

Each run of ranks restores what those before it have saved, and goes on with deltas.
"""

import pickle
import sys
from pathlib import Path

import torch
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import SaveFailedError
from recckpt.sparse import HashTable, SparseAdagrad, gen_slice


class Trainer:
    """A rank: its slice of two tables, and a saver of all."""

    def __init__(self, rank, size, root):
        self.rank, self.root, self.own = rank, root, gen_slice(rank, size)
        self.tables = [HashTable(2, name=name, slice=self.own) for name in ("a", "b")]
        self.model = torch.nn.ModuleList(self.tables)
        self.optimizer = SparseAdagrad(self.tables, lr=0.1)
        deltas = Deltas(max_chain_bytes=1000, max_dirty=1.0)
        self.infos = []
        url = str(root / "saved")
        self.saver = Saver(self.model, self.optimizer, url, None, deltas=deltas, on_save=self.infos.append)
        self.manager = CheckpointManager(self.saver, 10**9, shard_id=rank, shard_num=size)

    def train(self, *ids):
        ids = torch.tensor(ids)
        ids = ids[self.own.owns(ids)]
        for table in self.tables:
            table(ids).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.manager.step()

    def erase(self, *ids):
        ids = torch.tensor(ids)
        self.tables[0].erase(ids[self.own.owns(ids)])

    def save(self, **options):
        """Save, and leave what this rank has, which a reader of all is to find."""
        ckpt_id = f"ckpt_{self.manager.global_step}"
        record = self.saver.save(ckpt_id, **options)
        held = self.root / f"{ckpt_id}-of-{self.rank}"
        held.write_bytes(pickle.dumps({table.name: rows_of(table) for table in self.tables}))
        entry = record.table("a")
        delta = entry.delta and (entry.delta.upserts, entry.delta.deletes, entry.delta.replaced)
        return ckpt_id, record.kind, delta, self.infos[-1].why_full


def rows_of(table):
    columns = {"embedding": table.embeddings(), **table.slots}
    return {
        id_: {name: column[row].detach().numpy().tobytes() for name, column in columns.items()}
        for row, id_ in enumerate(table.ids().tolist())
    }


def go_on(rank, size, root):
    trainer = Trainer(rank, size, root)
    trainer.manager.restore()
    trainer.train(*range(100))
    seen = [trainer.save()]
    trainer.train(*range(10), 200 + size)
    trainer.erase(*range(20, 26))
    seen.append(trainer.save())
    if rank == size - 1:
        trainer.tables[0].clear()
    trainer.train(3)
    seen.append(trainer.save())
    trainer.train(4)
    seen.append(fails_on_the_last(trainer, size))
    trainer.train(5)
    seen.append(trainer.save())
    if size > 1 and rank == 1:
        trainer.saver._to.changes.drop_base()
    trainer.train(6)
    seen.append(trainer.save())
    trainer.train(7, 8)
    seen.append(trainer.save(ephemeral=True))
    trainer.train(9)
    return [*seen, trainer.save()]


def fails_on_the_last(trainer, size):
    """Save, which fails on one rank."""
    storage = trainer.saver.storage
    create = storage.create

    def fail(name):
        raise OSError(5, "Input/output error", name)

    if trainer.rank == size - 1:
        storage.create = fail
    try:
        trainer.saver.save("fails")
    except SaveFailedError as error:
        return error.rank
    finally:
        storage.create = create
    return None


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for number, size in enumerate((2, 3, 1)):
        (root / str(number)).mkdir()
        (root / str(number) / "saved").symlink_to(root / "saved", target_is_directory=True)
        (root / "saved").mkdir(exist_ok=True)
        fork_ranks(size, root / str(number), go_on)
