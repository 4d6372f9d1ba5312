import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.paths import PYTHONPATH

import recckpt
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.sparse.table.kernels import add_rows, compiled, count_buckets, gather_rows, place_rows, scatter_rows

RNG = np.random.default_rng(0)


def blocks_of(n_blocks: int, rows: int, row_bytes: int):
    memory = [RNG.integers(0, 256, (rows, row_bytes), np.uint8) for _ in range(n_blocks)]
    return memory, np.array([block.ctypes.data for block in memory], np.int64)


def test_gather_copies_rows_of_any_width_from_all_blocks_and_scatter_is_its_reverse():
    for row_bytes, dtype in (
        (1, np.int64),
        (2, np.uint32),
        (3, np.int64),
        (8, np.int64),
        (13, np.uint32),
        (256, np.int64),
    ):
        memory, addresses = blocks_of(3, 8, row_bytes)
        rows = np.array([23, 0, 7, 8, 8, 15], dtype)
        target = np.zeros((len(rows), row_bytes), np.uint8)
        gather_rows(addresses, 3, row_bytes, rows, target.ctypes.data)
        expected = np.concatenate(memory)
        assert (target == expected[rows]).all()
        rows, source = np.array([5, 23, 8], np.int64), RNG.integers(0, 256, (3, row_bytes), np.uint8)
        scatter_rows(addresses, 3, row_bytes, rows, source.ctypes.data)
        expected[rows] = source
        assert (np.concatenate(memory) == expected).all()


def test_add_rows_sums_by_group_in_order():
    values = RNG.standard_normal((1000, 5)).astype(np.float32)
    groups = RNG.integers(0, 7, 1000)
    sums = np.zeros((7, 5), np.float32)
    add_rows(groups, values, sums)
    expected = np.zeros((7, 5), np.float32)
    for group, row in zip(groups, values, strict=True):
        expected[group] += row
    assert (sums == expected).all()


def test_counting_and_placing_is_a_stable_sort_by_bucket():
    ids = RNG.integers(-(2**63), 2**63 - 1, 5000)
    counts = np.zeros(N_BUCKETS, np.int64)
    count_buckets(ids, counts)
    assert (counts == np.bincount(bucket_of(ids), minlength=N_BUCKETS)).all()
    order = np.empty(len(ids), np.int64)
    cursors = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place_rows(ids, 0, 0, N_BUCKETS, cursors, order)
    assert (order == np.argsort(bucket_of(ids), kind="stable")).all()


def test_placing_leaves_out_other_buckets():
    ids = RNG.integers(-(2**63), 2**63 - 1, 1000)
    buckets = bucket_of(ids)
    inside = (buckets >= 1000) & (buckets < 30_000)
    counts = np.bincount(buckets[inside], minlength=N_BUCKETS)
    order = np.full(inside.sum(), -1)
    place_rows(ids, 100, 1000, 30_000, np.concatenate([[0], np.cumsum(counts)[:-1]]), order)
    assert (np.sort(order) == np.flatnonzero(inside) + 100).all()


INTERRUPTED = """
import signal
import threading
import numpy as np
from numba.core.registry import cpu_target
from recckpt.sparse.table.id_index import IdIndex

engine = cpu_target.target_context.codegen()._engine._ee
hook, n_interrupts = engine._object_cache_notify, 0

def interrupting(module, code):  # called by C code, which drops an exception, and the machine code with it
    global n_interrupts
    n_interrupts += 1
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    hook(module, code)

engine._object_cache_notify = interrupting
rows = None
while rows is None:
    try:
        index = IdIndex()
        index.find_or_add(np.arange(5))
        rows = index.find(np.arange(6)).tolist()
    except KeyboardInterrupt:
        pass
print(n_interrupts > 0, rows)
"""


@pytest.mark.slow
def test_an_interrupt_while_a_loop_is_compiled_for_the_first_time_breaks_nothing(tmp_path):
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True [0, 1, 2, 3, 4, -1]\n", done.stderr


def test_where_no_thread_can_be_started_a_loop_is_compiled_all_the_same(monkeypatch):
    def double(number):
        return 2 * number

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert compiled(double)(3) == 6


FIRST_LOOP = """
import logging, resource, sys
import numpy as np
if "--full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files can be made, and not a byte written
logging.basicConfig(level=logging.INFO)
import recckpt
from recckpt.sparse.table.kernels import compiled, mark_rows, row_norms
marks, norms = np.zeros(1, np.uint8), np.zeros(1)
mark_rows(np.array([0, 2]), marks)
row_norms(np.ones((1, 4)), norms)
print(marks, norms, len(mark_rows.stats.cache_hits), recckpt.__file__)
"""


def first_loop(package, *args, **env):
    inherited = {name: value for name, value in os.environ.items() if name not in {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}}
    return subprocess.run(
        [sys.executable, "-c", FIRST_LOOP, *args],
        env={**inherited, "PYTHONPATH": str(package), "HOME": "/proc", **env},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def read_only_package(tmp_path):
    """A copy of recckpt where nothing can be written, not by root either."""
    target = tmp_path / "root"
    target.mkdir()
    mounted = os.geteuid() == 0
    if mounted:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", target], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NO READ-ONLY ROOT WAS TESTED, a tmpfs may not be mounted here: {done.stderr}")
    try:
        shutil.copytree(Path(recckpt.__file__).parent, target / "recckpt", ignore=shutil.ignore_patterns("__pycache__"))
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", target], check=True)
        else:
            subprocess.run(["chmod", "-R", "a-w", target], check=True)
        yield target
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", target], check=True)
        else:
            subprocess.run(["chmod", "-R", "u+w", target], check=True)


def test_where_neither_home_nor_package_can_be_written_loops_are_compiled_and_one_line_says_so(read_only_package):
    done = first_loop(read_only_package)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[5] [2.] 0 {read_only_package}/recckpt/__init__.py\n"
    assert done.stderr.count("numba has no place to cache compiled loops") == 1
    assert "INFO:recckpt:" in done.stderr
    assert "NUMBA_CACHE_DIR" in done.stderr


@pytest.mark.slow
def test_a_cache_that_is_full_costs_the_time_of_compiling_alone(tmp_path):
    done = first_loop(Path(recckpt.__file__).parents[1], "--full", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.startswith("[5] [2.] 0 "), done.stderr
    assert done.stderr.count("numba has no place to cache compiled loops") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_copy_of_a_warm_cache_is_used_below_a_read_only_root(read_only_package, tmp_path):
    """As docs/slurm-and-kubernetes.md says: the whole directory, copied to where files can be written."""
    done = first_loop(read_only_package, NUMBA_CACHE_DIR=str(tmp_path / "warm"))
    assert done.stdout.startswith("[5] [2.] 0 "), done.stderr
    shutil.copytree(tmp_path / "warm", tmp_path / "copy")
    files = sorted(tmp_path.joinpath("copy").rglob("*.nbc"))
    done = first_loop(read_only_package, NUMBA_CACHE_DIR=str(tmp_path / "copy"))
    assert done.stdout.startswith("[5] [2.] 1 "), done.stderr
    assert sorted(tmp_path.joinpath("copy").rglob("*.nbc")) == files
    assert "numba has no place" not in done.stderr
