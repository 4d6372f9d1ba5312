import pytest

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError
from recckpt.removal import until_whole

REMOVED = CheckpointRemovedError("runs/ckpt_1")


class Looks:
    """Finds and uses what a script says: a value, or an error to raise."""

    def __init__(self, *script):
        self.script, self.seen = list(script), []

    def find(self):
        step = self.script.pop(0)
        self.seen.append(step)
        if isinstance(step, CheckpointNotFoundError):
            raise step
        return step

    def use(self, found):
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize("n_removed", range(4))
def test_what_was_removed_is_looked_for_again_up_to_three_times(n_removed):
    looks = Looks(*[REMOVED] * n_removed, "ckpt_2")
    assert until_whole(looks.find, looks.use) == "ckpt_2"
    assert len(looks.seen) == n_removed + 1


def test_a_fourth_time_it_is_an_error_that_says_what_to_do():
    looks = Looks(*[REMOVED] * 4, "never")
    with pytest.raises(CheckpointRemovedError, match=r"pin\(step\)"):
        until_whole(looks.find, looks.use)
    assert looks.script == ["never"]


def test_what_was_never_there_is_not_looked_for_again():
    looks = Looks(CheckpointNotFoundError("none"), "never")
    with pytest.raises(CheckpointNotFoundError):
        until_whole(looks.find, looks.use)
    assert looks.script == ["never"]


def test_what_is_gone_for_good_is_said_to_have_been_removed():
    looks = Looks(REMOVED, *[CheckpointNotFoundError("none")] * 3)
    with pytest.raises(CheckpointRemovedError):
        until_whole(looks.find, looks.use)


def test_a_moment_without_a_checkpoint_is_passed():
    looks = Looks(REMOVED, CheckpointNotFoundError("none"), "ckpt_3")
    assert until_whole(looks.find, looks.use) == "ckpt_3"


def test_other_errors_pass():
    looks = Looks(REMOVED, CorruptCheckpointError("f", "", found=1, expected=2), "never")
    with pytest.raises(CorruptCheckpointError):
        until_whole(looks.find, looks.use)
    assert looks.script == ["never"]
