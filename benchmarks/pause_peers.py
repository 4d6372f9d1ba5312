"""One training run, and everybody who can save it while it goes on."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from peers import DIM, THREADS
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import _async_process_executor as dcp_process
from torch.distributed.checkpoint import filesystem, staging, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from recckpt import Deltas, Saver
from recckpt.checkpoint.attempt import Attempt
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable, SparseAdagrad
from recckpt.sparse.files.table_rows import StillTable, source_of
from recckpt.sparse.table.column import Column
from recckpt.storage import open_storage

_SAMPLES, _FEATURES = 1024, 8  # of a batch
_NEW = 0.01  # of the ids of a batch are new
_POOL = 512  # batches, made beforehand

# Here and not in main(): the process that DCP spawns imports this too, and says on the terminal each thing it does.
logging.disable(logging.INFO)
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class Training:
    """A table of 64 float32 with one slot of as many, an MLP over it, and a stream of skewed ids.

    The k-th most frequent id comes 1/k as often as the first.
    """

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        self.table = HashTable(DIM, name="item")
        self.top = nn.Sequential(nn.Linear(_FEATURES * DIM, 256), nn.ReLU(), nn.Linear(256, 1))
        self.model = nn.ModuleDict({"item": self.table, "top": self.top})
        self.sparse_optim = SparseAdagrad([self.table], lr=0.01, initial_accumulator_value=0.1)
        self._dense_optim = torch.optim.Adagrad(self.top.parameters(), lr=0.01)
        self._fill(generator)
        self._batches = self._endless(generator)
        self._n_new = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, id and slot included."""
        return sum(column.spec.row_bytes for column in (self.table.store.ids, *self.table.store.columns.values()))

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return len(self.table) * self.row_bytes

    def step(self) -> None:
        """Train on the next batch."""
        batch = next(self._batches)
        loss = self.top(self.table(batch).flatten(1)).square().mean()
        loss.backward()
        self.sparse_optim.step()
        self._dense_optim.step()
        self._dense_optim.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the live state as plain tensors, without a copy: a table lies in blocks."""
        store, n_rows = self.table.store, len(self.table)
        columns = {"id": store.ids, **store.columns}
        found = {
            f"{name}.{number}": piece
            for name, column in columns.items()
            for number, piece in enumerate(column.pieces(0, n_rows))
        }
        return {**found, **{name: parameter.detach() for name, parameter in self.top.named_parameters()}}

    def _fill(self, generator: torch.Generator) -> None:
        self.table.reserve(len(self.ids))
        values = torch.rand(100_000, DIM, generator=generator)
        for part in torch.split(self.ids, len(values)):
            self.table.insert(part, values[: len(part)], {"sparse_adagrad_sum": values[: len(part)]})

    def _endless(self, generator: torch.Generator) -> Iterator[Tensor]:
        shape = _SAMPLES, _FEATURES
        pool = [
            (len(self.ids) ** torch.rand(shape, generator=generator, dtype=torch.float64)).long() - 1
            for _ in range(_POOL)
        ]
        new = torch.rand(shape, generator=generator) < _NEW
        while True:
            for ranks in pool:
                batch = self.ids[ranks]
                batch[new] = torch.arange(self._n_new, self._n_new + int(new.sum()))
                self._n_new += int(new.sum())
                yield batch


class HasTensors(Protocol):
    """A training run."""

    def tensors(self) -> dict[str, Tensor]:
        """Return its live state as plain tensors, without a copy."""


class Peer(Protocol):
    """Saves a training run."""

    def warm_up(self, directory: Path) -> None:
        """Do what is done once in the life of a run: start processes, touch the memory that is kept."""

    def save(self, directory: Path) -> Future[Any]:
        """Begin a save and return when training may go on; the future is done when the files are complete."""

    def close(self) -> None:
        """Let go of memory and processes."""


class Recckpt:
    """Ours."""

    writers = 4  # what a saver has unless told otherwise

    def __init__(self, training: Training, root: Path) -> None:
        self._training = training
        self._saver = Saver(
            training.model, training.sparse_optim, output_dir=str(root), max_keep=None, concurrency=self.writers
        )

    def warm_up(self, directory: Path) -> None:
        """Save once, with training beside it."""
        committed = self.save(directory)
        while not committed.done():
            self._training.step()

    def save(self, directory: Path) -> Future[Any]:
        """Begin a save."""
        handle = self._saver.save_async(directory.name)
        self.info = handle.info
        return handle.committed

    def save_and_wait(self, directory: Path) -> None:
        """Save, and train meanwhile nothing."""
        self._saver.save(directory.name)

    def close(self) -> None:
        """Wait for a save that is under way."""
        self._saver.close()


class RecckptDeltas(Recckpt):
    """Ours, writing what has changed since the save before: about a hundred steps of training."""

    def __init__(self, training: Training, root: Path) -> None:
        self._training, self._root = training, root.with_name("deltas")
        only_deltas = Deltas(full_every=999, max_chain_bytes=999.0, max_dirty=1.0)
        self._saver = Saver(
            training.model,
            training.sparse_optim,
            output_dir=str(self._root),
            concurrency=self.writers,
            deltas=only_deltas,
        )

    def warm_up(self, directory: Path) -> None:
        """Save in full, and a delta on that."""
        super().warm_up(directory)
        super().warm_up(directory.with_name(f"{directory.name}-delta"))

    def close(self) -> None:
        """Remove the chain as well."""
        super().close()
        shutil.rmtree(self._root)


def join_alone() -> None:
    """Make a process group of this process alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


class Dcp:
    """``torch.distributed.checkpoint.async_save``, which copies all of the state first.

    Args:
        training: the run.
        kind: whether a thread or a process writes.
        kept: whether the stager, with the buffers it copies to, is kept from save to save; a process always has one,
            in shared memory.
    """

    def __init__(self, training: HasTensors, kind: AsyncCheckpointerType, kept: bool) -> None:
        self._training, self._kind = training, kind
        is_process = kind == AsyncCheckpointerType.PROCESS
        options = staging.StagingOptions(False, is_process, False, False)
        self._stager = staging.DefaultStager(options) if kept or is_process else None
        if is_process and not distributed.is_initialized():
            join_alone()

    def save(self, directory: Path) -> Future[Any]:
        """Copy, and begin to write."""
        return self._save(self._training.tensors(), directory)

    def warm_up(self, directory: Path) -> None:
        """Start the process, and touch the buffers where they are kept."""
        tensors = self._training.tensors() if self._stager else {"small": torch.zeros(1)}
        self._save(tensors, directory).result()

    def close(self) -> None:
        """End the process and let go of the buffers."""
        self._stager = None
        if dcp_process._CHECKPOINT_PROCESS is not None:
            dcp_process._CHECKPOINT_PROCESS = None  # it keeps the last state as long as it lives
        gc.collect()

    def _save(self, tensors: dict[str, Tensor], directory: Path) -> Future[Any]:
        writer = filesystem.FileSystemWriter(
            directory, thread_count=THREADS, single_file_per_rank=False, sync_files=False
        )
        response = state_dict_saver.async_save(
            tensors,
            storage_writer=writer,
            no_dist=True,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        return response if isinstance(response, Future) else response.upload_completion


class FullCopy:
    """Our own writers behind a copy of all rows."""

    def __init__(self, training: Training, reused: bool) -> None:
        self._table, self._reused = training.table, reused
        self._saver = SparseSaver(THREADS)
        self._columns: dict[str, Column] = {}
        self._writer = ThreadPoolExecutor(1)

    def warm_up(self, directory: Path) -> None:
        """Touch the buffers where they are kept."""
        if self._reused:
            self._copy()

    def save(self, directory: Path) -> Future[Any]:
        """Copy, and begin to write."""
        source = self._copy()
        storage = open_storage(str(directory))
        storage.prepare()
        shard = Attempt(storage, Intent("", 0, "", None)).shard(0, 1)
        return self._writer.submit(self._saver.save, [source], shard, lambda n_bytes: None)

    def close(self) -> None:
        """Let go of the buffers and the thread."""
        self._columns = {}
        self._writer.shutdown()

    def _copy(self) -> StillTable:
        live = source_of(self._table)
        assert isinstance(live.ids, Column)  # as of all tables but live ones
        columns = {"id": live.ids, **live.columns}
        copies = {
            name: self._columns.get(name) or Column(column.spec, column.device) for name, column in columns.items()
        }
        for name, column in columns.items():
            copies[name].reserve(live.n_rows)
            begin = 0
            for piece in column.pieces(0, live.n_rows):
                copies[name].write(begin, piece)
                begin += len(piece)
        if self._reused:
            self._columns = copies
        return StillTable(live.name, live.n_rows, copies.pop("id"), copies, live.n_rows)


PEERS: dict[str, Callable[[Training, Path], Peer]] = {
    "recckpt": Recckpt,
    "recckpt, deltas": RecckptDeltas,
    "dcp thread": lambda training, root: Dcp(training, AsyncCheckpointerType.THREAD, kept=False),
    "dcp thread, buffers kept": lambda training, root: Dcp(training, AsyncCheckpointerType.THREAD, kept=True),
    "dcp process": lambda training, root: Dcp(training, AsyncCheckpointerType.PROCESS, kept=True),
    "full copy, fresh": lambda training, root: FullCopy(training, reused=False),
    "full copy, reused": lambda training, root: FullCopy(training, reused=True),
}
