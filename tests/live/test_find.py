"""Which embeddings of a model become tables, under which names, and why the others stay dense."""

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrize

from recckpt.errors import LiveTableError
from recckpt.live import live_tables


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


def test_embeddings_of_enough_rows_are_tables_by_their_paths(tower):
    tables = live_tables(tower, optim.SGD(tower.parameters()))
    assert list(tables) == ["users", "tags"]
    assert "not a live table: days: 7 rows, fewer than min_rows=1000" in str(tables)


def test_names_may_be_given_also_to_small_ones(tower):
    tables = live_tables(tower, optim.SGD(tower.parameters()), names={"users": "user/1", "days": "day"})
    assert list(tables) == ["user/1", "tags", "day"]


def test_what_is_excluded_stays_dense(tower):
    assert list(live_tables(tower, optim.SGD(tower.parameters()), exclude=["users"])) == ["tags"]


def test_all_that_is_wrong_with_names_is_said_at_once(tower):
    with pytest.raises(LiveTableError) as caught:
        live_tables(tower, optim.SGD(tower.parameters()), names={"users": "t", "tags": "t"}, exclude=["day"])
    assert ": 'day' is not the path of an embedding; did you mean 'days'?" in str(caught.value)
    assert "'users' and 'tags' are both named 't': tell them apart by names=" in str(caught.value)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager"), nn.Sequential])
def test_wrappers_are_not_part_of_a_path(tower, wrap):
    model = wrap(tower)
    path = "0.users" if isinstance(model, nn.Sequential) else "users"
    assert path in live_tables(model, optim.SGD(tower.parameters()))


def test_a_tied_weight_is_one_table(tower):
    tower.head = nn.Linear(4, 2000, bias=False)
    tower.head.weight = tower.users.weight
    [table] = (one for one in found(tower, optim.SGD(tower.parameters())).values() if one.path == "users")
    assert table.keys == ("users.weight", "head.weight")


@pytest.mark.parametrize(
    ("optimizers", "why"),
    [
        (lambda weight: [], "none of the optimizers trains it: give live_tables the one that does, or freeze it"),
        (
            lambda weight: [optim.SGD([weight]), optim.SGD([weight])],
            "2 optimizers train it (SGD, SGD), expected one: leave it to one",
        ),
        (
            lambda weight: [optim.RMSprop([weight])],
            "RMSprop trains it, of which it is not known what it keeps of a row: use one of",
        ),
        (
            lambda weight: [optim.SGD([weight], momentum=0.9, dampening=0.1)],
            "SGD: dampening spares its first step: use dampening=0",
        ),
    ],
)
def test_a_table_whose_optimizer_is_not_known_stays_dense_and_says_why(optimizers, why):
    model = nn.Sequential(nn.Embedding(2000, 4))
    assert f"not a live table: 0: {why}" in text(model, optimizers(model[0].weight))


def test_a_weight_that_is_computed_from_others_stays_dense(tower):
    parametrize.register_parametrization(tower.users, "weight", nn.Softplus())
    assert "not a live table: users: its weight is made of other tensors" in text(tower, optim.SGD(tower.parameters()))


def test_a_weight_without_memory_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(2000, 4, device="meta"))
    with pytest.raises(LiveTableError, match=r"table '0': embedding is .* on meta, expected memory: materialize it"):
        live_tables(model, optim.SGD(model.parameters()))


def test_an_optimizer_within_a_wrapper_is_that_of_its_table(tower):
    class Wrapper(optim.Optimizer):  # as accelerate's
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

    inner = optim.Adagrad(tower.parameters())
    assert found(tower, [Wrapper(inner)])["users"].optimizer is inner


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
    assert "whoever writes it is not seen" in table.why
