"""Runs of one small table with near saves: each is a process of its own, as far as files say."""

import json
from pathlib import Path

import torch
from torch import nn

from recckpt import CheckpointManager, Deltas, Near, Saver
from recckpt.sparse import HashTable
from recckpt.storage import open_storage

ALL = Deltas(max_dirty=1.0, max_chain_bytes=1000)


class NearRun:
    """A run of a table ``t``, and others, that makes a near save at each step."""

    def __init__(
        self,
        root,
        slice=None,
        max_keep=1,
        max_bytes=None,
        near="near",
        deltas=ALL,
        interval=1,
        copies=None,
        others=(),
        dense=None,
        **options,
    ):
        self.table = HashTable(2, name="t", slice=slice)
        self.near_path = Path(root) / near
        near = Near(self.near_path, interval=interval, max_bytes=max_bytes, copies=copies)
        model = nn.ModuleDict({"t": self.table} | {name: HashTable(2, name=name, slice=slice) for name in others})
        if dense is not None:
            model["dense"] = dense
        self.saver = Saver(model, output_dir=str(Path(root) / "runs"), max_keep=max_keep, deltas=deltas, near=near)
        self.manager = CheckpointManager(self.saver, 10**9, **options)

    def put(self, **values):
        """Set rows: ``_1=2.0`` gives id 1 that value."""
        ids = torch.tensor([int(name[1:]) for name in values])
        rows = torch.tensor([[value, -value] for value in values.values()])
        own = slice(None) if self.table.slice is None else self.table.slice.owns(ids)
        self.table.insert(ids[own], rows[own])
        return self

    def erase(self, *ids):
        self.table.erase(torch.tensor(ids))
        return self

    def step(self):
        """Make a step, whose near save is over then."""
        self.manager.step()
        self.saver.near_saves.settle()
        return self

    def save(self):
        """Save a checkpoint of this step."""
        self.manager.save()
        return self

    def restore(self, *args, **options):
        self.manager.restore(*args, **options)
        return self

    @property
    def rows(self):
        return dict(zip(self.table.ids().tolist(), self.table.embeddings()[:, 0].tolist(), strict=True))

    @property
    def counts(self):
        counts = self.manager.counts
        return counts.near, counts.near_failed, counts.near_skipped

    @property
    def fence(self):
        """Its hold on the output dir."""
        return self.saver.near_saves.fence

    @property
    def near_dirs(self):
        """The directories of the near saves that are sealed, oldest first."""
        return sorted((seal.parent for seal in self.near_path.rglob("near.json")), key=lambda path: int(path.name))


def parts_of(near_dir):
    """Return the files of a near save that have rows."""
    return sorted(near_dir.glob("sparse/*.arrow"))


def newest_list(root):
    """Return the newest list of a takeover."""
    owner = Path(root) / "runs/.recckpt/owner"
    newest = max(owner.glob("*.list.json"), key=lambda path: int(path.name.partition(".")[0]))
    return json.loads(newest.read_bytes())


def output_dir(root):
    return open_storage(str(Path(root) / "runs"))
