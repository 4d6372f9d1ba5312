"""The data of the examples: a click log that is read in a shuffled order, and knows where it is in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pyarrow import compute, csv
from torch import Tensor

FEATURES = ("user", "item", "context")

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class ClickLog:
    """Endless batches of a click log, each epoch in an order of its own.

    The order of an epoch is a function of (seed, epoch), so (seed, epoch, offset) is the whole position: what
    ``dump_io_state`` returns, a checkpoint keeps and ``load_io_state`` goes back to.

    Args:
        ids: int64, shape (clicks, features).
        labels: float32, shape (clicks,), 1 for a click.
        batch_size: clicks a batch; the last one of an epoch may be smaller.
        seed: another seed gives another order.
    """

    def __init__(self, ids: Int64s, labels: Float32s, batch_size: int, seed: int = 0) -> None:
        self.ids, self.labels, self.batch_size = ids, labels, batch_size
        self.seed, self.epoch, self.offset = seed, 0, 0
        self._order = self._shuffled()

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> ClickLog:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next (ids, labels), and move on before they are used: a save comes after the batch."""
        if self.offset >= len(self):
            self.epoch, self.offset = self.epoch + 1, 0
            self._order = self._shuffled()
        chosen = self._order[self.offset : self.offset + self.batch_size]
        self.offset += len(chosen)
        return torch.from_numpy(self.ids[chosen]), torch.from_numpy(self.labels[chosen])

    def dump_io_state(self) -> dict[str, int]:
        """Return the position."""
        return {"seed": self.seed, "epoch": self.epoch, "offset": self.offset, "clicks": len(self)}

    def load_io_state(self, state: dict[str, int]) -> None:
        """Go to a position, with the seed that it was taken at.

        Raises:
            ValueError: it is a position in another log.
        """
        if state["clicks"] != len(self):
            raise ValueError(f"a position in a log of {state['clicks']} clicks does not fit one of {len(self)}")
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]
        self._order = self._shuffled()

    def _shuffled(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self))


def generated_clicks(
    seed: int = 0, *, n_clicks: int = 200_000, n_users: int = 5_000, n_items: int = 20_000
) -> tuple[Int64s, Float32s]:
    """Return (ids, labels) of a made-up log: few users and items make most of it, and clicks follow taste.

    The taste of a user, the topic of an item and the hour of the week are planted, so there is something to learn.
    """
    rng = np.random.default_rng(seed)
    users, items, hours = _zipf(rng, n_users, n_clicks), _zipf(rng, n_items, n_clicks), rng.integers(168, size=n_clicks)
    taste, topic = rng.normal(size=(n_users, 4)), rng.normal(size=(n_items, 4))
    liking = rng.normal(size=n_users)[users] + rng.normal(size=n_items)[items]
    logits = liking + (taste[users] * topic[items]).sum(1) + np.sin(hours / 24 * 2 * np.pi) - 1
    labels = (rng.random(n_clicks) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    ids = np.stack([_hashed(rng, n_users)[users], _hashed(rng, n_items)[items], hours], axis=1)
    return ids, labels


def read_ratings(path: str) -> tuple[Int64s, Float32s]:
    """Return (ids, labels) of a MovieLens ``ratings.csv`` or ``ratings.csv.gz``: a rating of 4 or more is a click."""
    table = csv.read_csv(path)
    hours = compute.divide(table["timestamp"], 3600).to_numpy() % 168
    ids = np.stack([table["userId"].to_numpy(), table["movieId"].to_numpy(), hours], axis=1)
    labels: Any = table["rating"].to_numpy() >= 4
    return ids.astype(np.int64), labels.astype(np.float32)


def _zipf(rng: np.random.Generator, n: int, size: int) -> Int64s:
    """Draw from 0 to n - 1, the k-th as often as 1 / (k + 1)."""
    weights = 1 / np.arange(1, n + 1)
    return rng.choice(n, size=size, p=weights / weights.sum())


def _hashed(rng: np.random.Generator, n: int) -> Int64s:
    """Return n ids as a hash function would give them: anywhere in int64."""
    bounds = np.iinfo(np.int64)
    return rng.integers(bounds.min, bounds.max, size=n, endpoint=True)
