"""The same rows as a table and as plain tensors, and everybody who can save them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from measuring import CHUNK
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_saver

from recckpt import Saver
from recckpt.sparse import HashTable

DIM = 64
THREADS = 2


class State:
    """The same rows as a table and as plain tensors."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        self.tensors: dict[str, Tensor] = {
            "ids": ids,
            "embedding": torch.rand(rows, DIM, generator=generator),
            "moment": torch.rand(rows, DIM, generator=generator),
        }
        self.model, _ = model_of(fill=self.tensors)
        self._savers: dict[Path, Saver] = {}
        self.n_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def saver(self, output_dir: Path) -> Saver:
        """Return one saver an output dir: its buffers live from save to save."""
        if output_dir not in self._savers:
            self._savers[output_dir] = Saver(self.model, output_dir=str(output_dir))
        return self._savers[output_dir]


def model_of(fill: dict[str, Tensor] | None = None) -> tuple[nn.Module, HashTable]:
    table = HashTable(DIM, name="item")
    table.add_slot("moment", (DIM,))
    if fill:
        table.reserve(len(fill["ids"]))
        for part in torch.split(torch.arange(len(fill["ids"])), 100_000):
            table.insert(fill["ids"][part], fill["embedding"][part], {"moment": fill["moment"][part]})
    return nn.ModuleDict({"item": table}), table


def save_recckpt(state: State, directory: Path, sync: bool) -> None:
    saver = state.saver(directory.parent)
    with nullcontext() if sync else unsynced():
        saver.save(directory.name)


def save_torch(state: State, directory: Path, sync: bool) -> None:
    torch.save(state.tensors, directory / "model.pt")
    sync_tree(directory, sync)


def save_dcp(state: State, directory: Path, sync: bool) -> None:
    writer = filesystem.FileSystemWriter(directory, thread_count=THREADS, single_file_per_rank=False, sync_files=sync)
    state_dict_saver.save(state.tensors, storage_writer=writer, no_dist=True)


def save_safetensors(state: State, directory: Path, sync: bool) -> None:
    save_file(state.tensors, directory / "model.safetensors")
    sync_tree(directory, sync)


def save_limit(state: State, directory: Path, sync: bool) -> None:
    """Plain writes of as many bytes, from as many threads as there are cores here."""
    block = memoryview(CHUNK)

    def write(number: int) -> None:
        fd, left = os.open(directory / str(number), os.O_CREAT | os.O_WRONLY), state.n_bytes // THREADS
        while left:
            left -= os.write(fd, block[: min(left, len(CHUNK))])
        if sync:
            os.fsync(fd)
        os.close(fd)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


PEERS: dict[str, Callable[[State, Path, bool], None]] = {
    "recckpt": save_recckpt,
    "torch.save": save_torch,
    "dcp": save_dcp,
    "safetensors": save_safetensors,
    "limit": save_limit,
}


@contextmanager
def unsynced() -> Iterator[None]:
    """Leave out every fsync, as the peers do by themselves."""
    with mock.patch("os.fsync", return_value=None):
        yield


def sync_tree(directory: Path, sync: bool) -> None:
    for path in [*directory.iterdir(), directory] if sync else []:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
