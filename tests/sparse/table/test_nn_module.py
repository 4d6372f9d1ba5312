"""Tables that are frozen, thawed and copied as modules with parameters are."""

import copy
import logging
import sys
import types

import pytest
import torch
from support.rooms import on_ranks
from support.sweeps import mostly_slow
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recckpt import Saver
from recckpt.averages import RowAverage
from recckpt.errors import LookupFailedError
from recckpt.policies.admit import MinCount
from recckpt.policies.evict import Unseen
from recckpt.sparse import Constant, EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam, SparseSGD
from recckpt.sparse.table.tracker import Tracker

OPTIONS = {"initializer": Normal(), "track": ("count", "step")}


class Model(nn.Module):
    """A table and a dense layer; ``look_up`` gives the rows of ids of two dimensions, pooled or not."""

    def __init__(self, table, look_up):
        super().__init__()
        self.inner = nn.ModuleDict({"user": table})
        self.top, self.look_up = nn.Linear(2, 1), look_up

    @property
    def table(self):
        return next(module for module in self.modules() if isinstance(module, HashTable))

    def forward(self, ids):
        return self.top(self.look_up(self.inner["user"], ids)).sum()


def plain(exchange):
    return Model(HashTable(2, name="user", **OPTIONS), lambda table, ids: table(ids))


def plain_bags(exchange):
    return Model(HashTable(2, name="user", **OPTIONS), lambda table, ids: table.bag(ids, mode="mean"))


def sharded(exchange):
    return Model(ShardedHashTable(2, name="user", group=exchange, **OPTIONS), lambda table, ids: table(ids))


def sharded_bags(exchange):
    return Model(ShardedHashTable(2, name="user", group=exchange, **OPTIONS), lambda table, ids: table.bag(ids))


def collected(exchange):
    tables = EmbeddingCollection([ShardedHashTable(2, name="user", group=exchange, **OPTIONS)])
    return Model(tables, lambda tables, ids: tables({"user": ids})["user"])


def collected_bags(exchange):
    tables = EmbeddingCollection([ShardedHashTable(2, name="user", group=exchange, **OPTIONS)])
    return Model(tables, lambda tables, ids: tables.bag({"user": ids})["user"])


KINDS = [plain, plain_bags, sharded, sharded_bags, collected, collected_bags]


def own(model, requires_grad):
    model.table.requires_grad_(requires_grad)


def attribute(model, requires_grad):
    model.table.requires_grad = requires_grad


def parent(model, requires_grad):
    model.requires_grad_(requires_grad)


def loop(model, requires_grad):
    for parameter in model.parameters():
        parameter.requires_grad = requires_grad


def by_name(model, requires_grad):
    for name, parameter in model.named_parameters():
        if name.startswith("inner.user"):
            parameter.requires_grad = requires_grad


def by_module(model, requires_grad):  # as Lightning's BaseFinetuning
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = requires_grad


WAYS = [own, attribute, parent, loop, by_name, by_module]


def state_of(table):
    """Return every bit of a table, in the order of the rows."""
    return [some.tolist() for some in (table.ids(), table.embeddings(), *table.slots.values())]


def ids_of(*ids):
    return torch.tensor([ids], dtype=torch.int64)


def train(model, optimizer, ids):
    loss = model(ids)
    if loss.requires_grad:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@mostly_slow()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "make"), [*((1, make) for make in KINDS), *((2, make) for make in KINDS[2:])])
def test_a_frozen_table_stays_as_it_is_and_a_thawed_one_goes_on(size, make, way):
    def on_rank(exchange):
        model = make(exchange if size > 1 else None)
        optimizer = SparseAdam([model.table], lr=0.1)
        train(model, optimizer, ids_of(1, 2, 3, 4))
        way(model, False)
        assert not model.table.requires_grad
        before, tracker = state_of(model.table), Tracker()
        tracker.begin(model.table, "base")
        model.table.step = 5
        rows = model.look_up(model.inner["user"], ids_of(1, 2, 8))
        assert not rows.requires_grad
        train(model, optimizer, ids_of(1, 2, 8))
        assert tracker.is_unchanged(model.table, "base")
        assert state_of(model.table) == before
        assert model.table.grad is None
        assert model.look_up(model.inner["user"], ids_of(8, 9)).abs().sum() == 0
        way(model, True)
        train(model, optimizer, ids_of(1, 2, 8))
        n_rows = len(model.table)
        return n_rows, state_of(model.table) != before

    n_rows, has_changed = zip(*on_ranks(size, on_rank), strict=True)
    assert sum(n_rows) == 5
    assert any(has_changed)


@pytest.mark.parametrize("freeze", [lambda model: None, lambda model: model.eval()])
def test_what_a_frozen_table_reads_is_what_it_reads_in_eval_mode(freeze):
    table = HashTable(2, name="t", initializer=Constant(3.0), admit=MinCount(2))
    table(torch.tensor([1, 1, 2]))
    table.requires_grad_(False)
    freeze(table)
    assert table(torch.tensor([1, 2, 7])).tolist() == [[3, 3]] * 3
    assert table.ids().tolist() == [1]
    assert table.candidates.embeddings().tolist() == [[1]]


def test_a_frozen_table_grows_and_counts_only_where_it_is_asked_to():
    table = HashTable(2, name="t", initializer=Normal(), track="count", admit=MinCount(2)).requires_grad_(False)
    rows = table(torch.tensor([1, 1, 2]), admit=True)
    assert not rows.requires_grad
    assert table.ids().tolist() == [1]
    assert table.slots["count"].tolist() == [2]
    assert torch.equal(rows[0], table.embeddings()[0])
    assert table.bag(torch.tensor([[2]]), admit=True).shape == (1, 2)
    assert table.ids().tolist() == [1, 2]
    integers = HashTable(2, name="t", dtype=torch.int64)
    integers(torch.tensor([1]))
    integers.requires_grad_(False)
    assert integers(torch.tensor([2])).tolist() == [[0, 0]]
    assert len(integers) == 1


def test_a_frozen_table_evicts_nothing_until_it_is_thawed():
    table = HashTable(2, name="t", track="step", evict=Unseen(steps=1), evict_every=1)
    table.step = 0
    table(torch.arange(4))
    table.requires_grad_(False)
    table.step = 10
    table(torch.arange(2))
    assert len(table) == 4
    table.requires_grad_(True)
    table(torch.arange(2))
    assert len(table) == 2


def test_gradients_follow_a_freeze_as_those_of_a_parameter_do():
    """Frozen before the backward pass there is none; frozen before the step it stays and is not used."""
    table, optimizer = HashTable(2, name="t"), None
    optimizer = SparseSGD([table], lr=1.0)
    rows = table(torch.tensor([1]))
    table.requires_grad_(False)
    rows.sum().backward()
    assert table.grad is None
    table.requires_grad_(True)
    before = table(torch.tensor([1]))
    before.sum().backward()
    table.requires_grad_(False)
    optimizer.step()
    assert torch.equal(table.embeddings(), before)
    assert table.grad is not None
    optimizer.zero_grad()
    assert table.grad is None


@pytest.mark.parametrize("bag", [False, True])
def test_of_tables_that_are_looked_up_together_only_the_frozen_one_stays(bag):
    def on_rank(exchange):
        options = {"initializer": Normal(), "group": exchange, "gradients": "sum"}
        frozen, trained = (ShardedHashTable(2, name=name, **options) for name in "ab")
        tables = EmbeddingCollection([frozen, trained])
        optimizer = SparseSGD([frozen, trained], lr=1.0)
        ids = {name: torch.arange(4).view(2, 2) for name in "ab"}
        look_up = tables.bag if bag else tables
        look_up(ids)
        before = [table.embeddings() for table in (frozen, trained)]
        frozen.requires_grad_(False)
        rows = look_up({"a": ids["a"] + 2, "b": ids["b"]})
        assert (rows["a"].requires_grad, rows["b"].requires_grad) == (False, True)
        (rows["a"] + rows["b"]).sum().backward()
        optimizer.step()
        assert torch.equal(frozen.embeddings(), before[0])
        assert torch.equal(trained.embeddings(), before[1] - exchange.size)
        return len(frozen), len(trained)

    assert [sum(rows) for rows in zip(*on_ranks(2, on_rank), strict=True)] == [4, 4]


def test_ranks_of_which_one_is_frozen_or_has_a_wrong_argument_raise_alike():
    def on_rank(exchange):
        table = ShardedHashTable(2, name="t", group=exchange)
        table.requires_grad_(exchange.rank == 0)
        with pytest.raises(LookupFailedError, match="same order and mode"):
            table(torch.tensor([1]))
        with_a_policy = ShardedHashTable(2, name="p", group=exchange, **OPTIONS).requires_grad_(False)
        with pytest.raises(LookupFailedError, match="found mode='add'"):
            with_a_policy.bag(torch.tensor([[1]]), mode="add" if exchange.rank else "sum")
        return len(table)

    assert on_ranks(2, on_rank) == [0, 0]


@pytest.mark.slow
def test_a_compiled_model_follows_each_change():
    model = plain(None)
    optimizer, compiled = SparseSGD([model.table], lr=1.0), torch.compile(model, backend="eager")
    for requires_grad in (True, False, True, False):
        model.requires_grad_(requires_grad)
        before = state_of(model.table)
        compiled(ids_of(1, 2)).mul(1).backward() if requires_grad else compiled(ids_of(1, 2, 3))
        optimizer.step()
        optimizer.zero_grad()
        assert (state_of(model.table) != before) == requires_grad


def test_a_deep_copy_is_frozen_apart_and_a_checkpoint_does_not_say_what_is_frozen(tmp_path):
    model, other = plain(None), plain(None)
    model(ids_of(1, 2))
    model.requires_grad_(False)
    twin = copy.deepcopy(model)
    assert not twin.table.requires_grad
    twin.requires_grad_(True)
    assert not model.table.requires_grad
    assert list(model.state_dict()) == ["inner.user.user", "top.weight", "top.bias"]
    saver = Saver(model, None, str(tmp_path / "run"))
    saver.save("ckpt")
    Saver(other, None, str(tmp_path / "other")).load(tmp_path / "run" / "ckpt")
    assert other.table.requires_grad
    other.load_state_dict(model.state_dict())
    assert other.table.requires_grad
    saver.load("ckpt")
    assert not model.table.requires_grad


def test_a_frozen_step_leaves_nothing_for_the_next_delta(tmp_path):
    model = plain(None)
    optimizer = SparseAdam([model.table])
    infos = []
    saver = Saver(model, optimizer, str(tmp_path), deltas=True, on_save=infos.append)
    train(model, optimizer, ids_of(1, 2, 3))
    saver.save("one")
    model.requires_grad_(False)
    train(model, optimizer, ids_of(1, 2, 3, 4))
    saver.save("two")
    assert (infos[1].kind, infos[1].n_upserts, infos[1].n_deletes) == ("delta", 0, 0)


def test_a_table_that_is_made_in_inference_mode_is_frozen_and_trained_too():
    with torch.inference_mode():
        table = HashTable(2, name="t")
    table(torch.tensor([1])).sum().backward()
    assert table.requires_grad_(False).grad is not None
    assert not table(torch.tensor([1])).requires_grad


def test_the_anchor_is_empty_has_no_gradient_and_leaves_sums_over_parameters_as_they_were():
    model = plain(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(ids_of(1, 2)).backward()
    assert dict(model.named_parameters())["inner.user.anchor"] is model.table.anchor
    assert sum(parameter.numel() for parameter in model.parameters()) == 3
    assert model.table.anchor.grad is None
    expected = max(parameter.grad.abs().max().item() for parameter in model.top.parameters())
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf")) == expected
    optimizer.step()
    assert len(optimizer.state) == 2
    assert list(model.table.named_parameters(recurse=False)) == []
    assert [name for name, _ in model.table.named_parameters("here")] == ["here.anchor"]
    assert list(model.table.parameters()) == list(model.table.parameters(recurse=False)) == [model.table.anchor]


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(True, False), (False, True), (True, True)])
def test_an_optimizer_of_all_parameters_and_one_without_anchors_resume_from_each_other(
    tmp_path, caplog, saved_with, loaded_with
):
    def made(with_anchors):
        model = plain(None)
        optimizer = torch.optim.Adam([some for some in model.parameters() if with_anchors or some.numel()], lr=0.1)
        saver = Saver(model, None, str(tmp_path))
        saver.register_for_checkpointing("dense_optim", optimizer)
        return model, optimizer, saver

    model, optimizer, saver = made(saved_with)
    train(model, optimizer, ids_of(1, 2))
    saver.save("ckpt")
    other, resumed, loader = made(loaded_with)
    loader.load("ckpt")
    for state, expected in zip(resumed.state.values(), optimizer.state.values(), strict=True):
        torch.testing.assert_close(state, expected)
    assert "from scratch" not in caplog.text
    assert other.top.weight in resumed.state


@pytest.mark.parametrize(("size", "make"), [*((1, make) for make in KINDS), *((2, make) for make in KINDS[2:])])
def test_gradients_that_are_asked_for_leave_those_of_the_rows_alone(size, make):
    def on_rank(exchange):
        model = make(exchange if size > 1 else None)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(ids_of(1, 2)), parameters)
        assert [grad.shape for grad in grads] == [parameter.shape for parameter in parameters]
        waits = model.table.grad is not None
        model(ids_of(1, 2)).backward(inputs=[model.table.anchor])
        return waits, model.table.grad is not None, model.top.weight.grad is None, model.table.anchor.grad is None

    assert on_ranks(size, on_rank) == [(False, True, True, True)] * size


@pytest.mark.parametrize("size", [1, 2])
def test_of_tables_that_are_looked_up_together_only_those_asked_for_get_gradients(size):
    def on_rank(exchange):
        group = exchange if size > 1 else None
        user, item = tables = [ShardedHashTable(2, name=name, group=group) for name in ("user", "item")]
        rows = EmbeddingCollection(tables)({"user": ids_of(1, 2), "item": ids_of(1, 2)})
        loss = (rows["user"] * rows["item"]).sum()
        torch.autograd.grad(loss, [user.anchor], retain_graph=True)
        none = [table.grad is None for table in tables]
        loss.backward(inputs=[user.anchor])
        return none, user.grad is None, item.grad is None

    assert on_ranks(size, on_rank) == [([True, True], False, True)] * size


def test_what_walks_the_parameters_of_optimizers_freezes_tables_too():  # as Lightning's toggle_optimizer
    table = HashTable(2, name="user")
    (parameter,) = SparseSGD([table], lr=0.1).param_groups[0]["params"]
    assert parameter.requires_grad
    parameter.requires_grad = False
    assert not table.requires_grad
    assert parameter.requires_grad_() is parameter
    assert table.requires_grad
    table.requires_grad_(False)
    assert not parameter.requires_grad


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.top = HashTable(4, name="t"), nn.Linear(4, 1)


class Slow(AveragedModel):
    """An average of the user's own."""


@pytest.mark.parametrize("kind", [AveragedModel, Slow])
@pytest.mark.parametrize("is_training", [True, False])
def test_an_averaged_model_with_tables_is_refused_by_name_with_the_line_to_write(kind, is_training):
    refusal = f"^{kind.__name__} averages parameters, and the rows of table 't' are not"
    with pytest.raises(ValueError, match=refusal) as refused:
        kind(Clicks().train(is_training))
    assert "recckpt.averages.RowAverage(model, decay)" in str(refused.value)
    assert "AveragedModel(torch.nn.ParameterList(model.parameters()))" in str(refused.value)
    with pytest.raises(ValueError, match=f"^{kind.__name__} averages"):
        kind(EmbeddingCollection([ShardedHashTable(4, name="t")]))


def test_a_callback_that_averages_by_a_copy_is_refused_by_its_own_name():
    """As Lightning's do, of which the tests of integrations have the real ones."""
    code = (
        "import copy\nclass StochasticWeightAveraging:\n    def setup(self, model): self.average = copy.deepcopy(model)"
    )
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = types.ModuleType(f"{package}.callbacks.stochastic_weight_avg")
        exec(code, module.__dict__)
        with pytest.raises(ValueError, match=r"^StochasticWeightAveraging averages parameters"):
            module.StochasticWeightAveraging().setup(Clicks())
    assert "lightning" not in sys.modules


def test_the_line_to_write_averages_layers_and_rows():
    model = Clicks()
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=0.1), SparseSGD([model.table], lr=0.1)]
    layers = nn.ParameterList(model.parameters())
    averaged, rows = AveragedModel(layers, avg_fn=lambda mean, now, n: (mean + now) / 2), RowAverage(model, 0.5)
    expected = None
    for _ in range(3):
        model.top(model.table(torch.arange(3))).sum().backward()
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        averaged.update_parameters(layers), rows.update()
        now = model.top.weight.detach().clone()
        expected = now if expected is None else (expected + now) / 2
    assert any(torch.allclose(mean, expected) for mean in averaged.parameters() if mean.shape == expected.shape)
    assert not torch.equal(rows.tables["t"].embeddings(), model.table.embeddings())


def test_models_without_rows_that_are_trained_are_averaged_as_ever():
    AveragedModel(nn.Linear(2, 2))
    frozen = Clicks()
    frozen.table.requires_grad = False
    frozen.table.insert(torch.tensor([1]), torch.ones(1, 4))
    assert AveragedModel(frozen).module.table.lookup(torch.tensor([1]))[0].tolist() == [[1.0] * 4]


def test_a_copy_of_a_model_in_training_warns_once(caplog):
    model = Clicks()
    model.more = HashTable(2, name="more")
    average = RowAverage(model, 0.9)
    with caplog.at_level(logging.WARNING, "recckpt"):
        copy.deepcopy(model.state_dict())
        copy.deepcopy(model.table)
        copy.deepcopy(model.eval())
        model.train()
        with average.swap():
            copy.deepcopy(model)
        assert not caplog.records
        for _ in range(2):
            target = copy.deepcopy(model)
            copy.deepcopy(target)
    assert len(caplog.records) == 1
    assert "recckpt.averages.RowAverage(model, decay)" in caplog.text
    assert "copy.load_state_dict(model.state_dict())" in caplog.text
