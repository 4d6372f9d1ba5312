"""T3 with deltas: an operation of the storage fails; whatever the save says, the next holds all that has changed."""

import errno
import os
from itertools import count

import pytest
import spec_reader
import torch
from faults.storage_faults import WHEN, Faults
from torch import nn

from recckpt import Deltas, Saver
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.sparse import HashTable

SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "1"))
DELTAS = Deltas(full_every=4, max_chain_bytes=100)


class Trainer:
    """A run with one table, of which each save is to be found by a reader that knows only the page."""

    def __init__(self, root):
        self.root, self.n_saves = root, 0
        self.table = HashTable(2, name="t")
        self.table(torch.arange(60))
        self.start()

    def start(self):
        """Begin as a new process does that restores what is there."""
        self.saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(self.root), deltas=DELTAS, concurrency=1)
        if self.n_saves:
            self.saver.load()
        self.faults = Faults(self.saver.storage)

    def change(self):
        self.n_saves += 1
        ids = torch.arange(self.n_saves % 50, self.n_saves % 50 + 5)
        self.table.insert(ids, torch.full((5, 2), float(self.n_saves)))
        self.table.erase(ids[:2] + 3)

    def save(self):
        return self.saver.save(f"c{self.n_saves}")

    def check(self):
        """Compare the newest checkpoint with the table of now."""
        embeddings = self.table.embeddings()
        rows = {
            id_: {"embedding": embeddings[row].numpy().tobytes()} for row, id_ in enumerate(self.table.ids().tolist())
        }
        newest = max(spec_reader.counting(self.root), key=lambda c: c.place)
        assert spec_reader.read(self.root, newest.manifest["ckpt_id"], "t") == rows


def try_each(root, when, stride, *, restarts):
    """Fail one operation of a save after the other, in one run; return how many there were."""
    trainer = Trainer(root)
    trainer.save()
    kinds = set()
    for number in count(1, stride):
        trainer.change()
        if restarts:
            trainer.save()
            trainer.start()
            trainer.change()
        trainer.faults.plant(number, errno.EIO, when=when)
        try:
            kinds.add(trainer.save().kind)
            trainer.check()
        except CommitNotDurableError:
            trainer.check()
        except SaveFailedError:
            pass
        has_struck = trainer.faults.has_struck
        trainer.faults.plant(0, 0)
        trainer.change()
        kinds.add(trainer.save().kind)
        trainer.check()
        if not has_struck:
            assert kinds == {"full", "delta"}
            assert verify(str(root)) == []
            return number
    raise AssertionError("the operations of a save have an end")


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_fault_the_next_save_holds_all_that_has_changed(tmp_path, restarts):
    assert try_each(tmp_path, "before", 13 if restarts else 7, restarts=restarts) > 40


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_after_any_fault_the_next_save_holds_all_that_has_changed(tmp_path, when, restarts):
    assert try_each(tmp_path, when, SWEEP_STRIDE, restarts=restarts) > 40
