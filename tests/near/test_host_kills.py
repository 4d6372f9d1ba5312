"""Hosts of which one dies with all that it has, or all processes: what was acknowledged comes back."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from near.host_kills import HOSTS, begin, rows_at, train
from near.test_near_saves import rows
from near.test_ranks import on_hosts, together
from support.killed import killed_at
from support.rank_processes import run_script
from support.sweeps import HOST_STRIDE, SWEEP_STRIDE

SCRIPT = Path(__file__).with_name("host_kills.py")
N_AT_ONCE = 10 if SWEEP_STRIDE == 1 else 2  # jobs that a process runs, the last of which may run to their end


def check(root, hosts, number):
    """Restore on these hosts, and make near saves there again."""
    acknowledged = max((int(path.name.rpartition("-")[2]) for path in root.glob("acknowledged-*")), default=0)

    def restored(run):
        run.restore()
        own, step = rows(run), run.manager.global_step
        run.put(_9=9.0).step()
        assert run.counts[1:] == (0, 0)
        return step, own

    of_ranks = on_hosts(root, hosts, restored)
    ((step, _), *others) = of_ranks
    assert all(other == step for other, _ in others)
    assert step >= acknowledged, f"killed at {number}: step {acknowledged} was acknowledged, {step} came back"
    assert together(own for _, own in of_ranks) == rows_at(step), f"killed at {number}: step {step} is not what it was"
    assert not list(root.glob("*/recckpt-near/*/*/*/**/*.tmp")), f"killed at {number}: half of a file stays"


def life(root):
    """Train on two hosts whose ranks are threads of this process, a fork."""
    torch.set_num_threads(1)  # makes the pool of threads anew: two threads of a fork that do so fail in torch
    on_hosts(root, HOSTS[:2], lambda run: (begin(run), train(run, root)))


@pytest.mark.parametrize("numbers", [[400], pytest.param(range(60, 5000, SWEEP_STRIDE), marks=pytest.mark.slow)])
def test_a_death_of_all_processes_takes_nothing_that_was_acknowledged(tmp_path, numbers):
    for number in numbers:
        root = tmp_path / f"{number}"
        root.mkdir()
        was_killed = killed_at(number, lambda root=root: life(root))
        check(root, HOSTS[:2], number)
        shutil.rmtree(root)
        if not was_killed:
            break
    assert was_killed == (len(numbers) == 1)


def lost(root, victim, number):
    """Restore without the host that died; return whether its work has so many calls."""
    calls = root / "calls"
    was_killed = not calls.exists()
    codes = json.loads((root / "codes").read_text())
    assert codes == [-signal.SIGKILL if rank == victim and was_killed else 0 for rank in range(len(HOSTS))]
    shutil.rmtree(root / HOSTS[victim])
    check(root, [host for host in HOSTS if host != HOSTS[victim]], number)
    return was_killed or number < 2 * int(calls.read_text())  # a call that raises has no end to be killed at


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
def test_no_loss_of_a_host_takes_anything_that_was_acknowledged(tmp_path, victim):
    n_points, number = 0, victim * HOST_STRIDE // len(HOSTS)
    while True:
        numbers = range(number, number + N_AT_ONCE * HOST_STRIDE, HOST_STRIDE)
        run_script(SCRIPT, tmp_path, victim, *numbers)
        had_call = [lost(tmp_path / f"{each}", victim, each) for each in numbers]
        n_points += sum(had_call)
        if not all(had_call):
            break
        number = numbers[-1] + HOST_STRIDE
    assert n_points * HOST_STRIDE > 100
