"""Ranks reach each other over a group of their own, whose threads end before the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.paths import PYTHONPATH
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow

from recckpt.parallel.process_group import ReusedBuffer

_ENDING = Path(__file__).with_name("ending_ranks.py")
_ABORTING = Path(__file__).with_name("aborting_ranks.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are found by /proc")


def test_ranks_reach_each_other_whatever_device_tensors_are_made_on_by_default(tmp_path):
    run_script(Path(__file__).with_name("default_device_ranks.py"), tmp_path, 2)
    assert results(tmp_path, 2) == [([0, 1], gathered, "from 0") for gathered in (["of 0", "of 1"], None)]


def said_at_the_end(root, way):
    """Return what the rank says that ends, which must not take as long as a collective may."""
    run_script(_ENDING, root, way)
    return json.loads((root / "said").read_text())


def test_the_threads_of_a_group_end_before_the_interpreter_does_and_ranks_reach_each_other_no_more(tmp_path):
    (before, after), error = said_at_the_end(tmp_path, "well")
    assert 0 < after < before  # those of the process group of the user are left
    assert "the interpreter is ending" in error


@mostly_slow()
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_the_end_does_not_wait_for_a_rank_that_is(way, tmp_path):
    before, after = said_at_the_end(tmp_path, way)
    assert after < before


@mostly_slow()
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


def test_bytes_are_taken_from_the_same_memory_while_it_is_large_enough():
    buffer = ReusedBuffer()
    assert len(buffer.take(0)) == 0
    first = buffer.take(100)
    first[:] = 7
    assert (buffer.take(60) == 7).all()
    assert len(buffer.take(60)) == 60
    assert np.shares_memory(buffer.take(100), first)
    larger = buffer.take(101)
    assert len(larger) == 101
    assert not np.shares_memory(larger, first)
