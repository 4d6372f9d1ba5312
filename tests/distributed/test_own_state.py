"""State of which each rank has its own, on real ranks: ZeRO's parts, and objects that differ."""

from pathlib import Path

import pytest
import torch
from support.rank_processes import run_script

from recckpt import CheckpointReader

SCRIPT = Path(__file__).with_name("own_state_ranks.py")


@pytest.mark.slow
def test_each_rank_saves_its_own_state_and_any_number_of_ranks_finds_the_parts_of_an_optimizer(tmp_path):
    run_script(SCRIPT, tmp_path, 2, 3, 1, 2)  # each of them loads what those before it saved
    names = CheckpointReader(str(tmp_path / "spread-2")).manifest.names
    assert (names.extra, names.extra_of_ranks) == ((), ("zero",))
    files = [next(tmp_path.glob(f"spread-2/c*/extra_{rank}.pt")) for rank in (0, 1)]
    [first, second] = [torch.load(file)["zero"]["state"] for file in files]
    assert sorted([*first, *second]) == [0, 1, 2, 3], "each rank wrote its part"
    assert first.keys()
    assert second.keys()
