"""Equal states are equal bytes, whichever of their values are one object."""

import copy
import io
import pickle

import pytest
import torch

from recckpt.dense.saver import pickled
from recckpt.dense.state_copy import portable


def bytes_of(state):
    return pickled(portable("state", state), lambda obj: None)


def apart(value):
    """Return an equal value in which no two objects are one, as of a state that was loaded from several files."""
    if isinstance(value, dict):
        return {apart(key): apart(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)([apart(item) for item in value])
    if isinstance(value, str):
        return "".join([value[:1], value[1:]]) if len(value) > 1 else value
    return pickle.loads(pickle.dumps(value))


WORD, PAIR, PLACE = "max_" + "momentum", (0.9, 0.999), torch.device("cpu")


@pytest.mark.parametrize(
    "state",
    [
        [WORD, WORD, {WORD: WORD}],
        ["cpu", "storage", "latin1", "state", "10"],  # as torch and recckpt call something in each file
        [PAIR, PAIR, (1, 2), (1, 2)],
        [b"position", b"position", b"", b""],
        [torch.Size([2, 3]), torch.Size([2, 3]), PLACE, PLACE, torch.float32, torch.float32],
        [1j, 1j, 10**30, 10**30, 1.5, None, True],
    ],
)
def test_bytes_follow_from_values(state):
    one, other = bytes_of(state), bytes_of(apart(state))
    assert one == other == bytes_of(copy.deepcopy(state))
    assert pickle.loads(one) == state


def test_values_that_are_equal_and_not_the_same_stay_apart():
    state = [0.0, -0.0, 0j, -0j, complex(0.0, -0.0), 1, 1.0, True, "1", b"1"]
    assert repr(pickle.loads(bytes_of(state))) == repr(state)


def test_a_set_is_written_in_one_order():
    one, other = {0, 8, 16, "a"}, set()
    for member in ("a", 16, 8, 0):
        other.add(member)
    assert [*one] != [*other]
    assert bytes_of([one]) == bytes_of([other])
    assert torch.load(io.BytesIO(saved([one])), weights_only=True) == [one]


def saved(state):
    file = io.BytesIO()
    torch.save(pickle.loads(bytes_of(state)), file)
    return file.getvalue()
