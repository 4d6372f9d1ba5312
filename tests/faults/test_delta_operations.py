"""T3 with deltas: an operation of the storage fails; whatever the save says, the next holds all that has changed."""

import errno
from itertools import count, product

import pytest
import torch
from faults.job import LiveContent
from faults.storage_faults import WHEN, Faults
from support import spec_reader
from support.live_runs import rows_by_id
from support.sweeps import SWEEP_STRIDE, mostly_slow, pairwise
from torch import nn

import recckpt
from recckpt import Deltas, Saver
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.sparse import HashTable

DELTAS = Deltas(full_every=4, max_chain_bytes=100)
HABITS = ("goes on", "restarts", "adopts")  # before the save that a fault strikes; it may adopt an offer that waits


class OwnTable:
    """A table of ours."""

    live_tables = None

    def __init__(self):
        self.table = HashTable(2, name="t")
        self.table(torch.arange(60))
        self.model = nn.ModuleDict({"t": self.table})

    def change(self, number):
        """Change rows, and erase some."""
        ids = torch.arange(number % 50, number % 50 + 5)
        self.table.insert(ids, torch.full((5, 2), float(number)))
        self.table.erase(ids[:2] + 3)

    def rows(self):
        """Return the rows of now, as the reader gives them."""
        embeddings, ids = self.table.embeddings(), self.table.ids().tolist()
        return {"t": {id_: {"embedding": embeddings[row].numpy().tobytes()} for row, id_ in enumerate(ids)}}


class TrainedTables(LiveContent):
    """Live tables, of hooks and of fingerprints."""

    def change(self, number):
        """Train a step."""
        self.train(1, number)

    def rows(self):
        """Return the rows of now, as the reader gives them."""
        return {
            name: rows_by_id({slot: tensor.detach().numpy() for slot, tensor in table.live.tensors().items()})
            for name, table in self.live_tables.items()
        }


class Trainer:
    """A run of which each save is to be found by a reader that knows only the page."""

    def __init__(self, root, max_keep, content):
        self.root, self.max_keep, self.content, self.n_saves = root, max_keep, content(), 0
        self.start()

    def start(self):
        """Begin as a new process does that restores what is there."""
        self.saver = Saver(
            self.content.model,
            output_dir=str(self.root),
            max_keep=self.max_keep,
            deltas=DELTAS,
            concurrency=1,
            tables=self.content.live_tables,
        )
        if self.n_saves:
            self.saver.load()
        self.faults = Faults(self.saver.storage)

    def change(self):
        self.n_saves += 1
        self.content.change(self.n_saves)

    def save(self):
        return self.saver.save(f"c{self.n_saves}")

    def check(self):
        """Compare the newest checkpoint with the tables of now."""
        newest = max(spec_reader.counting(self.root), key=lambda c: c.place)
        for name, rows in self.content.rows().items():
            assert spec_reader.read(self.root, newest.manifest["ckpt_id"], name) == rows

    def prepare(self, habit):
        """Do what comes before a save that a fault strikes."""
        self.change()
        if habit == "restarts":
            self.save()
            self.start()
            self.change()
        elif habit == "adopts":
            recckpt.rewrite.compact(str(self.root), threads=1)


def try_each(figures, trainer, habit, stride, **options):
    """Fail one operation of a save after the other, in one run; return how many there were."""
    trainer.save()
    kinds = set()
    for number in count(1, stride):
        trainer.prepare(habit)
        trainer.faults.plant(number, errno.EIO, **options)
        try:
            kinds.add(trainer.save().kind)
            trainer.check()
        except CommitNotDurableError as error:
            if error.is_in_place:
                trainer.check()
        except SaveFailedError:
            pass
        has_struck = trainer.faults.has_struck
        trainer.faults.plant(0, 0)
        trainer.change()
        kinds.add(trainer.save().kind)
        trainer.check()
        kind = "deltas" if trainer.content.live_tables is None else "live tables"
        figures.add(f"T3, {kind}, max_keep {trainer.max_keep}", faults=has_struck, lost=0)
        if not has_struck:
            assert kinds == ({"delta"} if habit == "adopts" else {"full", "delta"})
            assert any(c.supersedes for c in spec_reader.counting(trainer.root)) == (habit == "adopts")
            assert verify(str(trainer.root)) == []
            return number
    raise AssertionError("the operations of a save have an end")


@mostly_slow()
@pytest.mark.parametrize(("habit", "stride"), [("goes on", 7), ("restarts", 13), ("adopts", 29)])
def test_after_a_fault_the_next_save_holds_all_that_has_changed(ram, figures, habit, stride):
    assert try_each(figures, Trainer(ram, 1, OwnTable), habit, stride) > 40


OPTIONS = [*({"when": when} for when in WHEN), {"for_ever": True}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_keep", "habit", "options", "content"), pairwise(product([1, 2], HABITS, OPTIONS, [OwnTable, TrainedTables]))
)
def test_after_any_fault_the_next_save_holds_all_that_has_changed(ram, figures, max_keep, habit, options, content):
    assert try_each(figures, Trainer(ram, max_keep, content), habit, SWEEP_STRIDE, **options) > 40
