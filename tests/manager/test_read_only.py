"""A manager that only reads brings a model to the checkpoints of a run, and leaves the output dir as it was."""

import logging
from pathlib import Path

import pytest
import torch
from support.builders import flip_bit
from support.other_user import another_user, directory_for_all
from torch import nn

import recckpt
from recckpt import CheckpointManager, ReadOnlyManager
from recckpt.errors import CheckpointNotFoundError, LoadConfError
from recckpt.sparse import HashTable, SparseAdam


def model_of():
    return nn.ModuleDict({"t": HashTable(2, name="t"), "top": nn.Linear(2, 1)})


class Trainer:
    """A run with an optimizer of each kind, whose rows and weights say which step it is at."""

    def __init__(self, url, **options):
        self.model = model_of()
        optimizers = [SparseAdam([self.model["t"]]), torch.optim.Adam(self.model.parameters())]
        options = {"save_interval": 1, "max_keep": None, "async_save": False, **options}
        self.manager = CheckpointManager.attach(self.model, optimizers, output_dir=url, **options)

    def train(self, n_steps=1):
        for _ in range(n_steps):
            step = self.manager.global_step + 1
            ids = torch.arange(50) if step == 1 else torch.tensor([step])
            self.model["t"].insert(ids, torch.full((len(ids), 2), float(step)))
            with torch.no_grad():
                self.model["top"].weight.fill_(step)
            self.manager.step()
        return self


@pytest.fixture
def run(tmp_path):
    return Trainer(tmp_path / "run").train(3)


def reader_of(path, **options):
    model = model_of().eval()
    return model, CheckpointManager.attach(model, output_dir=path, read_only=True, **options)


def step_of(model):
    step = int(model["top"].weight[0, 0])
    assert model["t"](torch.tensor([step])).tolist() == [[float(step)] * 2]
    return step


def contents(path):
    return {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in Path(path).rglob("*")}


def test_it_restores_and_lists_without_a_word_of_what_training_needs(run, tmp_path, caplog):
    before = contents(tmp_path / "run")
    model, manager = reader_of(tmp_path / "run")
    assert (manager.global_step, manager.all_steps(), manager.latest_step()) == (0, [1, 2, 3], 3)
    for asked, step in ((2, 2), (None, 3), (1, 1), ("latest", 3)):
        assert (manager.restore(asked), manager.global_step, step_of(model)) == (step, step, step)
    assert contents(tmp_path / "run") == before
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert repr(manager) == f"ReadOnlyManager(at step 3, output_dir='{tmp_path / 'run'}')"


def test_it_follows_a_run_and_reads_of_deltas_what_is_new(run, tmp_path):
    model, manager = reader_of(tmp_path / "run")
    steps = []
    with manager:
        for checkpoint in manager.follow(timeout_sec=0):
            steps.append((checkpoint.manifest.step, manager.global_step, step_of(model)))
            if len(steps) < 6:
                run.train()
    assert steps == [(step, step, step) for step in range(1, 9)]
    assert [each.manifest.step for each in manager.follow(timeout_sec=0, after=6)] == [7, 8]


def test_the_run_goes_on_owning_its_output_dir(run, tmp_path):
    _, manager = reader_of(tmp_path / "run")
    manager.restore()
    run.train()  # else WriterFencedError
    assert manager.restore() == 4


def test_a_directory_that_may_only_be_read_will_do():
    with directory_for_all() as runs:
        Trainer(runs).train(2)
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with another_user():
            model, manager = reader_of(runs)
            assert [step_of(model) for _ in manager.follow(timeout_sec=0)] == [1, 2]
            assert (manager.restore(1), step_of(model)) == (1, 1)
        runs.chmod(0o755)


def test_a_run_that_has_not_begun_is_no_error_and_is_not_made(tmp_path, caplog):
    _, manager = reader_of(tmp_path / "run")
    assert (manager.restore(), manager.latest_step(), list(manager.follow(timeout_sec=0))) == (0, None, [])
    assert "nothing to restore yet: does not exist" in caplog.text
    assert not (tmp_path / "run").exists()
    for asked in ({"required": True}, {"global_step": 3}):
        with pytest.raises(CheckpointNotFoundError, match="run"):
            manager.restore(**asked)


def test_a_damaged_checkpoint_is_passed_over_while_a_run_is_followed(run, tmp_path, caplog):
    flip_bit(next((tmp_path / "run/ckpt_2").rglob("*.arrow")), -600)
    _, manager = reader_of(tmp_path / "run")
    steps = [checkpoint.manifest.step for checkpoint in manager.follow(timeout_sec=0)]
    assert steps == [1]  # 3 stands on 2
    assert "ckpt_2 is passed over" in caplog.text


def test_a_part_of_the_model_is_restored_where_that_is_asked(run, tmp_path):
    model, manager = reader_of(tmp_path / "run", load_conf={"load": ["t"]})
    weight = model["top"].weight.clone()
    assert manager.restore() == 3
    assert torch.equal(model["top"].weight, weight)
    assert len(model["t"]) == 50


def test_a_checkpoint_in_place_of_its_output_dir_is_refused(run, tmp_path):
    _, manager = reader_of(tmp_path / "run/ckpt_2")
    with pytest.raises(ValueError, match="checkpoint"):
        manager.restore()
    with pytest.raises(
        CheckpointNotFoundError, match="is a checkpoint itself, expected an output dir; name its parent"
    ):
        manager.follow()


@pytest.mark.parametrize("name", ["step", "save", "delete", "forget", "pin", "register_for_checkpointing", "saver"])
def test_what_writes_or_trains_is_refused_by_name(run, tmp_path, name):
    _, manager = reader_of(tmp_path / "run")
    with pytest.raises(AttributeError, match=f"read_only=True has no '{name}': it restores and follows, and writes"):
        getattr(manager, name)


def test_what_other_managers_call_otherwise_is_named_here_too(run, tmp_path):
    _, manager = reader_of(tmp_path / "run")
    with pytest.raises(AttributeError, match="has no 'directory': write output_dir"):
        _ = manager.directory
    with pytest.raises(TypeError, match=r"found 'best': find_checkpoint\(output_dir, 'best', 'auc'\)\.step"):
        manager.restore("best")


def test_arguments_of_a_run_that_trains_are_refused_by_name(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="saves nothing: omit max_keep, optimizers, save_interval"):
        reader_of(tmp_path, optimizers=SparseAdam([model["t"]]), save_interval=3, max_keep=1)
    for options in ({"read_only": True}, {"save_interval": 1}):
        with pytest.raises(ValueError, match="an output dir is a path or URL, found 3"):
            CheckpointManager.attach(model, output_dir=3, **options)
    with pytest.raises(LoadConfError):
        reader_of(tmp_path, load_conf={"lod": ["*"]})
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        CheckpointManager.attach("model", output_dir=tmp_path, read_only=True)
    with pytest.raises(TypeError, match=r"save_interval=\.\.\. is missing: .* read_only=True saves none"):
        CheckpointManager.attach(model, output_dir=tmp_path)
    assert isinstance(reader_of(tmp_path)[1], ReadOnlyManager)
    assert list(tmp_path.iterdir()) == []
    assert recckpt.list_checkpoints(tmp_path) == []
