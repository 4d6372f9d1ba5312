"""A trained model is loaded to be evaluated or served: whatever its tables are, from where nothing may be written."""

import logging

import pytest
import torch
from support.builders import ClickModel, Run, bits, tree
from support.other_user import another_user, directory_for_all
from torch import nn

import recckpt
from recckpt import CheckpointManager, Saver
from recckpt.errors import CheckpointNotFoundError, LoadConfError, StateMismatchError
from recckpt.live import live_tables
from recckpt.policies.admit import Bloom, MinCount
from recckpt.sparse import HashTable, SparseAdam


def scores(model):
    """Return what a model says of some clicks, of ids without a row too."""
    users, items = torch.arange(-40, 40), torch.arange(140, 220)
    with torch.no_grad():
        return bits(model.eval()(users, items))


def trained(url, **options):
    """Return a run of 25 steps, saved at its end."""
    run = Run(url, max_keep=3, **options).train(25)
    run.manager.save()
    return run


def test_a_loaded_model_gives_what_the_trained_one_gives(url, caplog):
    run = trained(url, deltas=True)
    caplog.clear()
    model = ClickModel()
    report = recckpt.load_into(model, url)
    assert scores(model) == scores(run.model)
    assert report.global_step == 25
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_checkpoint_and_latest_are_loaded_as_an_output_dir_is(tmp_path):
    run = Run(tmp_path, max_keep=3).train(10)
    then = scores(run.model.eval())
    run.model.train()
    run.train(10)
    for path, expected in ((tmp_path / "ckpt_10", then), (f"{tmp_path}/latest", scores(run.model))):
        model = ClickModel()
        recckpt.load_into(model, path)
        assert scores(model) == expected


def test_nothing_is_written_where_nothing_may_be():
    with directory_for_all() as runs:
        run = trained(runs)
        before = tree(runs)
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        model = ClickModel()
        with another_user():
            with pytest.raises(PermissionError):
                Saver(ClickModel(), output_dir=str(runs))
            recckpt.load_into(model, runs)
        assert scores(model) == scores(run.model)
        assert tree(runs) == before
        runs.chmod(0o755)


def test_a_model_with_an_optimizer_is_loaded_without_its_state_and_without_a_warning(tmp_path, caplog):
    run = trained(tmp_path, optimizer="adam")
    other = Run(tmp_path / "other", optimizer="adam").train(5)
    step = other.sparse.state_dict()["state"]
    caplog.clear()
    recckpt.load_into(other.model, tmp_path)
    assert scores(other.model) == scores(run.model)
    assert not any(slot.any() for table in other.model.tables for slot in table.slots.values())
    assert other.sparse.state_dict()["state"] == step
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


class Words(nn.Module):
    """A plain embedding below a layer."""

    def __init__(self):
        super().__init__()
        self.word, self.top = nn.Embedding(50, 4), nn.Linear(4, 1)


@pytest.fixture
def words(tmp_path):
    """A trained model whose embedding was saved as a live table, to ``tmp_path``."""
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1), deltas=True)
    saver.register_for_checkpointing("dense_optim", optimizer)
    manager = CheckpointManager(saver, 1)
    for _ in range(2):
        model.top(model.word(torch.arange(5))).sum().backward()
        optimizer.step()
        manager.step()
    return model


def test_live_tables_are_loaded_into_plain_embeddings(tmp_path, words, caplog):
    caplog.clear()
    model = Words()
    recckpt.load_into(model, tmp_path)
    assert {name: bits(value) for name, value in model.state_dict().items()} == {
        name: bits(value) for name, value in words.state_dict().items()
    }
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_live_tables_are_loaded_into_hashtables_of_the_same_name(tmp_path, words):
    model = nn.ModuleDict({"word": HashTable(4, name="word"), "top": nn.Linear(4, 1)})
    report = recckpt.load_into(model, tmp_path)
    assert report.rows_taken == {"word": 50}
    assert torch.equal(model["word"].eval()(torch.arange(50)), words.word.weight)


def test_a_part_is_loaded_by_a_load_conf(tmp_path):
    run = trained(tmp_path)
    item = nn.ModuleDict({"item": HashTable(4, name="item")})
    with pytest.raises(StateMismatchError, match=r"not in the model: 'top.weight'"):
        recckpt.load_into(item, tmp_path)
    assert len(item["item"]) == 0
    recckpt.load_into(item, tmp_path, load_conf={"load": ["item"]})
    assert len(item["item"]) == len(run.model.items)


def test_what_only_training_needs_is_refused_where_it_is_asked_for(tmp_path):
    trained(tmp_path)
    with pytest.raises(LoadConfError, match=r"only training needs 'sparse_opt', 'io_state': Saver.load takes that"):
        recckpt.load_into(ClickModel(), tmp_path, load_conf={"load": ["sparse", "sparse_opt", "io_state"]})
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, found a dict"):
        recckpt.load_into({}, tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        recckpt.load_into(ClickModel(), tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("bloom", [None, Bloom(1000, 0.01)], ids=["exact", "filter"])
def test_counts_of_ids_that_wait_for_a_row_are_not_missed(tmp_path, bloom):
    table = HashTable(4, name="item", admit=MinCount(2, bloom=bloom))
    for ids in (torch.arange(10), torch.arange(4)):
        table(ids)
    saver = Saver(nn.ModuleDict({"item": table}), output_dir=str(tmp_path))
    assert len(saver.save("ckpt_1").tables) == 2
    model = nn.ModuleDict({"item": HashTable(4, name="item")})
    assert recckpt.load_into(model, tmp_path).rows_taken == {"item": 4}
    with pytest.raises(StateMismatchError, match=r"not in the model: 'item.candidates"):
        Saver(model, output_dir=str(tmp_path)).load()


def test_only_what_changes_look_ups_is_warned_of(tmp_path, caplog):
    table = HashTable(4, name="item", track=("count",))
    optimizer = SparseAdam([table])
    for ids in (torch.arange(100), torch.arange(30)):
        table(ids).sum().backward()
        optimizer.step()
    options = {"save_slots": ["!*@*exp_avg*"]}
    Saver(nn.ModuleDict({"item": table}), optimizer, str(tmp_path), **options).save("whole", step=1)
    caplog.clear()
    recckpt.load_into(nn.ModuleDict({"item": HashTable(4, name="item")}), tmp_path)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []

    options["save_where"], options["store"] = {"item": {"count": {"min": 2}}}, {"item@embedding": "bfloat16"}
    Saver(nn.ModuleDict({"item": table}), optimizer, str(tmp_path), **options).save("less", step=2)
    caplog.clear()
    recckpt.load_into(nn.ModuleDict({"item": HashTable(4, name="item")}), tmp_path)
    [warning] = [record.message for record in caplog.records if record.levelno > logging.INFO]
    assert "without 70 rows" in warning
    assert "embedding narrower than float32" in warning
    assert warning.endswith("its rows are not, bit for bit, those that were trained")
    assert "exp_avg" not in warning
