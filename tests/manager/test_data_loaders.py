"""Data loaders that others made go on where they were, and the run with them equals one that was not interrupted."""

import logging

import numpy as np
import pytest
import torch
from support.builders import table_state
from support.sweeps import SWEEP_STRIDE, mostly_slow
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler, get_worker_info

from recckpt import CheckpointManager, list_checkpoints
from recckpt.policies.when import EveryEpochs
from recckpt.sparse import HashTable, SparseAdam

torchdata = pytest.importorskip("torchdata", reason="torchdata is not installed: pip install 'recckpt[test]'")
from torchdata.nodes import IterableWrapper, Loader  # noqa: E402  # once it is known to be there
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Run:
    """A table, an optimizer and a dropout layer, so that every generator counts."""

    def __init__(self, root, loader, seed=0, save_interval=10**9):
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.table = HashTable(2, name="t")
        self.model = nn.ModuleDict({"t": self.table, "top": nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))})
        self.optimizers = [SparseAdam([self.table]), torch.optim.Adam(self.model["top"].parameters())]
        self.loader = loader()
        where = {"output_dir": root, "save_interval": save_interval, "max_keep": None}
        self.manager = CheckpointManager.attach(self.model, self.optimizers, loader=self.loader, **where)
        self.seen = []

    def train(self, last):
        """As the README has it; the workers of the loader end with it, or torchdata waits for minutes for them."""
        try:
            return self._train(last)
        finally:
            iterator = getattr(self.loader, "_iterator", None)
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()

    def _train(self, last):
        with self.manager:
            while self.manager.global_step < last:
                for ids in self.loader:
                    self.model["top"](self.table(torch.as_tensor(ids))).sum().backward()
                    for optimizer in self.optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    self.seen.append(torch.as_tensor(ids).tolist())
                    self.manager.step()
                    if self.manager.global_step == last:
                        return self
                self.manager.epoch()
        return self

    def state(self):
        dense = [value.tolist() for value in self.model["top"].state_dict().values()]
        return table_state(self.table), dense, torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


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


class Groups:
    """Batches in an order that is drawn anew for each epoch, and that no state holds."""

    def __iter__(self):
        order = np.random.permutation(20)
        for first in range(0, 20, 7):
            yield order[first : first + 7].tolist()

    def __len__(self):
        return 3


def shared(**options):
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Rows(), generator=generator)
    return StatefulDataLoader(Rows(), 7, sampler=sampler, generator=generator, **options)


def own():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "that shuffles": lambda **options: StatefulDataLoader(Rows(), 7, shuffle=True, **options),
    "with a generator": lambda **options: StatefulDataLoader(Rows(), 7, shuffle=True, generator=own(), **options),
    "in order": lambda **options: StatefulDataLoader(Rows(), 7, **options),
    "of a stream": lambda **options: StatefulDataLoader(Stream(), 7, **options),
    "whose sampler has no state": lambda **options: StatefulDataLoader(
        Rows(), 7, sampler=WeightedRandomSampler([1.0, 2.0] * 10, 20), **options
    ),
    "whose sampler has a generator": lambda **options: StatefulDataLoader(
        Rows(), 7, sampler=RandomSampler(Rows(), replacement=True, num_samples=50, generator=own()), **options
    ),
    "whose sampler shares its generator": shared,
    "of groups": lambda **options: StatefulDataLoader(Rows(), batch_sampler=Groups(), **options),
}
WORKERS = {"none": {}, "two": {"num_workers": 2}, "two that stay": {"num_workers": 2, "persistent_workers": True}}
# torchdata 0.11: of a stream whose workers end at different batches, the next epoch is in another order
CASES = [(kind, workers) for kind in LOADERS for workers in WORKERS if kind != "of a stream" or workers == "none"]


@mostly_slow()
@pytest.mark.parametrize("save_interval", [1, EveryEpochs(1)], ids=["each step", "each epoch"])
@pytest.mark.parametrize("steps", [(2,), range(1, 7, 1 if SWEEP_STRIDE < 20 else 5)], ids=["one", "all"])
@pytest.mark.parametrize(("kind", "workers"), CASES[3:] + CASES[:3])
def test_the_loop_of_the_readme_resumes_bit_for_bit_from_each_checkpoint_of_two_epochs(
    tmp_path, kind, workers, steps, save_interval
):
    def loader():
        return LOADERS[kind](**WORKERS[workers])

    torch.manual_seed(0)
    straight = Run(tmp_path, loader, save_interval=save_interval).train(last := steps[-1] + 2)
    for step in {checkpoint.step for checkpoint in list_checkpoints(str(tmp_path))}.intersection(steps):
        torch.manual_seed(5)
        resumed = Run(tmp_path, loader, seed=7)
        resumed.manager.restore(step)
        resumed.train(last)
        assert (step, resumed.seen) == (step, straight.seen[step:])
        assert resumed.state() == straight.state(), step


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_an_iterator_that_was_made_before_a_restore_is_warned_of_once(tmp_path, caplog):
    Run(tmp_path, LOADERS["that shuffles"], save_interval=1).train(2)
    run = Run(tmp_path, LOADERS["that shuffles"])
    next(iter(run.loader))  # to look at a batch, as for a lazy layer: nobody goes on with it
    run.manager.restore()
    assert not warnings_of(caplog)
    kept = Run(tmp_path, LOADERS["that shuffles"])
    batches = iter(kept.loader)
    kept.manager.restore()
    next(batches)
    kept.manager.step()
    (warning,) = warnings_of(caplog)
    assert "an iterator of 'loader' was made before its position was loaded" in warning
    assert "call restore() first, then iter(loader)" in warning


def test_a_restore_names_each_shuffling_loader_of_its_callers_once_where_none_is_given(tmp_path, caplog):
    train_data = DataLoader(Rows(), shuffle=True)
    valid_data = DataLoader(Rows())  # noqa: F841  # in order: silent
    of_torchdata = LOADERS["that shuffles"]()  # noqa: F841

    def restored(**given):
        same = train_data  # noqa: F841  # the nearest name of it
        model = nn.Linear(1, 1)
        where = {"output_dir": tmp_path, "save_interval": 1}
        manager = CheckpointManager.attach(model, torch.optim.SGD(model.parameters()), **where, **given)
        manager.restore()
        manager.restore()
        return [warning.partition(":")[0] for warning in warnings_of(caplog)]

    assert restored(loader=()) == restored(loader=Stream()) == []
    assert sorted(restored()) == ["of_torchdata", "same"]
    by_name = {warning.partition(":")[0]: warning for warning in warnings_of(caplog)}
    assert (
        "same = torchdata.stateful_dataloader.StatefulDataLoader(...) and attach(..., loader=same)" in by_name["same"]
    )
    assert "to save the position, use attach(..., loader=of_torchdata)" in by_name["of_torchdata"]


def test_a_loader_of_torchdata_nodes_goes_on_where_it_was_and_is_saved_at_once_as_it_was_loaded(tmp_path):
    def loader():
        return Loader(IterableWrapper([[i, i + 1] for i in range(10)]))

    Run(tmp_path, loader).train(4)
    resumed = Run(tmp_path, loader, seed=1)
    resumed.manager.restore()
    resumed.manager.saver.save("again")
    assert resumed.train(7).seen == [[4, 5], [5, 6], [6, 7]]
    third = Run(tmp_path, loader, seed=2)
    third.manager.saver.load(ckpt_id="again")
    assert third.train(1).seen == [[4, 5]]


@pytest.mark.parametrize("interval", [1, EveryEpochs(1)], ids=["each step", "each epoch"])
@pytest.mark.parametrize("restarts", [True, False])
def test_epochs_of_a_loader_of_torchdata_nodes_have_each_batch_once_wherever_a_run_ends(tmp_path, restarts, interval):
    def train(root, last=None):
        loader = Loader(IterableWrapper(range(3)), restart_on_stop_iteration=restarts)
        run = Run(root, lambda: loader, save_interval=interval)
        run.manager.restore()
        seen = {}
        for epoch in range(run.manager.epochs, 3):
            for batch in loader:
                seen.setdefault(epoch, []).append(batch)
                run.manager.step()
                if run.manager.global_step == last:
                    run.manager.wait_until_finished()
                    return seen
            run.manager.epoch()
        run.manager.wait_until_finished()
        return seen

    for last in (2, 3, 4, 6):
        before, after = train(tmp_path / str(last), last), train(tmp_path / str(last))
        epochs = [*range(3)]
        if interval == 1:
            assert [before.get(epoch, []) + after.get(epoch, []) for epoch in epochs] == [[0, 1, 2]] * 3, last
        else:
            assert [after.get(epoch, before.get(epoch)) for epoch in epochs] == [[0, 1, 2]] * 3, last
