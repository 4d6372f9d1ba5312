"""Embeddings of torch that become tables, which train on as they would have."""

import copy

import pytest
import torch
from support.rooms import on_ranks
from torch import nn

from recckpt import Saver
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import HashTable, ShardedHashTable, SparseAdam, SparseSGD, replace_embeddings

N, DIM = 10, 4
IDS = torch.tensor([-5, 2**40, *range(100, 108)])
OPTIMIZERS = {"sgd": (SparseSGD, torch.optim.SGD), "adam": (SparseAdam, torch.optim.SparseAdam)}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_of_an_embedding_trains_on_as_that_does(optimizer, padding_idx, given):
    module = nn.Embedding(N, DIM, padding_idx=padding_idx, sparse=True)
    ids = IDS if given else None
    names = IDS if given else torch.arange(N)
    table = HashTable.from_embedding(module, name="t", ids=ids)
    assert torch.equal(table.lookup(names)[0], module.weight)
    ours, theirs = OPTIMIZERS[optimizer]
    optimizers = ours([table], lr=0.1), theirs(module.parameters(), lr=0.1)
    for step in range(5):
        rows = torch.randint(0, N, (3, 4), generator=torch.Generator().manual_seed(step))
        for optim, out in zip(optimizers, (table(names[rows]), module(rows)), strict=True):
            optim.zero_grad()
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).square().sum().backward()
            optim.step()
    torch.testing.assert_close(table.lookup(names)[0], module.weight.detach(), rtol=1e-6, atol=1e-7)
    if padding_idx is not None:
        assert table.lookup(names[padding_idx])[0].tolist() == [0] * DIM


def test_rows_are_copied_in_their_dtype_and_ids_to_come_get_rows():
    module = nn.Embedding(N, DIM, dtype=torch.bfloat16)
    table = HashTable.from_embedding(module, name="t", initializer=torch.nn.init.ones_)
    assert (table.dtype, len(table), table.padding_id) == (torch.bfloat16, N, None)
    assert table(torch.tensor([N])).tolist() == [[1] * DIM]
    before = module.weight.clone()
    table.insert(torch.arange(N), torch.zeros(N, DIM, dtype=torch.bfloat16))
    assert torch.equal(module.weight, before)


def test_each_rank_of_a_sharded_table_takes_its_rows():
    module = nn.Embedding(N, DIM, padding_idx=1)

    def work(exchange):
        table = ShardedHashTable.from_embedding(module, name="t", group=exchange)
        return len(table), table(torch.arange(N)).detach()

    sizes, rows = zip(*on_ranks(3, work), strict=True)
    assert sum(sizes) == N
    assert all(torch.equal(found, module.weight) for found in rows)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(N, DIM, padding_idx=0)
        self.deep = nn.ModuleDict(
            {"tags": nn.EmbeddingBag(N, DIM, mode="mean", padding_idx=1, include_last_offset=True)}
        )
        self.also_user = self.user
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, users, tags, offsets):
        rows = self.user(users), self.also_user(users), self.deep["tags"](tags, offsets)
        return self.top(torch.cat(rows, 1)).squeeze(1)


BATCH = torch.tensor([0, 3, 9]), torch.tensor([1, 4, 4, 1, 2]), torch.tensor([0, 2, 3, 5])


def test_a_model_goes_on_with_tables_in_place_of_its_embeddings(tmp_path):
    model = Model()
    twin = copy.deepcopy(model)
    tables = replace_embeddings(model)
    assert [*tables] == ["user", "deep.tags"]
    assert model.user is model.also_user is tables["user"]
    assert filter_out_sparse_param(model).keys() == tables.keys()
    assert [name for name, some in model.named_parameters() if some.numel()] == ["top.weight", "top.bias"]
    for found, optim in (
        (model, [SparseSGD(list(tables.values()), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]),
        (twin, [torch.optim.SGD(twin.parameters(), lr=0.1)]),
    ):
        for _ in range(3):
            found(*BATCH).square().sum().backward()
            for one in optim:
                one.step()
                one.zero_grad()
    torch.testing.assert_close(model(*BATCH), twin(*BATCH), rtol=1e-5, atol=1e-6)
    saver = Saver(model, output_dir=str(tmp_path))
    saver.save("ckpt_1")
    expected = model(*BATCH)
    tables["user"].clear()
    saver.load()
    assert torch.equal(model(*BATCH), expected)


def test_some_are_replaced_with_ids_of_their_own_and_of_32_bits():
    model = Model()
    weight = model.user.weight.detach().clone()
    tables = replace_embeddings(model, ["user"], ids={"user": IDS})
    assert torch.equal(tables["user"].lookup(IDS)[0], weight)
    assert isinstance(model.deep["tags"], nn.EmbeddingBag)
    assert model.user.padding_id == -5
    model = nn.Sequential(nn.Embedding(N, DIM))
    ids = torch.tensor([[3, 1], [3, 0]], dtype=torch.int32)
    expected = model(ids)
    [table] = replace_embeddings(model).values()
    assert torch.equal(model(ids), expected)
    model(ids).sum().backward()
    assert len(table) == N


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Embedding(N, DIM), nn.Linear(DIM, N)
        self.out.weight = self.inner.weight


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Model(), {"modules": ["usr"]}, r"found the name 'usr'.*did you mean 'user'"),
        (Model(), {"ids": {"top": IDS}}, "found the name 'top'"),
        (Model(), {"ids": {"user": IDS[:3]}}, r"table 'user': found 3 ids, 3 of them different, expected 10"),
        (Model(), {"ids": {"user": IDS * 0}}, "1 of them different"),
        (nn.Embedding(2, 2), {}, "HashTable.from_embedding"),
        (Tied(), {}, "inner.weight is out.weight too"),
        (nn.ModuleList([nn.Embedding(2, 2), nn.Embedding(2, 2, max_norm=1.0)]), {}, "table '1': found max_norm=1.0"),
        (nn.ModuleList([nn.Embedding(2, 2, scale_grad_by_freq=True)]), {}, "found scale_grad_by_freq=True"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_has_changed(model, options, said):
    before = list(model.modules())
    with pytest.raises(ValueError, match=said):
        replace_embeddings(model, **options)
    assert list(model.modules()) == before


def test_bags_of_two_dimensions_have_no_last_offset():
    model = nn.ModuleDict({"t": nn.EmbeddingBag(N, DIM, include_last_offset=True)})
    ids = torch.tensor([[1, 2], [3, 3]])
    expected = model["t"](ids)
    replace_embeddings(model)
    torch.testing.assert_close(model["t"](ids), expected)


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def with_forward(module):
    module.forward = lambda ids: nn.functional.embedding(ids, module.weight) * 2
    return module


def hooked(module, register):
    getattr(module, register)(lambda *_: None)
    return module


def with_weight_hook(module):
    module.weight.register_hook(lambda grad: grad * 2)
    return module


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Scaled(2, 2), "Scaled with a forward of its own"),
        (with_forward(nn.Embedding(2, 2)), "Embedding with a forward of its own"),
        (hooked(nn.Embedding(2, 2), "register_forward_hook"), "hooks .forward_hooks"),
        (hooked(nn.Embedding(2, 2), "register_forward_pre_hook"), "hooks .forward_pre_hooks"),
        (hooked(nn.EmbeddingBag(2, 2), "register_full_backward_hook"), "hooks .backward_hooks"),
        (hooked(nn.Embedding(2, 2), "register_full_backward_pre_hook"), "hooks .backward_pre_hooks"),
        (with_weight_hook(nn.Embedding(2, 2)), "hooks .backward_hooks"),
        (nn.utils.parametrizations.weight_norm(nn.Embedding(2, 2)), "parametrizations"),
    ],
)
def test_a_module_that_does_more_than_those_of_torch_is_refused(module, said):
    model = nn.ModuleDict({"plain": nn.Embedding(2, 2), "inner": module})
    with pytest.raises(ValueError, match=f"table 'inner': found {said}.*keep this module as it is"):
        replace_embeddings(model)
    assert model["inner"] is module
    assert isinstance(model["plain"], nn.Embedding)
    assert [*replace_embeddings(model, ["plain"])] == ["plain"]


def test_a_frozen_weight_becomes_a_frozen_table():
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(2, 2).requires_grad_(False), "plain": nn.Embedding(2, 2)})
    before = model["bag"].weight.clone()
    tables = replace_embeddings(model)
    assert [table.requires_grad for table in tables.values()] == [False, True]
    optimizer = SparseSGD(tables, lr=1.0)
    (model["bag"](torch.tensor([[0, 1]])) + model["plain"](torch.tensor([0]))).sum().backward()
    optimizer.step()
    assert torch.equal(tables["bag"].embeddings(), before)


class Named(nn.Embedding):
    """Another name, and the same behaviour."""


def test_a_subclass_that_behaves_alike_is_replaced_and_what_is_no_embedding_is_refused():
    assert len(HashTable.from_embedding(Named(2, 2), name="t")) == 2
    with pytest.raises(TypeError, match=r"table 't': found a Linear, expected an nn.Embedding or nn.EmbeddingBag"):
        HashTable.from_embedding(nn.Linear(2, 2), name="t")
