"""What a saver is asked to save of its tables: which slots, which rows, in which dtypes; and what it refuses."""

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import SaveFailedError
from recckpt.policies import Choose
from recckpt.policies.admit import Bloom, MinCount
from recckpt.save.choice import Choice, choice_of
from recckpt.sparse import HashTable, SparseAdam
from recckpt.types import SlotSpec

AVG, SQ = "sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"
SLOTS = [
    SlotSpec(name, dtype, shape)
    for name, dtype, shape in (
        ("embedding", "float32", (4,)),
        ("count", "int64", ()),
        (AVG, "float32", (4,)),
        (SQ, "float32", (4,)),
    )
]


def names(choice, table="user"):
    wanted = choice.of(table, SLOTS)
    return [slot.name for slot in (SLOTS if wanted is None else wanted.slots)]


def model_of(*tables):
    return nn.ModuleDict({table.name: table for table in tables})


def table_of(n_rows=10, name="user"):
    table = HashTable(4, name=name)
    table.add_slot("count", (), torch.int64)
    SparseAdam([table], lr=0.1)
    table.insert(torch.arange(n_rows), torch.rand(n_rows, 4), {"count": torch.arange(n_rows)})
    return table


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (None, ["embedding", "count", AVG, SQ]),
        ([], ["embedding"]),
        (["*@count"], ["embedding", "count"]),
        (["user@count", "*@*_sq"], ["embedding", "count", SQ]),
        (["!*@*exp_avg*"], ["embedding", "count"]),
        (["!sparse_opt"], ["embedding", "count"]),
        (["sparse_opt", "!*@*_sq"], ["embedding", AVG]),
        (["user"], ["embedding", "count", AVG, SQ]),
        (["!user"], ["embedding"]),
        (["!item"], ["embedding", "count", AVG, SQ]),
    ],
)
def test_slots_are_chosen_by_the_patterns_of_a_load_conf_and_left_out_by_those_behind_an_exclamation_mark(
    slots, expected
):
    assert names(choice_of(Choose(slots=slots))) == expected


def test_what_is_said_of_a_name_goes_before_what_is_said_of_a_pattern():
    choice = choice_of(
        Choose(
            None,
            {"*": {"count": {"min": 2}}, "user": {"sample": 0.5}},
            {"*@*avg*": "float16", f"user@{SQ}": "bfloat16"},
        )
    )
    wanted, of_item = choice.of("user", SLOTS), choice.of("item", SLOTS)
    assert (wanted.where.sample, of_item.where.minimum) == (0.5, (("count", 2.0),))
    assert [slot.dtype for slot in wanted.slots] == ["float32", "int64", "float16", "bfloat16"]
    assert wanted.reduced.dtypes == {AVG: "float32", SQ: "float32"}


def test_a_table_of_which_nothing_is_left_out_is_saved_as_it_is():
    assert choice_of(Choose(["*@*"], {"item": [1]}, {"*@embedding": torch.float32})).of("user", SLOTS) is None
    assert Choice().of("user", SLOTS) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": "count"}, "Choose: slots must be a list of patterns"),
        ({"slots": [3]}, "Choose: slots must be a list of patterns"),
        ({"slots": ["!"]}, "Choose: slots must be a list of patterns"),
        ({"slots": ["!*@embedding"]}, "ids and embeddings are always saved"),
        ({"slots": ["dense"]}, "found the group 'dense', expected sparse or sparse_opt"),
        ({"where": [1, 2]}, "Choose: where must be a dict"),
        ({"where": {"user": {"count": 2}}}, r"Choose: where\['user'\]: 'count': found 2, expected {'min': number}"),
        ({"where": {"user": {"count": {"min": float("nan")}}}}, "expected {'min': number}"),
        ({"store": "bfloat16"}, "Choose: store must be a dict"),
        ({"store": {"*": "int8"}}, r"store\['\*'\]: found 'int8', expected one of float16"),
        ({"store": {"*@embedding": "bfloat61"}}, "did you mean 'bfloat16'"),
        ({"store": {"*@*": "bfloat16"}}, "user@count is int64, found 'bfloat16': it can only be stored unchanged"),
        ({"store": {"*@embedding": "float64"}}, "user@embedding is float32, found 'float64': .* float16 or bfloat16"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_an_output_dir_is_made(tmp_path, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Saver(model_of(table_of()), output_dir=str(tmp_path / "new"), choose=Choose(**options))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": ["*@cuont"]}, r"Choose: slots: '\*@cuont' matches nothing in the model"),
        ({"slots": ["user@cuont"]}, "did you mean 'user@count'"),
        ({"slots": ["count"]}, r"'\*@count' means this slot of all tables"),
        ({"where": {"users": {"count": {"min": 2}}}}, "Choose: where: 'users' matches nothing .* did you mean 'user'"),
        ({"where": {"user": {"cuont": {"min": 2}}}}, "table 'user' has no slot 'cuont'.* did you mean 'count'"),
        ({"where": {"user": {"embedding": {"min": 2}}}}, "expected one number per row"),
        ({"store": {"*@avg": "bfloat16"}}, r"store: '\*@avg' matches nothing in the model"),
    ],
)
def test_what_is_said_of_nothing_is_refused_at_the_first_save_and_writes_nothing(tmp_path, options, said):
    saver = Saver(model_of(table_of()), output_dir=str(tmp_path), choose=Choose(**options))
    with pytest.raises(ValueError, match=said):
        saver.save("a")
    assert not (tmp_path / "a").exists()


def test_slots_that_come_after_the_saver_are_looked_at_by_the_save(tmp_path):
    table = HashTable(4, name="user")
    saver = Saver(model_of(table), output_dir=str(tmp_path), choose=Choose(store={"*@*count": "bfloat16"}))
    table.add_slot("count", (), torch.int32)
    with pytest.raises(ValueError, match="user@count is int32"):
        saver.save("a")


def test_a_number_that_the_narrower_dtype_does_not_hold_fails_the_save(tmp_path):
    table = table_of()
    saver = Saver(model_of(table), output_dir=str(tmp_path), choose=Choose(store={"*@embedding": "float16"}))
    table.insert(torch.tensor([3]), torch.full((1, 4), 1e6))
    with pytest.raises(SaveFailedError, match=r"found 1e\+06, expected numbers within the range of float16.*bfloat16"):
        saver.save("a")
    table.insert(torch.tensor([3]), torch.full((1, 4), float("inf")))  # which float16 has
    assert saver.save("b").rows == 10


@mostly_slow()
@pytest.mark.parametrize("bloom", [None, Bloom(capacity=1000, error=0.01)])
@pytest.mark.parametrize(
    "options",
    [
        {"where": {"*": {"count": {"min": 2}}}},
        {"where": {"*": {"sample": 0.5}}},
        {"where": {"*": [1]}},
        {"store": {"*@embedding": "bfloat16"}},
        {"slots": []},
    ],
)
def test_patterns_do_not_mean_the_counts_of_ids_that_wait_for_a_row(tmp_path, options, bloom):
    table = HashTable(4, name="user", track=("count",), admit=MinCount(3, bloom=bloom))
    table(torch.arange(50))
    saver = Saver(model_of(table), output_dir=str(tmp_path), choose=Choose(**options))
    *_, counts = saver.save("a").tables
    assert (counts.name, counts.rows, counts.reduced) == (table.candidates.name, len(table.candidates), None)


def test_the_counts_of_ids_that_wait_are_reduced_where_they_are_named(tmp_path):
    table = HashTable(4, name="user", admit=MinCount(3))
    table(torch.arange(5))
    saver = Saver(model_of(table), output_dir=str(tmp_path), choose=Choose(where={"user.candidates": [1, 2]}))
    assert [(found.name, found.rows) for found in saver.save("a").tables] == [("user", 0), ("user.candidates", 2)]


def test_a_pattern_that_means_such_counts_alone_is_refused(tmp_path):
    table = HashTable(4, name="user", admit=MinCount(3))
    saver = Saver(model_of(table), output_dir=str(tmp_path), choose=Choose(where={"*.candidates": [1, 2]}))
    with pytest.raises(ValueError, match=r"Choose: where: '\*.candidates' matches nothing in the model"):
        saver.save("a")
