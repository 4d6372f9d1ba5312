"""What ranks compare of the state that one of them saves for all: a digest for each name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from recckpt.dense.state_copy import Copy

log = logging.getLogger("recckpt")

_EVERY = 20  # saves, between two looks at what is large
_SMALL_BYTES = 1 << 20
_LARGE = 1  # in place of the digest of what this save does not look at
_SAMPLE_ROWS = 4096  # of the rows of a copy of a table, about
_TABLE = "table "  # before the name of a table, of which some ranks have copies


class RankDigests:
    """Digests of the state of one rank, taken while it is staged; one object for all saves of a saver.

    Small registered objects are looked at in every save, large ones and dense tensors in the first and every 20th; of
    the copies of a table other rows in every save.
    """

    def __init__(self) -> None:
        self._n_saves = 0
        self._known: set[str] = set()  # names whose difference was logged

    def begin(self) -> RankDigest:
        """Return what takes the digests of the next save."""
        self._n_saves += 1
        return RankDigest(self._known, self._n_saves)


class RankDigest:
    """The digests of one save."""

    def __init__(self, known: set[str], number: int) -> None:
        self._known, self._number, self._is_whole = known, number, number % _EVERY == 1
        self.by_name: dict[str, int] = {}

    def noting(self, copy: Copy) -> Copy:
        """Return a copy function that takes the digest of each state first."""

        def noted(place: tuple[Any, ...], state: Any) -> Any:
            name = " ".join([*map(str, place[:-1]), repr(place[-1])])
            is_dense = place[0] == "dense"
            if name not in self._known and (self._is_whole or (not is_dense and _n_bytes(state) <= _SMALL_BYTES)):
                self.by_name[name] = digest(state)
            elif name not in self._known and not is_dense:
                self.by_name[name] = _LARGE
            return copy(place, state)

        return noted

    def note_rows(self, table: str, first: int, slots: Mapping[str, Tensor], *, audit: int) -> None:
        """Take the digest of some rows of a copy; of all of them at each ``audit``-th save, if that is not 0.

        Args:
            table: of which other ranks have the same rows.
            first: number of the first row.
            slots: of one or more rows each.
            audit: as of :func:`recckpt.live.live_tables`.
        """
        n_rows = len(next(iter(slots.values())))
        name = f"{_TABLE}{table!r} from row {first} to {first + n_rows - 1}"
        if name not in self._known:
            is_all = audit and self._number % audit == 0
            step = 1 if is_all else max(1, n_rows // _SAMPLE_ROWS)
            self.by_name[name] = digest({slot: values[self._number % step :: step] for slot, values in slots.items()})

    @property
    def summary(self) -> int:
        """What is compared first: equal where all digests are."""
        return xxhash.xxh3_64_intdigest(repr(sorted(self.by_name.items())).encode())

    def warn(self, ranks: Sequence[Mapping[str, int]], own: int) -> None:
        """Log each name that differs between the ranks, once and on rank 0. Collective."""
        for name in sorted({name for digests in ranks for name in digests}):
            those = {
                rank: digests.get(name) for rank, digests in enumerate(ranks) if name in digests or not _is_copy(name)
            }
            first = next(iter(those.values()))
            others = [rank for rank, of_rank in those.items() if of_rank != first]
            if others and name not in self._known:
                self._known.add(name)
                if own == 0:
                    log.warning("%s", _difference(name, others, is_saved=first is not None))


def _is_copy(name: str) -> bool:
    """Say whether a name is of rows of a table, which some ranks may have."""
    return name.startswith(_TABLE)


def digest(state: Any) -> int:
    """Return a hash of a state; 0 for one that a save refuses."""
    hasher = xxhash.xxh3_64()
    try:
        _feed(hasher, state)
    except Exception:  # the save refuses it by name
        return 0
    return hasher.intdigest()


def _difference(name: str, others: Sequence[int], *, is_saved: bool) -> str:
    ranks = (
        f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:5]))}{', ...' if len(others) > 5 else ''}"
    )
    if not is_saved:
        return f"{name} is known to {ranks} and not to rank 0, and is not saved: let all ranks have it"
    if _is_copy(name):
        return (
            f"{name} differs on {ranks} from the other copies, and a part is saved of each: keep the copies equal, as "
            "DistributedDataParallel does, but not with max_norm"
        )
    mend = "register it with per_rank=True" if not name.startswith("dense ") else "keep it equal on all ranks"
    kept = "the state of rank 0 is saved, and all ranks get it back"
    return f"{name} differs on {ranks}: {kept}; if that is not meant, {mend}"


def _feed(hasher: Any, value: Any) -> None:
    hasher.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        hasher.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        hasher.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(str(len(value)).encode())
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(str(len(value)).encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(repr(sorted(value, key=repr) if isinstance(value, set) else value).encode())


def _n_bytes(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_n_bytes, value.values()))
    return sum(map(_n_bytes, value)) if isinstance(value, list | tuple) else 0
