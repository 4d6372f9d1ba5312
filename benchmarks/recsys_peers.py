"""A recommender that trains on skewed ids, and the ways to save it: ours, torch's, safetensors' and TorchRec's."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from pause_peers import Dcp, join_alone
from peers import THREADS
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from recckpt import CheckpointManager, Deltas, Near, Saver
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdam, SparseSGD

OPTIMIZERS = (SparseSGD, SparseAdagrad, SparseAdam)  # by their slots of a row's width
_FEATURES = 8  # of a sample
_NEVER = 10**9  # steps


def skewed_ranks(count: int, rows: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Return ranks from 0 to ``rows - 1``, by Zipf: the k-th comes k to the power of ``-exponent`` as often."""
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if abs(exponent - 1) < 1e-9:
        drawn = (rows + 1.0) ** u
    else:
        drawn = (1 + u * ((rows + 1.0) ** (1 - exponent) - 1)) ** (1 / (1 - exponent))
    return (drawn.long() - 1).clamp_(0, rows - 1)


class Model:
    """A table, empty unless it is filled, a small network over it, and the optimizers of both."""

    def __init__(self, width: int, slots: int) -> None:
        self.table = HashTable(width, name="item")
        self.top = nn.Sequential(nn.Linear(_FEATURES * width, 256), nn.ReLU(), nn.Linear(256, 1))
        self.all = nn.ModuleDict({"item": self.table, "top": self.top})
        self.sparse_optim = OPTIMIZERS[slots]([self.table], lr=0.01)
        self.dense_optim = torch.optim.Adagrad(self.top.parameters(), lr=0.01)

    def saver(self, output_dir: Path, **options: Any) -> Saver:
        """Return what saves all of it."""
        saver = Saver(self.all, self.sparse_optim, str(output_dir), **options)
        saver.register_for_checkpointing("dense_optim", self.dense_optim)
        return saver


class Workload:
    """A model of so many rows in training.

    Args:
        rows: of the table.
        width: float32 values of a row.
        slots: of the optimizer, each as wide: 0, 1 or 2.
        zipf: exponent of the ids; 0 for ids that all come as often.
        samples: of a step, of 8 ids each.
    """

    def __init__(self, rows: int, width: int, slots: int, zipf: float, samples: int) -> None:
        self.rows, self.width, self.slots, self.zipf, self._samples = rows, width, slots, zipf, samples
        self._generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=self._generator)
        self._changed = torch.zeros(rows, dtype=torch.bool)
        self.model = Model(width, slots)
        self.model.table.reserve(rows)
        for ids in torch.split(self._ids, 100_000):
            self.model.table.insert(ids, torch.rand(len(ids), width, generator=self._generator))

    def step(self) -> None:
        """Train on the next batch."""
        ranks = skewed_ranks(self._samples * _FEATURES, self.rows, self.zipf, self._generator)
        self._changed[ranks] = True
        rows = self.model.table(self._ids[ranks].view(self._samples, _FEATURES))
        self.model.top(rows.flatten(1)).square().mean().backward()
        for optimizer in (self.model.sparse_optim, self.model.dense_optim):
            optimizer.step()
            optimizer.zero_grad()

    def begin_to_count(self) -> None:
        """Count from now on which rows change."""
        self._changed.zero_()

    @property
    def changed(self) -> float:
        """The share of the rows that have changed since."""
        return float(self._changed.float().mean())

    def tensors(self) -> dict[str, Tensor]:
        """Return the live state as plain tensors, without a copy: a table lies in blocks."""
        store = self.model.table.store
        columns = {"id": store.ids, **store.columns}
        pieces = {
            f"{name}.{number}": piece
            for name, column in columns.items()
            for number, piece in enumerate(column.pieces(0, self.rows))
        }
        return {**pieces, **{name: parameter.detach() for name, parameter in self.model.top.named_parameters()}}


class Way(Protocol):
    """A way to save a run, in a directory of its own; made anew for each measure."""

    def prepare(self) -> None:
        """Do what a run does once: a first save, which starts threads and touches the memory that is kept."""

    def save(self) -> Future[Any]:
        """Begin a save and return when training may go on; the future is done when a restore finds it."""

    def restore(self) -> Callable[[], object]:
        """Make what is to be filled, and return what fills it."""

    def close(self) -> None:
        """Drop memory, threads and processes."""


class Recckpt:
    """Ours: whole, in the background."""

    def __init__(self, work: Workload, root: Path) -> None:
        self._work, self._root = work, root
        self._saver = work.model.saver(root, max_keep=2, **self._more())
        self._waits = ThreadPoolExecutor(1)

    def _more(self) -> dict[str, Any]:
        return {}

    def prepare(self) -> None:
        """Save in full."""
        self._saver.save("a-0", step=1)

    def save(self) -> Future[Any]:
        """Begin a save."""
        return self._saver.save_async("a-1", step=2).committed

    def restore(self) -> Callable[[], object]:
        """Restore to a model without rows: its index of ids is made, too."""
        self._saver.close()
        fresh = Model(self._work.width, self._work.slots)
        manager = CheckpointManager(fresh.saver(self._root, max_keep=2, **self._more()), _NEVER)
        self._close_restored = manager.close
        return manager.restore

    def close(self) -> None:
        """End both savers."""
        self._close_restored()
        self._waits.shutdown()


class RecckptDelta(Recckpt):
    """Ours: what has changed since a full save."""

    def _more(self) -> dict[str, Any]:
        return {"deltas": Deltas(full_every=999, max_chain_bytes=999.0, max_dirty=1.0)}


class RecckptNear(RecckptDelta):
    """Ours: the same, as a near save, which the death of a process leaves, and that of its host does not."""

    def _more(self) -> dict[str, Any]:
        return {**super()._more(), "near": Near(self._root.with_name("near"), interval=_NEVER)}

    def save(self) -> Future[Any]:
        """Begin a near save."""
        near = self._saver.near_saves
        assert near is not None
        assert near.begin(0, 1, 2, {"global_step": 2})
        return self._waits.submit(near.settle)


class Plain(ABC):
    """Of the others: the live memory of the table as plain tensors, to which a restore copies, without an index."""

    def __init__(self, work: Workload, root: Path) -> None:
        self._work, self._root = work, root

    def prepare(self) -> None:
        """Save once."""
        self.save().result()
        shutil.rmtree(self._root)

    def save(self) -> Future[Any]:
        """Save, while training waits."""
        self._root.mkdir()
        done: Future[Any] = Future()
        self._write(self._work.tensors())
        done.set_result(None)
        return done

    def restore(self) -> Callable[[], object]:
        """Fill tensors that are there already, as those of a model."""
        targets = {name: torch.zeros_like(tensor) for name, tensor in self._work.tensors().items()}
        return lambda: self._read(targets)

    def close(self) -> None:
        """Drop what is large."""
        gc.collect()

    @abstractmethod
    def _write(self, tensors: dict[str, Tensor]) -> None:
        """Write all tensors."""

    @abstractmethod
    def _read(self, targets: dict[str, Tensor]) -> None:
        """Fill all tensors."""


class TorchSave(Plain):
    """``torch.save``."""

    def _write(self, tensors: dict[str, Tensor]) -> None:
        own = {name: tensor if _is_whole(tensor) else tensor.clone() for name, tensor in tensors.items()}
        torch.save(own, self._root / "model.pt")

    def _read(self, targets: dict[str, Tensor]) -> None:
        for name, tensor in torch.load(self._root / "model.pt", weights_only=True).items():
            targets[name].copy_(tensor)


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is all of its memory; of a view ``torch.save`` writes the rest, too."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


class Safetensors(Plain):
    """``safetensors.torch.save_file``."""

    def _write(self, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        save_file(tensors, self._root / "model.safetensors")

    def _read(self, targets: dict[str, Tensor]) -> None:
        from safetensors.torch import load_file

        for name, tensor in load_file(self._root / "model.safetensors").items():
            targets[name].copy_(tensor)


class DcpSync(Plain):
    """``torch.distributed.checkpoint.save``."""

    def _write(self, tensors: dict[str, Tensor]) -> None:
        writer = filesystem.FileSystemWriter(
            self._root, thread_count=THREADS, single_file_per_rank=False, sync_files=False
        )
        state_dict_saver.save(tensors, storage_writer=writer, no_dist=True)

    def _read(self, targets: dict[str, Tensor]) -> None:
        state_dict_loader.load(targets, storage_reader=filesystem.FileSystemReader(self._root), no_dist=True)


class DcpAsync(DcpSync):
    """``torch.distributed.checkpoint.async_save`` by a thread, which copies all first, to buffers that are kept."""

    def __init__(self, work: Workload, root: Path) -> None:
        super().__init__(work, root)
        self._dcp = Dcp(work, AsyncCheckpointerType.THREAD, kept=True)

    def save(self) -> Future[Any]:
        """Copy, and begin to write."""
        return self._dcp.save(self._root)

    def close(self) -> None:
        """Drop the buffers."""
        self._dcp.close()


class TorchRec(DcpSync):
    """TorchRec's tables of the same shape, by the state dict of the model and that of its fused optimizer, with DCP."""

    def __init__(self, work: Workload, root: Path) -> None:
        super().__init__(work, root)
        self._state = torchrec_state(work.rows, work.width, work.slots)

    def save(self) -> Future[Any]:
        """Save, while training waits."""
        self._root.mkdir()
        done: Future[Any] = Future()
        self._write(self._state)
        done.set_result(None)
        return done

    def restore(self) -> Callable[[], object]:
        """Fill the tables that are there."""
        return lambda: self._read(self._state)


def torchrec_state(rows: int, width: int, slots: int) -> dict[str, Any]:
    """Return the state dicts of a table of TorchRec on one rank, and of its optimizer with so many slots."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    if not distributed.is_initialized():
        join_alone()
    config = EmbeddingBagConfig(num_embeddings=rows, embedding_dim=width, name="item", feature_names=["item"])
    bags = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    optimizer = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)[slots]
    apply_optimizer_in_backward(optimizer, bags.parameters(), {"lr": 0.01})
    sharder = EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    model = DistributedModelParallel(
        bags,
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=planner.plan(bags, [sharder]),
        sharders=[sharder],
    )
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


WAYS: dict[str, Callable[[Workload, Path], Way]] = {
    "recckpt full": Recckpt,
    "recckpt delta": RecckptDelta,
    "recckpt near": RecckptNear,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": DcpSync,
    "dcp async": DcpAsync,
    "torchrec, dcp": TorchRec,
}
NEEDS = {"safetensors": "safetensors", "torchrec, dcp": "torchrec"}


def lacking(way: str) -> str | None:
    """Return the package that a way needs and that is not installed, if there is one."""
    package = NEEDS.get(way)
    return package if package and importlib.util.find_spec(package) is None else None
