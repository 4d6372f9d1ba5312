"""The processes of a job, over gloo."""

from pathlib import Path

from support.rank_processes import results, run_script


def test_ranks_reach_each_other_whatever_device_tensors_are_made_on_by_default(tmp_path):
    run_script(Path(__file__).with_name("default_device_ranks.py"), tmp_path, 2)
    assert results(tmp_path, 2) == [([0, 1], gathered, "from 0") for gathered in (["of 0", "of 1"], None)]
