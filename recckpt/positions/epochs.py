"""Distributes epochs among ranks; if the number of ranks changes within an epoch, distributes the rest again.

Ranks do not communicate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.parallel.ranks import this_rank
from recckpt.types import flag, positive_int

log = logging.getLogger("recckpt")
Places: TypeAlias = npt.NDArray[np.int64]
State: TypeAlias = dict[str, Any]
MakeLoader: TypeAlias = Callable[[Any, Iterable[list[int]]], Iterable[Any]]
_INSTEAD = "or omit the position with 'exclude': ['io_state'], and the data begins anew"


@dataclass(frozen=True)
class _Deal:
    """The unused places of an epoch; a place is an index in the epoch's order.

    The share of rank r of n ranks is each n-th unused place, from the r-th on.
    """

    size: int  # number of places in the epoch
    epoch: int = 0
    left: Places = field(default_factory=lambda: np.empty(0, np.int64))  # unused places below ``begin``, ascending
    begin: int = 0  # all places from here on are unused

    def __len__(self) -> int:
        return len(self.left) + self.size - self.begin

    def share(self, rank: int, ranks: int) -> Places:
        """Return the unused places of a rank, in the order in which the rank uses them."""
        first = self.begin + (rank - len(self.left)) % ranks
        rest = np.arange(first, self.size, ranks, dtype=np.int64)
        return np.concatenate([self.left[rank::ranks], rest])

    def after(self, used: Sequence[int]) -> _Deal:
        """Return the unused places after rank r has used the first ``used[r]`` places of its share."""
        ranks, n_left, of_ranks = len(used), len(self.left), np.asarray(used, np.int64)
        low, high = (min(len(self), int(bound) * ranks) for bound in (of_ranks.min(), of_ranks.max()))
        between = np.arange(low, high, dtype=np.int64)  # all places before these are used, and all after these are not
        between = between[between // ranks >= of_ranks[between % ranks]]
        below, above = between[between < n_left], between[between >= n_left]
        left = np.concatenate([self.left[below], above - n_left + self.begin, self.left[high:]])
        return replace(self, left=left, begin=self.begin + max(0, high - n_left))


class Elastic:
    """A position in epochs of data: how the epoch is distributed among ranks, and how much this rank has used.

    Args:
        size: number of places in an epoch.
        unit: plural noun for the content of a place, for messages; such as "samples".
        names: one name per place, with which a load recognises other data; empty to compare only the number of places.
    """

    def __init__(
        self,
        size: int,
        unit: str,
        names: Sequence[str] = (),
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int | None,
        ranks: int | None,
    ) -> None:
        if type(seed) is not int or not 0 <= seed < 1 << 32:
            raise ValueError(f"seed must be an int from 0 to 2**32 - 1, found {seed!r}")
        self._shuffle, self._drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self._seed, self._unit, self._asked = seed, unit, (rank, ranks)
        self._names, self._content = names, _content_of(names)
        self._deal, self._used = _Deal(size), 0
        self._rank, self._ranks = self._this_rank()
        self._parts = dict[int, int]()  # partly used place -> number of used rows
        self._iterator = 0  # number of the newest iterator; all older iterators are invalid
        self._is_loaded = self._has_given = False  # in this epoch

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0."""
        return self._deal.epoch

    def dump_io_state(self) -> State:
        """Return the position of this rank, which is after the last batch that the iterator yielded."""
        rank, ranks = (self._rank, self._ranks) if self._iterator else self._this_rank()
        own = {"used": self._used, "rank": rank, "ranks": ranks, "parts": dict(self._parts)}
        order = {"shuffle": self._shuffle, "seed": self._seed, "content": self._content}
        return {**_as_state(self._deal), **own, **order}

    def load_io_state(self, state: State) -> None:
        """Continue from a position; existing iterators become invalid.

        Raises:
            ValueError: the position belongs to other data, or to another order of the data.
        """
        self._deal, now = self._checked(state), self._this_rank()
        self._used, self._rank, self._ranks = state["used"], state["rank"], state["ranks"]
        if self._ranks == now[1] and self._rank != now[0]:  # this rank saved no position, so its share comes again
            self._used, self._rank = 0, now[0]
        self._parts = dict(state["parts"])
        self._iterator, self._is_loaded, self._has_given = self._iterator + 1, True, False

    def merge_io_state(self, states: Sequence[State], index: int, count: int) -> State:
        """Return the position of rank ``index`` of ``count`` new ranks, from the positions of the ranks that saved.

        Places that a saved position counts as used do not come again, with two exceptions: the share of a rank whose
        state is missing; and, with a warning, places used by ranks that were in a later epoch than others.
        """
        for state in states:
            _check_kind(state)
        first = min(states, key=lambda state: int(state["epoch"]))
        here = {state["rank"]: state for state in states if state["epoch"] == first["epoch"]}
        ahead = {state["rank"]: state for state in states if state["rank"] not in here}
        deal = _deal_of(first)
        if index == 0 and (n_epochs := max((state["epoch"] - first["epoch"] for state in ahead.values()), default=0)):
            again = sum(state["used"] for state in ahead.values())
            whole = f", and {n_epochs - 1} whole epochs of theirs" if n_epochs > 1 else ""
            if again or whole:
                what = "ranks %s were ahead of epoch %s: %s %s%s come again"
                log.warning(what, sorted(ahead), first["epoch"], again, self._unit, whole)
        used = {**dict.fromkeys(ahead, len(deal)), **{rank: state["used"] for rank, state in here.items()}}
        deal = deal.after([used.get(rank, 0) for rank in range(first["ranks"])])
        parts = dict[int, int]()  # a rank's state also has parts of other ranks, from when the places were distributed
        for place, rows in (part for state in here.values() for part in state["parts"].items()):
            parts[place] = max(rows, parts.get(place, 0))
        return {**first, **_as_state(deal), "used": 0, "rank": index, "ranks": count, "parts": parts}

    def _checked(self, state: State) -> _Deal:
        """Check that a position fits this data and order; return its unused places, with data that was added since."""
        _check_kind(state)
        size, now = int(state["size"]), self._deal.size
        of_order = {name: state[name] for name in ("shuffle", "seed")}
        own = {"shuffle": self._shuffle, "seed": self._seed}
        if of_order != own:
            raise ValueError(
                f"the position is in another order: found {of_order}, expected {own}: use the same order, {_INSTEAD}"
            )
        if size > now or (self._shuffle and size != now):
            more = "" if self._shuffle else " or more"
            raise ValueError(
                f"the position is in other data: found {size} {self._unit}, expected {now}{more}: use that, {_INSTEAD}"
            )
        if state["content"] != _content_of(self._names[:size]):
            raise ValueError(
                f"the position is in other data: the first {size} {self._unit} differ: use the same data, {_INSTEAD}"
            )
        return replace(_deal_of(state), size=now)

    def _this_rank(self) -> tuple[int, int]:
        """Return the present (rank, number of ranks); ValueError if the arguments of the constructor are invalid."""
        try:
            return this_rank(*self._asked)
        except ValueError as error:
            if self._asked == (None, None):
                raise
            rank, ranks = self._asked
            raise ValueError(f"pass both rank and ranks, rank 0 to ranks - 1, found {rank=}, {ranks=}") from error

    def _order(self, epoch: int) -> Places | None:
        """Return the index in the data of each place of an epoch; None if both are equal because nothing is shuffled.

        Uses ``RandomState``, because its numbers are the same in all versions of numpy.
        """
        return np.random.RandomState([self._seed, epoch]).permutation(self._deal.size) if self._shuffle else None

    def _begun(self) -> int:
        """Begin an iterator and return its number.

        It continues the present epoch if the position was just loaded; if an iterator has given batches, it begins the
        next epoch.
        """
        now = self._this_rank()
        if self._is_loaded and not self._has_given and now != (self._rank, self._ranks):
            raise RuntimeError(
                f"the position was loaded for rank {self._rank} of {self._ranks}, but this is rank {now[0]} of "
                f"{now[1]}: call init_process_group before restore(), and pass the manager's rank= and ranks="
            )
        if self._has_given:
            self._end(self._iterator)
        self._rank, self._ranks = now
        self._iterator += 1
        return self._iterator

    def _iterator_of(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator of a loader without using the global random state.

        A resumed run makes one more iterator than an uninterrupted run, so the two would draw different numbers.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            place = [self._seed, self.epoch, self._rank, self._used]
            torch.default_generator.manual_seed(int(np.random.RandomState(place).randint(1 << 31)))  # seeds the workers
            with torch.device("cpu"):  # the loader draws on the CPU, whatever the default device is
                return iter(loader)

    def _check_share(self, n_own: int) -> None:
        """Raise RuntimeError if this rank gets no batch of a whole epoch: a loop over epochs would never end."""
        if not n_own and not (self._is_loaded or self._has_given):
            raise RuntimeError(
                f"rank {self._rank} of {self._ranks} gets no batch of an epoch of {self._deal.size} {self._unit}: use "
                "fewer ranks, or smaller batches, or drop_last=False"
            )

    def _give(self, iterator: int, used: int) -> None:
        """Set how many places of its share this rank has used; called before a batch is yielded.

        Raises:
            RuntimeError: another iterator was begun, or a position was loaded, after this iterator was begun.
        """
        if iterator != self._iterator:
            raise RuntimeError(
                "this iterator is over: another one was begun, or a position was loaded, since it was made: call "
                "restore() before iter(), and use one iterator at a time"
            )
        self._used, self._has_given = used, True

    def _end(self, iterator: int) -> None:
        """Go to the next epoch, unless a newer iterator was begun."""
        if iterator == self._iterator:
            self._deal, self._used, self._parts = _Deal(self._deal.size, self.epoch + 1), 0, {}
            self._is_loaded = self._has_given = False


def _as_state(deal: _Deal) -> State:
    return {"size": deal.size, "epoch": deal.epoch, "left": deal.left, "begin": deal.begin}


def _deal_of(state: State) -> _Deal:
    return _Deal(int(state["size"]), int(state["epoch"]), np.asarray(state["left"], np.int64), int(state["begin"]))


def _check_kind(state: State) -> None:
    if not isinstance(state, dict) or not {"size", "used", "ranks", "content"} <= state.keys():
        raise ValueError(f"the position belongs to an object of another kind: use that kind, {_INSTEAD}")


def _content_of(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(names).encode())


class _Batches:
    """A batch sampler: yields the sample indices of each batch of the newest iterator."""

    def __init__(self) -> None:
        self._batches: Sequence[Places] = ()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches)

    def begin(self, batches: Sequence[Places]) -> Sequence[Places]:
        self._batches = batches
        return batches


class ElasticLoader(Elastic):
    """Batches of a map-style dataset, distributed among ranks; its position can be restored on any number of ranks.

    Each ``for`` runs one epoch; after a restore, the first ``for`` runs the rest of the saved epoch. Not thread-safe.
    Not collective.

    Args:
        dataset: has ``len()`` and returns a sample by index.
        batch_size: samples per batch, per rank.
        shuffle: whether to shuffle the samples anew for each epoch; takes 8 bytes per sample on each rank.
        seed: seed of the shuffling.
        drop_last: whether all ranks get equally many batches, all full; the epoch then omits the remaining samples.
            If False, the epoch has all samples, and one rank may get one batch more than another.
        loader: function (dataset, batch sampler) -> iterable of batches in the order of the batch sampler, such as
            ``lambda data, batches: DataLoader(data, batch_sampler=batches, num_workers=8)``; None for a
            :class:`torch.utils.data.DataLoader` without workers.
        rank: rank of this process; None for its rank in the process group.
        ranks: number of ranks; None for the size of the process group.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        loader: MakeLoader | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            kind = type(dataset).__name__
            raise ValueError(
                f"dataset must have len(), found a {kind}: pass an iterable one of Hugging Face to ElasticShards; any "
                "other keeps its own position"
            )
        if not len(dataset):
            raise ValueError("dataset is empty")
        size = len(dataset)
        super().__init__(size, "samples", shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks)
        self._batch_size, self._batches = positive_int("batch_size", batch_size), _Batches()
        self._loader = (loader or _plain_loader)(dataset, self._batches)
        if not getattr(self._loader, "in_order", True):
            raise ValueError("loader: it yields batches out of order (in_order=False), so the used samples are unknown")

    def __len__(self) -> int:
        """Return how many batches this rank gets in the next ``for``."""
        is_new = self._has_given
        share = self._share(
            _Deal(self._deal.size) if is_new else self._deal, self._this_rank(), 0 if is_new else self._used
        )
        return (len(share) + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        iterator, size = self._begun(), self._batch_size
        share, order = self._share(self._deal, (self._rank, self._ranks), self._used), self._order(self.epoch)
        self._check_share(len(share))
        samples = share if order is None else order[share]
        batches = self._batches.begin([samples[first : first + size] for first in range(0, len(samples), size)])
        used, n_batches = self._used, 0
        for batch in self._iterator_of(self._loader):
            if n_batches == len(batches):
                raise RuntimeError(f"loader: it yields more than the {n_batches} batches of its batch sampler")
            used += len(batches[n_batches])
            n_batches += 1
            self._give(iterator, used)  # before the step trains on the batch, so that a save in the step includes it
            yield batch
        if n_batches != len(batches):
            raise RuntimeError(
                f"loader: it yielded {n_batches} batches, expected {len(batches)}, as its batch sampler has"
            )
        self._end(iterator)

    def _share(self, deal: _Deal, now: tuple[int, int], used: int) -> Places:
        """Return the unused places of a rank; with ``drop_last``, equally many on all ranks that used equally many."""
        share = deal.share(*now)[used:]
        size = self._batch_size
        return share[: max(0, len(deal) // now[1] - used) // size * size] if self._drop_last else share


def _plain_loader(dataset: Any, batches: Iterable[list[int]]) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_sampler=batches)
