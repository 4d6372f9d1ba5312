import pytest
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CheckpointNotFoundError
from recckpt.output_dir.listing import list_checkpoints
from recckpt.output_dir.rotation import pinned_ids


@pytest.fixture
def manager(url) -> CheckpointManager:
    return CheckpointManager(Saver(nn.Linear(1, 1), output_dir=url), 1)


def kept(manager) -> list[str]:
    return [checkpoint.ckpt_id for checkpoint in list_checkpoints(manager.saver.storage).current]


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(manager):
    manager.step()
    manager.pin(1)
    manager.pin(1)
    manager.step()
    manager.step()
    assert kept(manager) == ["ckpt_1", "ckpt_3"]
    manager.unpin(1)
    manager.unpin(1)
    assert kept(manager) == ["ckpt_1", "ckpt_3"]
    manager.step()
    assert kept(manager) == ["ckpt_4"]


def test_what_is_not_committed_cannot_be_pinned(manager):
    manager.step()
    with pytest.raises(CheckpointNotFoundError, match="'ckpt_7'; there are 'ckpt_1'"):
        manager.pin(7)
    assert pinned_ids(manager.saver.storage) == set()


def test_an_id_in_place_of_a_step_is_not_pinned(manager):
    manager.step()
    for pin in (manager.pin, manager.unpin):
        with pytest.raises(TypeError, match="step must be an int, found 'ckpt_1': a manager names its own checkpoints"):
            pin("ckpt_1")


def test_another_process_may_pin(manager):
    manager.step()
    reader = CheckpointManager(Saver(nn.Linear(1, 1), output_dir=manager.saver.output_dir), 1)
    reader.pin(1)
    manager.step()
    assert kept(manager) == ["ckpt_1", "ckpt_2"]


def test_a_pin_keeps_the_newest_of_an_id_not_what_it_superseded(manager):
    manager.step()
    manager.pin(1)
    manager.saver.save("ckpt_1", step=1, overwrite=True)
    assert [c.directory for c in list_checkpoints(manager.saver.storage).committed] == ["ckpt_1.1"]
