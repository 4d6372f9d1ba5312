"""The contract of live tables, held against those that there are; and what it finds in wrong ones."""

import pytest
import torch
import torch.distributed as dist
from support.broken_contracts import broken
from support.fake_fbgemm import SplitTableBatchedEmbeddingBagsCodegen, look_up
from support.sweeps import mostly_slow
from torch import nn, optim
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from recckpt.adapters.fbgemm import FbgemmTable, Kernel
from recckpt.live.torch_embedding import DTensorEmbedding, TorchEmbedding
from recckpt.live.torch_rules import trainer_of
from recckpt.testing import LiveTableContract
from recckpt.types import Box

N_ROWS = 24


class OfTorch(LiveTableContract):
    """``nn.Embedding`` with an optimizer of torch, as ``live_tables`` makes a table of it."""

    sparse = False

    def make_optimizer(self, weights):
        raise NotImplementedError

    def make(self):
        module = nn.Embedding(N_ROWS, 3, sparse=self.sparse)
        optimizer = self.make_optimizer([module.weight])
        table = TorchEmbedding("users", module, *trainer_of(module.weight, [optimizer]))
        table.of_test = module, optimizer
        return table

    def train(self, table, rows):
        module, optimizer = table.of_test
        optimizer.zero_grad()
        module(rows).square().add(module(rows)).sum().backward()
        optimizer.step()


class TestSparseAdam(OfTorch):
    sparse = True

    def make_optimizer(self, weights):
        return optim.SparseAdam(weights, lr=0.1)


@pytest.mark.slow
class TestAdagradOfDenseGradients(OfTorch):
    def make_optimizer(self, weights):
        return optim.Adagrad(weights, lr=0.1)


class TestFingerprints(OfTorch):
    """Adam changes rows that have no gradient: rows are found by looking at all of them."""

    options = {"marks": "fingerprints"}  # noqa: RUF012
    says_which = False

    def make_optimizer(self, weights):
        return optim.Adam(weights, lr=0.1)


class TestFbgemmWithACache(LiveTableContract):
    """The second table of a fused kernel, rows of which are written back at a save."""

    has_cache = True

    def make(self):
        torch.manual_seed(1)
        kernel = SplitTableBatchedEmbeddingBagsCodegen(((7, 4), (N_ROWS, 2)), has_cache=self.has_cache)
        table = FbgemmTable("t1", Kernel(kernel), 1, Box((0, N_ROWS)), N_ROWS)
        table.of_test = kernel
        return table

    def train(self, table, rows):
        look_up(table.of_test, [0], rows.tolist())


@pytest.mark.slow
class TestFbgemm(TestFbgemmWithACache):
    has_cache = False


class TestDTensor(OfTorch):
    """All rows of a weight that is a DTensor, on one rank."""

    @pytest.fixture(autouse=True)
    def group(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def make_optimizer(self, weights):
        return optim.Adagrad(weights, lr=0.1)

    def make(self):
        module = nn.Embedding(N_ROWS, 3)
        module.weight = nn.Parameter(
            distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        )
        optimizer = self.make_optimizer([module.weight])
        table = DTensorEmbedding("users", module, *trainer_of(module.weight, [optimizer]))
        table.of_test = module, optimizer
        return table

    def train(self, table, rows):
        module, optimizer = table.of_test
        gradient = torch.zeros(N_ROWS, 3).index_add_(0, rows, torch.ones(len(rows), 3))
        module.weight.grad = distribute_tensor(gradient, module.weight.device_mesh, [Shard(0)])
        optimizer.step()


class Counts:
    """A table as users write it: rows of counts, and when each was counted last."""

    first = 10  # the rows of other ranks

    def __init__(self):
        self.name, self.n_rows, self.door, self.n_steps = "counts", self.first + N_ROWS, None, 0
        self.counts, self.last = torch.zeros(N_ROWS, 2), torch.zeros(N_ROWS, dtype=torch.int64)

    def box(self):
        return Box((self.first, self.n_rows))

    def prepare(self):
        pass

    def tensors(self):
        return {"embedding": self.counts, "last": self.last}

    def attach(self, door):
        self.door = door
        return self.detach

    def detach(self):
        self.door = None

    def scalars(self):
        return {"step": self.n_steps}

    def settings(self):
        return {}

    def finish(self, scalars, settings):
        self.n_steps = scalars.get("step", self.n_steps)

    def announce(self, rows):
        if self.door is not None:
            self.door.announce(rows)

    def write(self, rows):
        self.n_steps += 1
        self.counts[rows] += 1
        self.last[rows] = self.n_steps

    def count(self, rows):
        self.announce(rows)
        self.write(rows)


class TestCounts(LiveTableContract):
    table = Counts

    def make(self):
        return self.table()

    def train(self, table, rows):
        table.count(rows)

    def attached(self, table, output_dir):
        table.first, table.n_rows = 0, N_ROWS  # a save of one rank has all rows
        return super().attached(table, output_dir)


class ForgetsOneRow(Counts):
    def announce(self, rows):
        super().announce(rows[rows != 1])


class ForgetsAllButTheFirst(Counts):
    def announce(self, rows):
        super().announce(rows[:1])


class AnnouncesTooLate(Counts):
    def count(self, rows):
        self.write(rows)
        self.announce(rows)


class AnnouncesIds(Counts):
    def announce(self, rows):
        super().announce(rows + self.n_rows - len(self.counts) + 4)


class AnnouncesWhenItIsRead(Counts):
    def tensors(self):
        self.announce(torch.arange(N_ROWS))
        return super().tensors()


class AnnouncesAll(Counts):
    def announce(self, rows):
        if self.door is not None:
            self.door.announce_all()


class SaysReplaced(Counts):
    def announce(self, rows):
        if self.door is not None:
            self.door.replaced()


class GivesCopies(Counts):
    def tensors(self):
        return {name: values.clone() for name, values in super().tensors().items()}


class ForgetsItsStep(Counts):
    def finish(self, scalars, settings):
        pass


class CannotBeClosed(Counts):
    def detach(self):
        pass


class KeepsRowsInACache(Counts):
    def prepare(self):
        self.counts.copy_(self.cached)

    def __init__(self):
        super().__init__()
        self.cached = self.counts.clone()

    def write(self, rows):
        super().write(rows)
        self.cached[rows] += 1


class MovesAtEachLook(Counts):
    def prepare(self):
        self.counts = self.counts.clone()


WRONG = {
    ForgetsOneRow: "test_a_row_is_announced_before_it_changes",
    ForgetsAllButTheFirst: "test_a_row_is_announced_before_it_changes",
    AnnouncesTooLate: "test_a_save_in_the_background_has_the_rows_of_its_moment",
    AnnouncesIds: "test_a_row_is_announced_before_it_changes",
    AnnouncesWhenItIsRead: "test_a_change_is_in_one_delta_and_not_in_the_next",
    AnnouncesAll: "test_a_delta_has_the_rows_that_changed",
    SaysReplaced: "test_a_row_is_announced_before_it_changes",
    GivesCopies: "test_its_tensors_are_the_memory_and_no_copies",
    ForgetsItsStep: "test_a_checkpoint_has_all_rows_and_a_load_gives_them_back",
    CannotBeClosed: "test_what_ends_the_announcements_ends_them",
    KeepsRowsInACache: "test_a_load_writes_where_the_rows_lie",
    MovesAtEachLook: "test_its_tensors_are_the_memory_and_no_copies",
}


@mostly_slow()
@pytest.mark.parametrize(("table", "name"), WRONG.items(), ids=[table.__name__ for table in WRONG])
def test_the_contract_finds_a_wrong_table(table, name, tmp_path):
    assert broken(type("Wrong", (TestCounts,), {"table": table}), tmp_path, only=name) == [name]


def test_what_a_team_has_not_written_is_named():
    for what in (LiveTableContract().make, lambda: LiveTableContract().train(Counts(), torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="table"):
            what()
