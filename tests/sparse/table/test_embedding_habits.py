"""What users of nn.Embedding type is answered with the line to write instead."""

import copy
import inspect

import pytest
import torch

from recckpt.sparse import HashTable, ShardedHashTable

CALLS = [
    ((1000, 16), {}, "expected HashTable(16, name='item'): a table grows"),
    ((1000, 16), {"name": "user"}, "expected HashTable(16, name='user'): a table grows"),
    ((1000, 16, 0), {"name": "user"}, "HashTable(16, name='user', padding_id=0)"),
    ((16,), {"name": "t", "padding_idx": 3}, "HashTable(16, name='t', padding_id=3): its padding_id may be any int64"),
    ((), {"num_embeddings": 9, "embedding_dim": 4, "name": "t"}, "expected HashTable(4, name='t'): a table grows"),
    ((16,), {"name": "t", "max_norm": 1.0, "track": "count"}, "expected HashTable(16, name='t', track='count'): rows"),
    ((16,), {"name": "t", "sparse": True}, "HashTable(16, name='t'): gradients are always of the rows in a batch"),
    ((16,), {}, "found HashTable(16), expected HashTable(16, name='item'): its name is that in checkpoints"),
    ((), {"name": "t"}, "expected HashTable(16, name='t'): the first argument is the dimension"),
    ((16,), {"name": "t", "padding": 0}, "HashTable has no argument 'padding'; did you mean 'padding_id'?"),
]


@pytest.mark.parametrize(("args", "options", "answer"), CALLS)
def test_arguments_of_an_embedding_are_answered_with_the_call_to_write(args, options, answer):
    with pytest.raises(TypeError) as caught:
        HashTable(*args, **options)
    assert answer in str(caught.value)


@pytest.mark.parametrize(("args", "options", "answer"), [call for call in CALLS if "expected" in call[2]])
def test_the_call_to_write_makes_a_table(args, options, answer):
    with pytest.raises(TypeError) as caught:
        HashTable(*args, **options)
    line = str(caught.value).split("expected ")[1].split(": ")[0]
    assert isinstance(eval(line), HashTable)


def test_a_sharded_table_answers_under_its_own_name():
    with pytest.raises(TypeError, match=r"found ShardedHashTable\(1000, 16\), expected ShardedHashTable\(16, name="):
        ShardedHashTable(1000, 16)


def test_a_long_argument_is_cut_in_the_answer():
    with pytest.raises(TypeError) as caught:
        HashTable(16, name="t", _weight=torch.zeros(1000))
    assert len(str(caught.value)) < 300


def test_the_signature_is_that_of_the_table():
    assert list(inspect.signature(HashTable).parameters)[:3] == ["embedding_shape", "name", "dtype"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("weight", "table.grad"),
        ("weight", "table.embeddings()"),
        ("num_embeddings", "len(table)"),
        ("embedding_dim", "table.embedding_shape[-1]"),
        ("padding_idx", "table.padding_id"),
        ("max_norm", "torch.nn.functional.normalize(table(ids), dim=-1)"),
        ("sparse", "recckpt.sparse.SparseAdam([table])"),
        ("reset_parameters", "table.clear()"),
    ],
)
def test_attributes_of_an_embedding_are_answered_with_code_that_runs(name, code):
    table = HashTable(4, name="t")
    with pytest.raises(AttributeError, match=f"HashTable 't' has no '{name}'") as caught:
        getattr(table, name)
    assert code in str(caught.value)
    scope = {"table": table, "torch": torch, "ids": torch.tensor([1, 2]), "recckpt": __import__("recckpt.sparse")}
    eval(code, scope)


def test_to_whoever_asks_whether_there_is_a_weight_there_is_none():
    table = HashTable(4, name="t")
    assert not hasattr(table, "weight")
    assert getattr(copy.deepcopy(table), "weight", None) is None
    with pytest.raises(AttributeError, match="no attribute 'weights'"):
        table.weights  # noqa: B018


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_ids_are_answered_with_what_takes_them(layout):
    table = HashTable(4, name="t")
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=layout)
    with pytest.raises(ValueError, match=r"found a nested one: table\.bag\(ids\) pools its rows"):
        table(ids)
    if layout is torch.jagged:
        rows = torch.nested.nested_tensor_from_jagged(table(ids.values()), ids.offsets())
        assert [len(some) for some in rows.unbind()] == [2, 1]
