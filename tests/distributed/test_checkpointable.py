"""Tensors that say by attributes which parts of a whole they are: saved by any number of ranks, restored by any."""

from pathlib import Path

import numpy as np
import pytest
from support.rank_processes import run_script

from recckpt import CheckpointReader
from recckpt.inspect.verify import verify

SCRIPT = Path(__file__).with_name("checkpointable_ranks.py")


def check(path):
    with CheckpointReader(path) as reader:
        assert sorted(reader.tensor_names()) == ["bias", "counts", "w"]
        assert (reader.tensor_shape("w"), reader.tensor_shape("counts")) == ((11, 3), (11,))
        np.testing.assert_array_equal(reader.read_tensor("counts"), np.arange(11) * 2)
    assert verify(str(path)) == []


@pytest.mark.slow
def test_three_ranks_go_on_from_what_two_have_saved(tmp_path):
    run_script(SCRIPT, tmp_path, 2, 3)
    check(tmp_path / "run-2")
    check(tmp_path / "run-3")


@pytest.mark.slow
def test_two_ranks_go_on_from_what_three_have_saved_and_one_from_both(tmp_path):
    run_script(SCRIPT, tmp_path, 3, 2, 1)
    for size in (1, 2, 3):
        check(tmp_path / f"run-{size}")
