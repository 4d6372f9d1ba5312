"""The rules of oname that would fit, where names of the model and of the checkpoint differ."""

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.errors import StateMismatchError
from recckpt.format.names import Name, slot_name
from recckpt.load.inventory import Thing
from recckpt.load.renamed import likely_renames
from recckpt.sparse import HashTable, SparseAdam


def table(name, dim=4, *slots):
    return {slot_name(name, slot): Thing("float32", (dim,)) for slot in ("embedding", *slots)}


def dense(**shapes):
    return {Name("dense", name.replace("__", ".")): Thing("float32", shape) for name, shape in shapes.items()}


def renames(model, there):
    missing = [name for name in model if name not in there and name.slot in ("", "embedding")]
    left = [name for name in there if name not in model and name.slot in ("", "embedding")]
    return likely_renames(model, there, missing=missing, left=left)


@pytest.mark.parametrize(
    ("model", "there", "rules"),
    [
        (table("user"), table("member"), {"user": "member"}),
        (table("user", 4), table("member", 8), {}),
        (table("user") | table("item"), table("user") | table("goods"), {"item": "goods"}),
        (table("users") | table("items"), table("user") | table("item"), {"users": "user", "items": "item"}),
        (table("user", 4) | table("item", 8), table("a", 8) | table("b", 4), {"user": "b", "item": "a"}),
        (table("xx", 4, "sparse_m"), table("xy", 4) | table("ab", 4, "sparse_m"), {"xx": "ab"}),
        (table("xx", 4), table("ab", 4, "sparse_m"), {"xx": "ab"}),
        (table("x") | table("y"), table("p") | table("q"), {}),
        (dense(top__weight=(2, 3), top__bias=(2,)), dense(head__weight=(2, 3), head__bias=(2,)), {"top.*": "head.*"}),
        (dense(top__weight=(2, 3)), dense(head__weight=(3, 2)), {}),
        (
            dense(mlp__0__weight=(2, 3), mlp__2__weight=(4, 5)),
            dense(top__0__weight=(2, 3), top__2__weight=(4, 5)),
            {"mlp.*": "top.*"},
        ),
        (
            dense(mlp__0__weight=(2, 3), mlp__1__weight=(7, 7)),
            dense(top__0__weight=(2, 3), mlp__1__weight=(7, 7)),
            {"mlp.0.*": "top.0.*"},
        ),
    ],
)
def test_names_are_paired_by_slots_and_shapes_and_then_by_likeness(model, there, rules):
    assert renames(model, there) == rules


class Model(nn.Module):
    def __init__(self, table="user", layer="top"):
        super().__init__()
        self.table = HashTable(4, name=table)
        setattr(self, layer, nn.Linear(4, 1))


def saver(path, *names):
    model = Model(*names)
    optim = SparseAdam([model.table])
    model.table(torch.arange(3)).sum().backward()
    optim.step()
    return model, Saver(model, optim, output_dir=path)


def test_the_advice_of_the_error_restores_all_there_is(tmp_path):
    before, first = saver(tmp_path)
    first.save("1")
    after, second = saver(tmp_path, "users", "head")
    with pytest.raises(StateMismatchError) as caught:
        second.load("1")
    advice = str(caught.value).rpartition("pass load_conf=")[2].split(" if names have changed")[0]
    assert str(caught.value).endswith("if names have changed; 'strict': False loads what fits by name")
    second.load("1", load_conf=eval(advice))
    assert torch.equal(after.table.embeddings(), before.table.embeddings())
    assert torch.equal(after.table.slots["sparse_adam_exp_avg"], before.table.slots["sparse_adam_exp_avg"])
    assert torch.equal(after.head.weight, before.top.weight)


def test_where_nothing_fits_the_advice_is_to_load_what_fits(tmp_path):
    saver(tmp_path)[1].save("1")
    other = nn.ModuleDict({"t": HashTable(9, name="else")})
    with pytest.raises(StateMismatchError, match=r"pass load_conf=\{'strict': False\} to load what fits by name"):
        Saver(other, output_dir=tmp_path).load("1")


def test_many_layers_are_paired_by_their_numbers():
    layers = range(60)
    model = dense(**{f"blocks__{n}__{part}__weight": (4, 4) for n in layers for part in ("query", "key")})
    there = dense(**{f"layers__{n}__{part}__weight": (4, 4) for n in layers for part in ("query", "key")})
    rules = renames(model, there)
    assert rules == {"blocks.*": "layers.*"}
