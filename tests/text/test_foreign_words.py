"""Words of other libraries are answered, where they are unknown here, with what to write in their place."""

import copy
import inspect
import math
import sys

import pytest
import torch
from support.builders import Run
from torch import nn

import recckpt
import recckpt.live
from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, ShardedHashTable
from recckpt.text.foreign_words import write_instead


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "from recckpt import ReadOnlyManager",
            "cannot import name 'ReadOnlyManager' from 'recckpt': CheckpointReader",
        ),
        ("from recckpt import Saver, first as f", "cannot import name 'first' from 'recckpt': to find the first"),
        (
            "from recckpt.sparse import RowAverage",
            "name 'RowAverage' from 'recckpt.sparse': write recckpt.averages.Row",
        ),
        ("from recckpt.live import LibraryTable", "'LibraryTable' from 'recckpt.live': a hash table of your own is a"),
        ("from recckpt import Savr", "cannot import name 'Savr' from 'recckpt' ("),  # as Python says it
    ],
)
def test_an_import_of_a_name_that_is_gone_says_so_too_and_whoever_asks_is_told_that_it_is_not_there(line, answer):
    with pytest.raises(ImportError) as caught:
        exec(line)
    assert answer in str(caught.value)
    name = line.split()[-1] if " as " not in line else "first"
    module = sys.modules[line.split()[1]]
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (
            {"save_top_k": 2},
            r"\(\) got .* argument 'save_top_k'; 'save_top_k': write max_keep=3, or a policy of",
        ),
        ({"save_last": True}, "'save_last': omit it: the newest checkpoint is always kept; a call that works is"),
        ({"max_keep": 2}, r"'max_keep': it belongs to the saver: Saver\(max_keep=3\), saver\.max_keep; a call"),
        ({"read_only": True}, "'read_only': CheckpointReader and follow read rows, load_into and Standby fill a model"),
        ({"epehmeral": 2}, r"argument 'epehmeral'; did you mean 'ephemeral'\?; a call that works is CheckpointMan"),
    ],
)
def test_options_of_other_managers_are_answered_with_what_to_write(tmp_path, options, answer):
    with pytest.raises(TypeError, match=answer):
        CheckpointManager(Run(tmp_path).saver, 1, **options)


def test_a_manager_of_a_directory_is_answered_with_the_call_that_makes_one(tmp_path):
    line = r"CheckpointManager\.attach\(model, optimizers, output_dir='runs/clicks', save_interval=100\)"
    with pytest.raises(TypeError, match=f"must be a recckpt.Saver, found 'runs/x': {line} makes one"):
        CheckpointManager("runs/x", 100)
    with pytest.raises(TypeError, match=f"found a Linear: {line} makes one"):
        CheckpointManager(nn.Linear(1, 1), 100)
    for arguments in ([], ["runs/x"], [Run(tmp_path).saver]):
        with pytest.raises(TypeError, match=rf"CheckpointManager\(\) missing .* a call that works is {line}, or"):
            CheckpointManager(*arguments)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda manager: manager.save(1, args={}),
            r"save\(\) got .*; 'args': omit it: .* works is save\(",
        ),
        (lambda manager: manager.save(1, {"a": 1.0}), r"3 were given; .* save\(300, metrics={'auc': 0\.7}\)"),
        (lambda manager: manager.save(custom_metadata={}), r"'custom_metadata': save\(state={\.\.\.}\) writes it"),
        (lambda manager: manager.save(force=True), r"'force': omit it: save\(\) saves whatever should_save\(\)"),
        (lambda manager: manager.step(7), r"step\(\) takes 1 positional .* step\(metrics={'auc': 0\.7}\)"),
        (lambda manager: manager.step(step=7), r"'step': omit it: step\(\) counts automatically"),
        (lambda manager: manager.restore(step=1, strict=False), r"'strict': write load_conf={'strict': False}; a call"),
        (lambda manager: manager.restore("runs/x/ckpt_3"), r"found 'runs/x/ckpt_3': .* load_model_bank\("),
    ],
)
def test_arguments_of_other_managers_are_answered_with_a_call_that_would_do(tmp_path, call, answer):
    manager = Run(tmp_path).manager
    with pytest.raises(TypeError, match=answer) as refused:
        call(manager)
    assert "\n" not in str(refused.value)
    assert (manager.global_step, manager.all_steps()) == (0, [])


def test_attach_answers_all_at_once_what_other_libraries_call_otherwise(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError) as refused:
        CheckpointManager.attach(model, dirpath="runs/x", monitor="auc", save_top_k=3, every_n_train_steps=100)
    for part in (
        "attach() got an unexpected keyword argument 'dirpath'; 'dirpath': write output_dir=",
        "'monitor', 'save_top_k': write max_keep=",
        "'every_n_train_steps': write save_interval=",
        "is attach(model, [optimizers]",
    ):
        assert part in str(refused.value)
    options = {"max_to_keep": 3, "read_only": True, "dataloader": [], "sparse_optim": None}
    with pytest.raises(TypeError) as refused:
        CheckpointManager.attach(model, output_dir=tmp_path / "runs", save_interval=1, **options, anything=1)
    for part in (
        "'max_to_keep': write max_keep=",
        "'read_only': CheckpointReader and follow read rows",
        "'dataloader'; did you mean 'loader'?",
        "'sparse_optim': write optimizers=[...]",
        "'anything': there is no such argument",
    ):
        assert part in str(refused.value)


def test_a_saver_answers_too_and_an_error_of_a_call_that_fits_is_left_as_it_is(tmp_path):
    assert write_instead("anything") == ""
    with pytest.raises(AttributeError, match="no attribute 'ReadOnlyManager': CheckpointReader and follow read rows"):
        _ = recckpt.ReadOnlyManager
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"Saver\(\) got .*'dirpath': write output_dir=.* works is Saver\("):
        Saver(model, dirpath=tmp_path)
    with pytest.raises(TypeError, match=r"found a list: CheckpointManager\.attach takes several"):
        Saver(model, [torch.optim.Adam(model.parameters())], str(tmp_path))
    with pytest.raises(TypeError, match=r"^metrics must be a mapping [^;]*$"):
        Run(tmp_path).manager.step(metrics=0.7)


def test_attributes_of_other_managers_are_answered_with_what_to_write(tmp_path):
    manager = Run(tmp_path).manager
    for name, answer in {
        "best_step": r"^'CheckpointManager' object has no attribute 'best_step': recckpt\.find_checkpoint\(",
        "dirpath": r"saver\.output_dir",
        "latest": r"latest_step\(\)",
        "is_saving_in_progress": r"write saver\.is_saving",
        "restor": r"no attribute 'restor'$",
    }.items():
        with pytest.raises(AttributeError, match=answer) as caught:
            getattr(manager, name)
        assert (caught.value.name, caught.value.obj) == (name, manager)  # of which Python makes a guess
    assert not hasattr(manager, "gone")
    with pytest.raises(AttributeError, match=r"^'Saver' object .* 'best_model_path': recckpt\.find_checkpoint"):
        _ = manager.saver.best_model_path


def test_what_the_answers_name_is_there(tmp_path):
    manager = Run(tmp_path).manager
    assert (manager.saver.is_saving, manager.saver.output_dir, manager.latest_step()) == (False, str(tmp_path), None)
    parameters = inspect.signature(CheckpointManager.attach).parameters
    assert {"model", "optimizers", "loader", "output_dir", "save_interval", "max_keep"} <= parameters.keys()
    assert {"choose", "transfers", "max_keep"} <= inspect.signature(Saver).parameters.keys()
    assert {"step_prefix", "async_save"} <= inspect.signature(CheckpointManager).parameters.keys()
    assert {"step", "state", "metrics"} <= inspect.signature(manager.save).parameters.keys()


CALLS = [
    ((1000, 16), {}, "HashTable() takes 2 positional arguments but 3 were given; a call that works is HashTable(16"),
    ((16,), {}, "HashTable() missing 1 required keyword-only argument: 'name'; a call that works is HashTable(16"),
    ((), {"num_embeddings": 9, "embedding_dim": 4, "name": "t"}, "'num_embeddings': omit it: a table grows"),
    ((16,), {"name": "t", "padding_idx": 3}, "'padding_idx': write padding_id, which may be any int64; a call"),
    (
        (16,),
        {"name": "t", "max_norm": 1.0, "norm_type": 2.0},
        "'max_norm', 'norm_type': recckpt.sparse.clip_grad",
    ),
    ((16,), {"name": "t", "sparse": True}, "'sparse': omit it: gradients have only a batch's rows"),
    ((16,), {"name": "t", "_weight": torch.zeros(1000)}, "'_weight': write HashTable.from_embedding(module, name=...)"),
    ((16,), {"name": "t", "padding": 0}, "argument 'padding'; did you mean 'padding_id'?; a call that works is"),
]


@pytest.mark.parametrize(("args", "options", "answer"), CALLS)
def test_arguments_of_an_embedding_are_answered_with_the_call_to_write(args, options, answer):
    with pytest.raises(TypeError) as caught:
        HashTable(*args, **options)
    assert answer in str(caught.value)
    assert len(str(caught.value)) < 400
    assert isinstance(eval(str(caught.value).split("works is ")[1].split(", with")[0]), HashTable)


def test_a_sharded_table_answers_under_its_own_name():
    with pytest.raises(TypeError, match=r"^ShardedHashTable\(\) takes 2 .* is ShardedHashTable\(16, name='item'\)"):
        ShardedHashTable(1000, 16)


def test_the_signature_is_that_of_the_table():
    assert list(inspect.signature(HashTable).parameters)[:3] == ["embedding_shape", "name", "dtype"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("weight", "table.lookup(ids)[0]"),
        ("weight", "table.embeddings()"),
        ("num_embeddings", "len(table)"),
        ("embedding_dim", "table.embedding_shape[-1]"),
        ("max_norm", "torch.nn.functional.normalize(rows, dim=-1)"),
        ("sparse", "recckpt.sparse.SparseAdam([table])"),
        ("mode", "table.bag(ids, mode='mean')"),
        ("reset_parameters", "table.clear()"),
    ],
)
def test_attributes_of_an_embedding_are_answered_with_code_that_runs(name, code):
    table, ids = HashTable(4, name="t"), torch.tensor([[1, 2]])
    with pytest.raises(AttributeError, match=f"'HashTable' object has no attribute '{name}': ") as caught:
        getattr(table, name)
    assert code in str(caught.value)
    eval(code, {"table": table, "torch": torch, "ids": ids, "rows": torch.ones(2, 4), "recckpt": recckpt})


def test_to_whoever_asks_whether_there_is_a_weight_there_is_none():
    table = HashTable(4, name="t")
    assert not hasattr(table, "weight")
    assert getattr(copy.deepcopy(table), "weight", math.nan) is math.nan
    with pytest.raises(AttributeError, match=r"no attribute 'weights'$"):
        table.weights  # noqa: B018
