"""Which modules become live tables, under which names, those of TorchRec among them."""

from dataclasses import replace

import pytest
import torch
from support.fake_fbgemm import (
    BatchedDynamicEmbeddingTablesV2,
    DMPCollection,
    ShardedEmbeddingBagCollection,
    SplitTableBatchedEmbeddingBagsCodegen,
    SSDTableBatchedEmbeddingBags,
)
from support.sweeps import mostly_slow
from support.thread_ranks import ThreadGroup, Wire, alone
from torch import nn, optim
from torch.nn.utils import parametrize

from recckpt.adapters.torchrec import TORCHREC
from recckpt.errors import LiveTableError
from recckpt.live import LiveTables, live_tables
from recckpt.live.attached import AttachedTable
from recckpt.live.find import TableFinder, find_tables
from recckpt.parallel.ranks import RanksNow
from recckpt.parallel.threads import run_all


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(2000, 4)
        self.tags = nn.EmbeddingBag(1000, 4)
        self.days = nn.Embedding(7, 4)


def found(model, optimizers, **options):
    return {found.path: found for found in live_tables(model, optimizers, **options)._found.values()}


def text(model, optimizers, **options):
    return str(live_tables(model, optimizers, **options))


@pytest.fixture
def tower():
    return Tower()


def test_embeddings_of_enough_rows_are_tables_by_their_paths_or_the_names_that_they_are_given(tower):
    tables = live_tables(tower, optim.SGD(tower.parameters()))
    assert list(tables) == ["users", "tags"]
    assert "not a live table: days: 7 rows, fewer than min_rows=1000" in str(tables)
    tables.close()
    names = {"users": "user/1", "days": "day"}  # also to small ones
    tables = live_tables(tower, optim.SGD(tower.parameters()), names=names)
    assert list(tables) == ["user/1", "tags", "day"]
    tables.close()
    assert list(live_tables(tower, optim.SGD(tower.parameters()), exclude=["users"])) == ["tags"]


def test_a_finder_brings_candidates_and_says_what_a_table_is_to_a_saver(tower, caplog):
    class Attached(AttachedTable):
        """What the finder makes of each table."""

    def candidates(search, others):
        search.left.update(cold="it lies elsewhere", odd="it has no rows")
        search.missing.add("cold")
        return [replace(each, name=f"theirs/{each.name}") for each in others if each.module is not search.model.tags]

    finder = TableFinder(candidates, lambda table: replace(table, attached=Attached))
    optimizers, ranks = [optim.SGD(tower.parameters())], RanksNow(60).of(None, None)
    tables, left = find_tables(tower, optimizers, ranks, [finder], min_rows=1000, names={}, exclude=())
    assert [(table.path, table.live.name) for table in tables] == [("users", "theirs/users")]
    assert left.keys() == {"cold", "odd", "days"}
    assert "whole at each save, and not as live tables: 'odd': it has no rows" in caplog.text
    assert "not in the checkpoints are 'cold': it lies elsewhere" in caplog.text
    live = LiveTables(tower, tables, left)
    assert isinstance(live["theirs/users"], Attached)
    live.close()


def test_all_that_is_wrong_with_names_is_said_at_once(tower):
    with pytest.raises(LiveTableError) as caught:
        live_tables(tower, optim.SGD(tower.parameters()), names={"users": "t", "tags": "t"}, exclude=["day"])
    assert ": 'day' is not the path of an embedding; did you mean 'days'?" in str(caught.value)
    assert "'users' and 'tags' are both named 't': rename one with names=" in str(caught.value)


@mostly_slow()
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager"), nn.Sequential])
def test_wrappers_are_not_part_of_a_path(tower, wrap):
    model = wrap(tower)
    path = "0.users" if isinstance(model, nn.Sequential) else "users"
    assert path in live_tables(model, optim.SGD(tower.parameters()))


def test_a_tied_weight_is_one_table_and_an_optimizer_within_a_wrapper_is_its(tower):
    class Wrapper(optim.Optimizer):  # as accelerate's
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

    tower.head = nn.Linear(4, 2000, bias=False)
    tower.head.weight = tower.users.weight
    inner = optim.Adagrad(tower.parameters())
    users = found(tower, [Wrapper(inner)])["users"]
    assert users.keys == ("users.weight", "head.weight")
    assert users.optimizer is inner


@pytest.mark.parametrize(
    ("optimizers", "why"),
    [
        (lambda weight: [], "none of the optimizers trains it: give live_tables the one that does, or freeze it"),
        (
            lambda weight: [optim.SGD([weight]), optim.SGD([weight])],
            "2 optimizers train it (SGD, SGD), expected one: remove it",
        ),
        (
            lambda weight: [optim.RMSprop([weight])],
            "RMSprop trains it, but recckpt does not know its state per row: use one of",
        ),
        (
            lambda weight: [optim.SGD([weight], momentum=0.9, dampening=0.1)],
            "SGD: dampening skips its first step: use dampening=0",
        ),
    ],
)
def test_a_table_whose_optimizer_is_not_known_stays_dense_and_says_why(optimizers, why):
    model = nn.Sequential(nn.Embedding(2000, 4))
    assert f"not a live table: 0: {why}" in text(model, optimizers(model[0].weight))


def test_a_weight_that_is_computed_from_others_stays_dense_and_one_without_memory_is_refused_by_name(tower):
    parametrize.register_parametrization(tower.users, "weight", nn.Softplus())
    assert "not a live table: users: its weight is computed from other tensors" in text(
        tower, optim.SGD(tower.parameters())
    )
    model = nn.Sequential(nn.Embedding(2000, 4, device="meta"))
    with pytest.raises(LiveTableError, match=r"table '0': embedding is .* on meta, expected memory: materialize it"):
        live_tables(model, optim.SGD(model.parameters()))


def test_how_changes_are_known_is_part_of_what_is_shown(tower):
    weights = [tower.users.weight], [tower.tags.weight]
    shown = text(tower, [optim.Adagrad(weights[0]), optim.AdamW(weights[1])])
    users, tags = (line for line in shown.splitlines() if line.startswith(("users", "tags")))
    assert users.split() == ["users", "2,000", "x", "4", "Embedding", "sparse_adagrad_sum", "gradient"]
    assert tags.endswith("fingerprints  its moments move every row at each step")


def test_a_frozen_weight_is_a_table_that_is_copied(tower):
    tower.users.weight.requires_grad_(False)
    table = found(tower, optim.SGD(tower.tags.parameters()))["users"]
    assert (table.marks, table.is_announced) == ("fingerprints", False)
    assert "so writes to it are not detected" in table.why


def collection(kernel=None, **options):
    return ShardedEmbeddingBagCollection(kernel or SplitTableBatchedEmbeddingBagsCodegen([(40, 2)]), **options)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            collection(stash_weights=True),
            "its weights are stashed in forward passes, which frees memory that a save may read",
        ),
        (
            collection(SSDTableBatchedEmbeddingBags()),
            "its kernel is a SSDTableBatchedEmbeddingBags: plan it with the compute kernel FUSED or FUSED_UVM_CACHING",
        ),
        (
            collection(BatchedDynamicEmbeddingTablesV2()),
            "its kernel is a BatchedDynamicEmbeddingTablesV2: dump it by DynamicEmbDump beside each checkpoint",
        ),
        (DMPCollection(collection()), "its replicas differ until DMPCollection.sync(): use DistributedModelParallel"),
    ],
)
def test_what_only_gpus_have_and_cannot_be_saved_by_rows_stays_dense_and_says_why(module, why):
    tables = live_tables(nn.ModuleDict({"sparse": module}), min_rows=1)
    assert len(tables) == 0
    assert f"embedding_bags.t: {why}" in str(tables)


def test_rows_that_no_rank_has_are_refused_unless_the_table_is_excluded():
    model = nn.ModuleDict({"sparse": collection(SplitTableBatchedEmbeddingBagsCodegen([(30, 2)]))})
    path = "sparse.embedding_bags.t"
    with pytest.raises(LiveTableError, match=f"'{path}': no rank has the rows 30 to 39: use one plan .* exclude"):
        live_tables(model, min_rows=1)
    assert len(live_tables(model, min_rows=1, exclude=[path])) == 0


def test_ranks_that_choose_other_tables_are_refused_by_all():
    wire = Wire(2)

    def work(rank):
        model = nn.ModuleDict({"sparse": collection()})
        with pytest.raises(LiveTableError) as refusal:
            find_tables(model, [], alone(ThreadGroup(rank, wire)), [TORCHREC], min_rows=1 + rank, names={}, exclude=())
        return str(refusal.value)

    one, other = run_all(work, range(2), 2)
    assert one == other
    assert (
        "min_rows=1, names={}, exclude=[] on rank 0, and min_rows=2, names={}, exclude=[] on rank 1: make them equal"
        in one
    )
