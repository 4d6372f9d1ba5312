"""Threads of a fork, and torch's pool of threads."""

import threading

import torch
from support.in_fork import in_fork

from recckpt.parallel.threads import run_all


def test_a_fork_makes_the_pool_of_torch_once_before_its_threads_compute(monkeypatch):
    calls = []
    real = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: calls.append((n, threading.active_count())) or real(n))

    def work():
        sums = [run_all(lambda n: int(torch.full((100_000,), n).sum()), range(3), 2) for _ in range(2)]
        return sums, calls

    alone = (torch.get_num_threads(), 1)
    assert in_fork(work) == str(([[0, 100_000, 200_000]] * 2, [alone]))


def test_the_process_itself_keeps_its_pool(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", None)
    assert run_all(lambda n: n, range(3), 2) == [0, 1, 2]
