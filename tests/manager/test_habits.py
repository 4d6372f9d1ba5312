import pytest
from support.builders import Run

from recckpt import CheckpointManager


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"read_only": True}, r"'read_only' is not an option: write CheckpointManager\.attach\(model, output_dir="),
        ({"save_top_k": 2}, r"'save_top_k' is not an option: write max_keep=Newest\(2\)"),
        ({"max_keep": 2}, "'max_keep' is an option of Saver: give it there"),
        ({"epehmeral": 2}, "did you mean 'ephemeral'"),
    ],
)
def test_options_of_other_managers_are_answered_with_what_to_write(tmp_path, options, answer):
    with pytest.raises(TypeError, match=answer):
        CheckpointManager(Run(tmp_path).saver, 1, **options)


def test_attributes_of_other_managers_are_answered_with_what_to_write(tmp_path):
    manager = Run(tmp_path).manager
    with pytest.raises(AttributeError, match=r"no 'best_step': write recckpt\.find_checkpoint\(output_dir, 'best'"):
        _ = manager.best_step
    assert not hasattr(manager, "gone")
