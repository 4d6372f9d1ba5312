"""Gloo groups, at the end of real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import PYTHONPATH
from support.rank_processes import run_script

_ENDING = Path(__file__).with_name("ending_ranks.py")
_ABORTING = Path(__file__).with_name("aborting_ranks.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are found by /proc")


def said_at_the_end(root, way):
    """Return what the rank says that ends, which must not take as long as a collective may."""
    run_script(_ENDING, root, way)
    return json.loads((root / "said").read_text())


def test_the_threads_of_a_group_end_before_the_interpreter_does_and_ranks_reach_each_other_no_more(tmp_path):
    (before, after), error = said_at_the_end(tmp_path, "well")
    assert 0 < after < before  # those of the process group of the user are left
    assert "the interpreter is ending" in error


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_the_end_does_not_wait_for_a_rank_that_is(way, tmp_path):
    before, after = said_at_the_end(tmp_path, way)
    assert after < before


@pytest.mark.parametrize("way", ["under_way", "interrupted"])
def test_a_group_is_left_open_where_closing_it_would_wait_for_a_collective_that_is(way, tmp_path):
    before, after = said_at_the_end(tmp_path, way)
    assert after == before


def test_the_end_of_a_fork_closes_no_group_whose_threads_are_not_there(tmp_path):
    assert said_at_the_end(tmp_path, "forked") == 0


@pytest.mark.slow  # interpreters that end for real take half a second each
def test_no_rank_aborts_that_returns_from_main_after_a_load(tmp_path):
    command = [sys.executable, _ABORTING, tmp_path, "10"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    assert json.loads(done.stdout) == [0] * 20
