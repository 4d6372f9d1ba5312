"""What a model is beside what is loaded: longer or shorter embeddings, no memory, one place for two tensors."""

import logging
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recckpt import CheckpointManager, CheckpointReader, Saver, load_into
from recckpt.errors import StateMismatchError
from recckpt.live import live_tables
from recckpt.sparse import HashTable

PAIRS = list(product([False, True], repeat=2))


def made(path, n_rows, is_table):
    """Return an embedding as a live table or as a dense tensor, with its optimizer, and a saver."""
    model = nn.ModuleDict({"words": nn.Embedding(n_rows, 3), "top": nn.Linear(3, 2)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model["top"](model["words"](torch.arange(n_rows))).square().sum().backward()
    optimizer.step()
    tables = live_tables(model, optimizer, min_rows=1) if is_table else None
    saver = Saver(model, output_dir=path, tables=tables)
    saver.register_for_checkpointing("optim", optimizer)
    return saver, model["words"].weight


@pytest.mark.parametrize(("was_table", "is_table"), PAIRS)
def test_rows_that_are_new_keep_what_the_model_has_and_a_line_says_how_many(tmp_path, was_table, is_table):
    first, saved = made(tmp_path, 20, was_table)
    first.save("1")
    saver, weight = made(tmp_path, 25, is_table)
    before = weight.detach().clone()
    report = saver.load()
    assert torch.equal(weight[:20], saved)
    assert torch.equal(weight[20:], before[20:])
    [warning] = [text for text in report.warnings if "rows" in text]
    assert warning.endswith("has 25 rows, of which 5 are new and keep what the model has")


@pytest.mark.parametrize(("was_table", "is_table"), PAIRS)
def test_one_that_is_shorter_is_refused_and_the_error_says_how_to_cut_it(tmp_path, was_table, is_table):
    first, saved = made(tmp_path, 25, was_table)
    first.save("1")
    saver, weight = made(tmp_path, 20, is_table)
    before = weight.detach().clone()
    with pytest.raises(StateMismatchError, match=r"'on_mismatch': \{'words(\.weight)?': 'resize'") as caught:
        saver.load()
    assert "missing" not in str(caught.value)
    assert torch.equal(weight, before)
    saver.load(load_conf={"on_mismatch": {"words*": "resize"}, "strict": True})
    assert torch.equal(weight, saved[:20])


def test_other_layers_that_are_longer_are_refused_as_before(tmp_path):
    Saver(nn.ModuleDict({"top": nn.Linear(3, 2)}), output_dir=tmp_path).save("1")
    with pytest.raises(StateMismatchError, match=r"'top\.weight': 'resize'"):
        Saver(nn.ModuleDict({"top": nn.Linear(3, 4)}), output_dir=tmp_path).load()


class Words(nn.Module):
    """A model whose output layer may be tied to its embedding."""

    def __init__(self, is_tied=False):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids))


def run_of(path, model):
    """Return a saver of a model, with its optimizer, which has stepped once."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    saver = Saver(model, output_dir=path)
    saver.register_for_checkpointing("optim", optimizer)
    return saver, optimizer


def test_a_model_on_meta_is_refused_by_name(tmp_path):
    Saver(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), output_dir=tmp_path).save("1")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, device="meta"))
    before = model[0].weight.detach().clone()
    for load in (lambda: load_into(model, tmp_path), lambda: Saver(model, output_dir=tmp_path).load()):
        with pytest.raises(StateMismatchError) as caught:
            load()
        assert "'1.bias': found values, expected none: it is on 'meta'" in str(caught.value)
        assert "'1.weight': found values" in str(caught.value)
        assert "'0.weight'" not in str(caught.value)
        assert "model.to_empty(device='cpu')" in str(caught.value)
    assert torch.equal(model[0].weight, before)
    load_into(model, tmp_path, load_conf={"exclude": ["1.*"]})
    load_into(model.to_empty(device="cpu"), tmp_path)
    assert torch.equal(model[1].weight, torch.from_numpy(CheckpointReader(tmp_path).read_tensor("1.weight")))


def test_an_untied_checkpoint_is_refused_by_a_tied_model_unless_it_is_said_which_layer_counts(tmp_path):
    saver, optimizer = run_of(tmp_path, Words())
    saver.save("1")
    tied = Words(is_tied=True)
    again, its_optimizer = run_of(tmp_path, tied)
    before = tied.words.weight.detach().clone()
    with pytest.raises(StateMismatchError) as caught:
        again.load()
    assert "'head.weight': found other values than 'words.weight', expected the same, since" in str(caught.value) or (
        "'words.weight': found other values than 'head.weight', expected the same, since" in str(caught.value)
    )
    assert torch.equal(tied.words.weight, before)
    for name in ("words.weight", "head.weight"):
        again.load(load_conf={"oname": {"words.weight": name, "head.weight": name}})
        there = saver.model.get_parameter(name)
        assert torch.equal(tied.words.weight, there)
        assert torch.equal(its_optimizer.state[tied.words.weight]["exp_avg"], optimizer.state[there]["exp_avg"])


def test_two_layers_of_equal_values_go_into_a_tied_one(tmp_path):
    model = Words()
    with torch.no_grad():
        model.head.weight.copy_(model.words.weight)
    Saver(model, output_dir=tmp_path).save("1")
    tied = Words(is_tied=True)
    load_into(tied, tmp_path)
    assert torch.equal(tied.head.weight, model.words.weight)


def test_a_tied_checkpoint_goes_into_both(tmp_path):
    saver, _ = run_of(tmp_path, Words(is_tied=True))
    saver.save("1")
    for is_tied in (True, False):
        model = Words(is_tied)
        load_into(model, tmp_path)
        assert torch.equal(model.head.weight, saver.model.words.weight)


class Ranked(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.tower = nn.ModuleDict({"goods": nn.Embedding(1500, 4), "top": nn.Linear(4, 1)})
        self.tower["goods"], self.tower["top"] = wrap(self.tower["goods"]), wrap(self.tower["top"])
        self.tower, self.user = wrap(self.tower), HashTable(4, name="user")


@pytest.mark.parametrize("before", [checkpoint_wrapper, lambda module: module])
def test_recomputation_that_is_switched_on_or_off_changes_no_name(tmp_path, caplog, before):
    caplog.set_level(logging.WARNING)

    def run(wrap):
        model = Ranked(wrap)
        parameters = [parameter for parameter in model.parameters() if parameter.numel()]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        saver = Saver(model, output_dir=tmp_path, tables=live_tables(model, optimizer))
        saver.register_for_checkpointing("optim", optimizer)
        return CheckpointManager(saver, 1), optimizer, parameters

    manager, optimizer, parameters = run(before)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    manager.save(1)
    record = CheckpointReader(tmp_path).manifest
    assert {table.name for table in record.tables} == {"tower.goods", "user"}
    assert {*record.names.dense} == {"tower.top.weight", "tower.top.bias"}
    for wrap in (checkpoint_wrapper, lambda module: module):
        again, its_optimizer, its_parameters = run(wrap)
        assert again.restore() == 1
        for one, other in zip(parameters, its_parameters, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(optimizer.state[one]["exp_avg"], its_optimizer.state[other]["exp_avg"])
    assert "scratch" not in caplog.text
