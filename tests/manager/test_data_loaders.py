"""Data loaders that others made go on where they were, and the run with them equals one that was not interrupted."""

import pytest
import torch
from support.builders import table_state
from support.sweeps import mostly_slow
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, SparseAdam

torchdata = pytest.importorskip("torchdata", reason="torchdata is not installed: pip install 'recckpt[test]'")
from torchdata.nodes import IterableWrapper, Loader  # noqa: E402  # once it is known to be there
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402


class Run:
    """A table, an optimizer and a dropout layer, so that every generator counts."""

    def __init__(self, root, loader, seed=0):
        torch.manual_seed(seed)
        self.table = HashTable(2, name="t")
        self.model = nn.ModuleDict({"t": self.table, "top": nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))})
        self.sparse = SparseAdam([self.table])
        self.dense = torch.optim.Adam(self.model["top"].parameters())
        self.loader = loader
        self.manager = CheckpointManager(Saver(self.model, self.sparse, str(root)), 10**9)
        self.manager.register_for_checkpointing("dense", self.dense)
        self.manager.register_io_state("loader", loader)
        self.batches = None
        self.seen = []

    def train(self, n_steps):
        self.batches = iter(self.loader) if self.batches is None else self.batches
        while n_steps:
            try:
                ids = torch.as_tensor(next(self.batches))
            except StopIteration:
                self.batches = iter(self.loader)
                continue
            self.model["top"](self.table(ids)).sum().backward()
            for optimizer in (self.sparse, self.dense):
                optimizer.step()
                optimizer.zero_grad()
            self.seen.append(ids.tolist())
            self.manager.step()
            n_steps -= 1
        return self

    def restore(self):
        """As docs/resume.md has it."""
        self.manager.restore()
        with torch.random.fork_rng(devices=[]):
            self.batches = iter(self.loader)
        return self

    def state(self):
        dense = [value.tolist() for value in self.model["top"].state_dict().values()]
        return table_state(self.table), dense, torch.get_rng_state().tolist()


class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        worker = get_worker_info()
        own, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.position < 20:
            self.position += 1
            if self.position % workers == own:
                yield self.position
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def loader_of(kind, workers):
    if kind == "map":
        return StatefulDataLoader(Rows(), batch_size=3, shuffle=True, num_workers=workers)
    return StatefulDataLoader(Stream(), batch_size=3, num_workers=workers)


@mostly_slow()
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_run_with_a_stateful_data_loader_resumes_bit_for_bit(tmp_path, kind, workers):
    torch.manual_seed(0)
    straight = Run(tmp_path / "a", loader_of(kind, workers)).train(12)
    torch.manual_seed(0)
    first = Run(tmp_path / "b", loader_of(kind, workers)).train(4)
    first.manager.save()
    resumed = Run(tmp_path / "b", loader_of(kind, workers), seed=5).restore().train(8)
    assert first.seen + resumed.seen == straight.seen
    assert resumed.state() == straight.state()


def test_a_loader_of_torchdata_nodes_goes_on_where_it_was(tmp_path):
    def loader():
        return Loader(IterableWrapper([[i, i + 1] for i in range(10)]))

    Run(tmp_path, loader()).train(4).manager.save()
    resumed = Run(tmp_path, loader(), seed=1).restore().train(3)
    assert resumed.seen == [[4, 5], [5, 6], [6, 7]]


def test_a_loader_that_is_asked_for_its_state_after_a_restore_has_the_state_that_was_loaded(tmp_path):
    loaders = [Loader(IterableWrapper([[i] for i in range(10)])) for _ in range(3)]
    Run(tmp_path, loaders[0]).train(4).manager.save()
    again = Run(tmp_path, loaders[1], seed=1)
    again.manager.restore()
    again.manager.saver.save("again")
    third = Run(tmp_path, loaders[2], seed=2)
    third.manager.saver.load(ckpt_id="again")
    assert third.train(1).seen == [[4]]
