"""A job on several hosts, each a near dir and some processes, that trains what one process could, too."""

import hashlib
import json
import os
import signal
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from recckpt import CheckpointManager, Deltas, Near, Saver
from recckpt.sparse import HashTable, SparseAdam, gen_slice
from support.rank_processes import whole_life

DIM, BATCH, N_IDS = 4, 64, 500
NEAR_EVERY, SAVE_EVERY = 5, 50
DELTAS = Deltas(max_dirty=1.0, max_chain_bytes=3.0)
TIMEOUT_SEC = 4.0  # of a near save; a host that is stopped for longer ends them for its job


class Training:
    """A table of which each rank has a slice, and a dense tower that all ranks train alike.

    A row is trained by what it holds and the step alone, and so is the tower: any number of ranks gives the same bits.
    """

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.table = HashTable(DIM, name="item", slice=gen_slice(rank, size))
        self.tower = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.model = nn.ModuleDict({"item": self.table, "tower": self.tower})
        self.sparse, self.dense = SparseAdam(self.table, lr=0.1), torch.optim.Adam(self.tower.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        """Train a batch, which the number of the step draws."""
        drawn = torch.Generator().manual_seed(step)
        ids = (torch.rand(BATCH, generator=drawn) ** 3 * N_IDS).long()
        features, labels = torch.rand(BATCH, DIM, generator=drawn), torch.rand(BATCH, 1, generator=drawn)
        own = ids.unique()
        own = own[self.table.slice.owns(own)]
        loss = ((self.table(own) - step % 7) ** 2).sum() + mse_loss(self.tower(features), labels)
        self.sparse.zero_grad()
        self.dense.zero_grad()
        loss.backward()
        self.sparse.step()
        self.dense.step()

    def digest(self) -> int:
        """Return a number of all rows that are here; those of all ranks, added, are that of one rank."""
        n_rows, slots = len(self.table), [self.table.slots[name] for name in sorted(self.table.slots)]
        values = [
            value.double().reshape(n_rows, value.shape[1:].numel()) for value in (self.table.embeddings(), *slots)
        ]
        rows = torch.cat(values, dim=1)
        by_id = zip(self.table.ids().tolist(), rows.tolist(), strict=True)
        return sum(_number(struct.pack(f"q{len(row)}d", id_, *row)) for id_, row in by_id) % 2**64

    def dense_digest(self) -> int:
        """Return a number of the tower and its optimizer, which all ranks have alike."""
        states = [value for state in self.dense.state.values() for _, value in sorted(state.items())]
        return _number(b"".join(value.detach().numpy().tobytes() for value in [*self.tower.parameters(), *states]))


def be_rank(root: Path, name: str, rank: int, size: int, port: int, host: str, copies: int) -> None:
    """Train as one rank until this process is killed; ``root/name/RANK.log`` says what became of it, line by line."""
    with whole_life(), (root / name / f"{rank}.log").open("w", buffering=1) as log:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=30), world_size=size, rank=rank
        )
        training = Training(rank, size)
        near = Near(root / "hosts" / host, NEAR_EVERY, copies=copies, timeout_sec=TIMEOUT_SEC)
        saver = Saver(training.model, training.sparse, str(root / "runs"), max_keep=2, deltas=DELTAS, near=near)
        manager = CheckpointManager(saver, SAVE_EVERY)
        manager.register_for_checkpointing("dense", training.dense)
        step = manager.restore()
        log.write(json.dumps({"restored": step, "rows": training.digest(), "dense": training.dense_digest()}) + "\n")
        begun: list[int] = []
        while True:
            step = manager.global_step + 1
            training.step(step)
            torch.distributed.all_reduce(torch.zeros(1))  # as training does, which a rank that hangs holds up
            before = manager.counts
            manager.step()
            after = manager.counts
            if step % NEAR_EVERY == 0 and (before.begun, before.near_skipped) == (after.begun, after.near_skipped):
                begun.append(step)
            n_files = len(list(Path("/proc/self/fd").iterdir()))
            acknowledged = begun[after.near + after.near_failed - 1] if after.near > before.near else None
            line = {"step": step, "near": acknowledged, "saved": after.begun > before.begun, "fds": n_files}
            log.write(json.dumps(line) + "\n")


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Life:
    """The processes of one job, from its start to its end.

    Args:
        root: of the run.
        number: of this life.
        hosts: the names of its hosts.
        ranks: how many ranks each of them has.
        copies: of near saves, on how many other hosts.
    """

    def __init__(self, root: Path, number: int, hosts: list[str], ranks: int, copies: int) -> None:
        self.root, self.name, self.hosts = root, f"life-{number}", hosts
        (root / self.name).mkdir()
        places = [host for host in hosts for _ in range(ranks)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pids: dict[int, tuple[str, int]] = {}
        for rank, host in enumerate(places):
            pid = os.fork()
            if pid == 0:
                be_rank(root, self.name, rank, len(places), port, host, copies)
            self.pids[pid] = host, rank
        self.size = len(places)

    def log(self, rank: int) -> list[dict[str, int]]:
        """Return the whole lines that a rank has written so far."""
        path = self.root / self.name / f"{rank}.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_step(self, n_steps: int, seconds: float = 120) -> None:
        """Return once so many steps were made, or all have ended."""
        until = time.monotonic() + seconds
        while len(self.log(0)) <= n_steps and self.is_alive():
            assert time.monotonic() < until, f"{self.name}: {n_steps} steps took more than {seconds} s"
            time.sleep(0.02)

    def is_alive(self) -> bool:
        """Say whether a process is left, and note those that are not."""
        for pid in list(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[pid]
        return bool(self.pids)

    def signal(self, number: int, host: str | None = None) -> None:
        """Send a signal to the processes of a host, or to all."""
        for pid, (of, _) in self.pids.items():
            if host in (None, of):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill what is left, and return once it is gone."""
        self.signal(signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.005)
