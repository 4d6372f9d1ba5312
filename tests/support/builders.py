"""What the tests of the upper half are built from: a small model, a run of it, and its state as bytes."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recckpt import CheckpointManager, Saver
from recckpt.sparse import (
    HashTable,
    Normal,
    Slice,
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from support.devices import here

OPTIMIZERS: dict[str, Callable[[list[HashTable]], torch.optim.Optimizer]] = {
    "sgd": lambda tables: SparseSGD(tables, lr=0.05),
    "adagrad": lambda tables: SparseAdagrad(tables, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rowwise_adagrad": lambda tables: SparseRowWiseAdagrad(tables, lr=0.05),
    "adam": lambda tables: SparseAdam(tables, lr=0.01),
    "adamw": lambda tables: SparseAdamW(tables, lr=0.01),
    "adamw_tf": lambda tables: SparseAdamWTF(tables, lr=0.01, weight_decay=1e-4),
}


class ClickModel(nn.Module):
    """Two tables, of which one starts its rows by torch's RNG, and a dense part with buffers and dropout."""

    def __init__(self, dim: int = 4, slice: Slice | None = None) -> None:
        super().__init__()
        self.users = HashTable(dim, name="user/1", initializer=Normal(0.0, 0.1), slice=slice)
        self.items = HashTable((dim,), name="item", initializer=nn.init.normal_, slice=slice)
        self.norm = nn.BatchNorm1d(2 * dim)
        self.top = nn.Linear(2 * dim, 1)
        self.drop = nn.Dropout(0.1)

    @property
    def tables(self) -> list[HashTable]:
        return [self.users, self.items]

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        x = torch.cat([self.users(users), self.items(items)], -1)
        return self.top(self.drop(self.norm(x))).squeeze(-1)


class Stream:
    """A dataset that knows its position."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.position)
        self.position += 1
        return torch.randint(-40, 40, (16,), generator=draw), torch.randint(0, 200, (16,), generator=draw)

    def dump_io_state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_io_state(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Run:
    """A training run: all that a process of it holds."""

    lies_in_place = False  # whether a restore that fails late may leave tables half written, and says so

    def __init__(
        self,
        url: Path | str,
        interval: int = 10,
        max_keep: int | None = 1,
        optimizer: str = "adamw",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.seed(seed)
        self.model = ClickModel().to(here())
        self.sparse = OPTIMIZERS[optimizer](self.model.tables)
        self.dense = torch.optim.Adam([*self.model.norm.parameters(), *self.model.top.parameters()], lr=0.01)
        self.stream = Stream()
        self.saver = Saver(self.model, self.sparse, str(url), max_keep=max_keep, concurrency=2, **options)
        self.saver.register_for_checkpointing("dense_optim", self.dense)
        self.saver.register_io_state("stream", self.stream)
        self.manager = CheckpointManager(self.saver, interval)

    @staticmethod
    def seed(seed: int) -> None:
        """Begin all random numbers of the process anew."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def change(self, items: Tensor) -> None:
        """Let ids leave, which may come back later."""
        self.model.items.erase(items[:8])

    def train(self, n_steps: int) -> "Run":
        for _ in range(n_steps):
            device = self.model.top.weight.device
            users, items = (ids.to(device) for ids in self.stream.next())
            noise = torch.randn(16, device=device) + float(np.random.randn()) + random.random()
            loss = (self.model(users, items) - noise).pow(2).mean()
            self.dense.zero_grad()
            self.sparse.zero_grad()
            loss.backward()
            self.dense.step()
            self.sparse.step()
            if self.stream.position % 7 == 0:
                self.change(items)
            self.manager.step()
        return self


def state_of(run: Run) -> dict[str, Any]:
    """Return everything that decides how a run goes on, as data that compares bit for bit."""
    kind, keys, *rest = np.random.get_state()
    return {
        **{table.name: table_state(table) for table in run.model.tables},
        "dense": {k: bits(v) for k, v in run.model.state_dict().items() if isinstance(v, Tensor)},
        "dense optimizer": frozen(run.dense.state_dict()),
        "sparse optimizer": frozen(run.sparse.state_dict()),
        "position": run.stream.position,
        "step": run.manager.global_step,
        "rng": (bits(torch.get_rng_state()), kind, keys.tobytes(), rest, random.getstate()),
    }


def table_state(table: HashTable) -> dict[str, bytes]:
    """Return the rows of a table in the order of their ids, as bytes."""
    order = torch.argsort(table.ids())
    columns = {"id": table.ids(), "embedding": table.embeddings(), **table.slots}
    return {name: bits(column.cpu()[order]) for name, column in columns.items()}


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def frozen(value: Any) -> Any:
    """Return nested state with its tensors as bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def tree(root: Path) -> dict[str, bytes | None]:
    """Return all names below a directory, with the bytes of the files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def checkpoints(root: Path) -> list[str]:
    """Return the directories that hold a manifest."""
    return sorted(path.parent.name for path in root.glob("*/manifest.json"))


def flip_bit(path: Path, offset: int | None = None) -> None:
    """Damage one bit in the middle of a file, or at an offset."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)
