"""Calls as users of orbax and of ModelCheckpoint make them are answered with the line to write."""

import pytest
import torch
from support.builders import Run

from recckpt import CheckpointManager, Saver
from recckpt.policies.keep import Newest


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"read_only": True}, r"'read_only' is not an option: write CheckpointManager\.attach\(model, output_dir="),
        ({"save_top_k": 2}, r"'save_top_k' is not an option: write max_keep=Newest\(2\)"),
        ({"save_last": True}, "'save_last' is not an option: omit it, since the newest checkpoint is always kept"),
        ({"max_keep": 2}, "'max_keep' is an option of Saver: give it there"),
        ({"epehmeral": 2}, "did you mean 'ephemeral'"),
    ],
)
def test_options_of_other_managers_are_answered_with_what_to_write(tmp_path, options, answer):
    with pytest.raises(TypeError, match=answer):
        CheckpointManager(Run(tmp_path).saver, 1, **options)


def test_a_manager_of_a_directory_is_answered_with_the_call_that_makes_one(tmp_path):
    line = r"found 'runs/x': CheckpointManager\.attach\(model, optimizers, output_dir='runs/x', save_interval=100\)"
    for arguments in (["runs/x"], ["runs/x", 100], ["runs/x", object()]):
        with pytest.raises(TypeError, match=line):
            CheckpointManager(*arguments)
    model = torch.nn.Linear(1, 1)
    for arguments in ([model], [model, torch.optim.Adam(model.parameters()), tmp_path]):
        with pytest.raises(TypeError, match=r"found a Linear: CheckpointManager\.attach\(model"):
            CheckpointManager(*arguments)
    with pytest.raises(TypeError, match=r"found None: CheckpointManager\.attach\(model"):
        CheckpointManager()
    with pytest.raises(TypeError, match=r"missing .*'save_interval'.* CheckpointManager\(saver, save_interval=100\)"):
        CheckpointManager(Run(tmp_path).saver)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda manager: manager.save(1, args={}),
            r"save\(\): 'args': omit it, .*; a call that would do is save\(\), or",
        ),
        (lambda manager: manager.save(1, {"loss": 1.0}), r"too many positional .* save\(300, metrics={'auc': 0\.7}\)"),
        (lambda manager: manager.save(custom_metadata={}), r"'custom_metadata': write state={\.\.\.}"),
        (lambda manager: manager.save(force=True), r"'force': omit it, since save\(\) saves whatever should_save\(\)"),
        (lambda manager: manager.step(7), r"step\(\): too many .* step\(metrics={'auc': 0\.7}\)"),
        (
            lambda manager: manager.step(step=7),
            r"'step': omit it, .* save\(step=N\) in a loop that counts its own steps",
        ),
        (lambda manager: manager.restore(1, args={}), r"restore\(\): 'args': omit it, .* load_conf="),
        (lambda manager: manager.restore("runs/x/ckpt_3"), r"found 'runs/x/ckpt_3': .* load_model_bank\("),
        (lambda manager: manager.reached_preemption(7), r"a call that would do is reached_preemption\(\)"),
    ],
)
def test_arguments_of_other_managers_are_answered_with_a_call_that_would_do(tmp_path, call, answer):
    manager = Run(tmp_path).manager
    with pytest.raises(TypeError, match=answer) as refused:
        call(manager)
    assert "\n" not in str(refused.value)
    assert (manager.global_step, manager.all_steps()) == (0, [])


def test_attach_answers_all_at_once_what_other_libraries_call_otherwise():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError) as refused:
        CheckpointManager.attach(model, dirpath="runs/x", monitor="auc", save_top_k=3, every_n_train_steps=100)
    for part in ("'dirpath': write output_dir=", "'monitor', 'save_top_k': write max_keep=", "is attach(model, ["):
        assert part in str(refused.value)


def test_an_error_of_a_call_that_fits_is_left_as_it_is(tmp_path):
    with pytest.raises(TypeError, match=r"^metrics must be a mapping"):
        Run(tmp_path).manager.step(metrics=0.7)


def test_several_optimizers_for_a_saver_are_answered_with_attach(tmp_path):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"found a list: CheckpointManager\.attach takes several"):
        Saver(model, [torch.optim.Adam(model.parameters())], str(tmp_path))


def test_attributes_of_other_managers_are_answered_with_what_to_write(tmp_path):
    manager = Run(tmp_path).manager
    for name, answer in {
        "best_step": r"no 'best_step': write recckpt\.find_checkpoint\(output_dir, 'best'",
        "dirpath": r"write saver\.output_dir",
        "is_saving_in_progress": r"write saver\.is_saving",
        "restor": "did you mean 'restore'",
    }.items():
        with pytest.raises(AttributeError, match=answer):
            getattr(manager, name)
    assert not hasattr(manager, "gone")


def test_what_the_answers_say_is_there(tmp_path):
    manager = Run(tmp_path).manager
    manager.saver.max_keep = Newest(2)
    assert not manager.saver.is_saving
    assert manager.saver.output_dir == str(tmp_path)
