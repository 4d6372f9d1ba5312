"""Numbers that a table refuses at the door: taken as they are, they would mean nothing, or something else."""

import math

import numpy as np
import pytest
import torch

from recckpt.sparse import HashTable


@pytest.mark.parametrize("value", [True, "5", [1], 10**400, 2**70, 1.5, math.nan, math.inf, -(2**63) - 1])
def test_numbers_that_no_slot_no_padding_and_no_room_can_have_are_refused(value):
    table = HashTable(2, name="t")
    with pytest.raises(ValueError, match="'t', 'n': initial must be a int8, found"):
        table.add_slot("n", (), torch.int8, initial=value)
    with pytest.raises(ValueError, match="'t': padding_id must be an int64 or None, found"):
        table.bag(torch.tensor([[1]]), padding_id=value)
    if not isinstance(value, int) or value is True:
        with pytest.raises(ValueError, match="'t': n_rows must be an int of at least 0, found"):
            table.reserve(value)
    assert (len(table), list(table.slots)) == (0, [])


def test_a_slot_of_floats_starts_at_any_float_that_it_can_hold():
    table = HashTable(2, name="t")
    for number, initial in enumerate([-math.inf, math.nan, np.float32(2.5), 3]):
        table.add_slot(f"slot_{number}", (), initial=initial)
    for initial in (1e300, -(10**400), True):
        with pytest.raises(ValueError, match="initial must be a float32, found"):
            table.add_slot("more", (), initial=initial)
    table(torch.tensor([7]))
    assert str([values.item() for values in table.slots.values()]) == "[-inf, nan, 2.5, 3.0]"
