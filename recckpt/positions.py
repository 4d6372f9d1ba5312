"""Data whose position goes over to any number of ranks: each sample of an epoch is used once, whoever restores.

Give what is made here to ``attach(loader=...)``, or register it with ``register_io_state``. An epoch is dealt to the
ranks anew wherever their number changes. Nothing is sent between ranks, and they need not be at the same step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.parallel.ranks import this_rank
from recckpt.parallel.threads import made_ahead
from recckpt.types import flag, positive_int

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ElasticFiles", "ElasticLoader"]
log = logging.getLogger("recckpt")
Places: TypeAlias = npt.NDArray[np.int64]
State: TypeAlias = dict[str, Any]
MakeLoader: TypeAlias = Callable[[Any, Iterable[list[int]]], Iterable[Any]]
_READERS = 2  # threads that read files
_INSTEAD = "or leave it out with 'exclude': ['io_state'], and the data begins anew"


@dataclass(frozen=True)
class _Deal:
    """What is left of an epoch, by places in its order, of which rank r of n gets the r-th and each n-th behind it.

    Attributes:
        size: places of the epoch.
        epoch: its number, from 0.
        left: places below ``begin`` that are left, ascending.
        begin: from here on all are left.
    """

    size: int
    epoch: int = 0
    left: Sequence[int] = ()
    begin: int = 0

    def __len__(self) -> int:
        return len(self.left) + self.size - self.begin

    def share(self, rank: int, ranks: int) -> Places:
        """Return the places of a rank, in its order."""
        first = self.begin + (rank - len(self.left)) % ranks
        rest = np.arange(first, self.size, ranks, dtype=np.int64)
        return np.concatenate([np.asarray(self.left, np.int64)[rank::ranks], rest])

    def after(self, used: Sequence[int]) -> _Deal:
        """Return what is left once each of the ranks has used so many places of its share."""
        ranks, n_left, of_ranks = len(used), len(self.left), np.asarray(used, np.int64)
        low, high = (min(len(self), int(bound) * ranks) for bound in (of_ranks.min(), of_ranks.max()))
        between = np.arange(low, high, dtype=np.int64)  # before it all are used, behind it none
        between = between[between // ranks >= of_ranks[between % ranks]]
        left = [self.left[at] if at < n_left else at - n_left + self.begin for at in between.tolist()]
        return replace(self, left=[*left, *self.left[high:]], begin=self.begin + max(0, high - n_left))


class _Elastic:
    """A position in epochs of data: how the epoch was dealt to the ranks, and how much of its share this one has used.

    Args:
        size: places of an epoch.
        unit: what a place is, in the plural.
        names: of the places, which tell the data from other data; empty where nothing but their number does.
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
        self._rank, self._ranks = this_rank(rank, ranks)
        self._parts = dict[int, int]()  # places of which some rows were used: how many
        self._iterator = 0  # the number of the one that counts; those before it are over
        self._is_loaded = self._has_given = False  # within the epoch

    @property
    def epoch(self) -> int:
        """The number of the epoch that the position is in, from 0."""
        return self._deal.epoch

    def dump_io_state(self) -> State:
        """Return the position of this rank: behind the batch that was given last."""
        own = {"used": self._used, "rank": self._rank, "ranks": self._ranks, "parts": self._parts}
        order = {"shuffle": self._shuffle, "seed": self._seed, "content": self._content}
        return {**asdict(self._deal), "left": [*self._deal.left], **own, **order}

    def load_io_state(self, state: State) -> None:
        """Go on from a position; iterators that were made before are over.

        Raises:
            ValueError: it is a position in other data, or in another order.
        """
        self._deal = self._checked(state)
        self._used, self._rank, self._ranks = state["used"], state["rank"], state["ranks"]
        self._parts = dict(state["parts"])
        self._iterator, self._is_loaded, self._has_given = self._iterator + 1, True, False

    def merge_io_state(self, states: Sequence[State], index: int, count: int) -> State:
        """Return the position of rank ``index`` of ``count``, behind all that the ranks that saved have used.

        Of a rank whose state is missing all comes again; so does what ranks have used that were an epoch ahead, which
        is logged.
        """
        first = min(states, key=lambda state: int(state["epoch"]))
        here = {state["rank"]: state for state in states if state["epoch"] == first["epoch"]}
        ahead = {state["rank"]: state for state in states if state["rank"] not in here}
        if index == 0 and (again := sum(state["used"] for state in ahead.values())):
            log.warning("some ranks were an epoch ahead: %s %s of it come again", again, self._unit)
        deal = _Deal(first["size"], first["epoch"], first["left"], first["begin"])
        used = {**dict.fromkeys(ahead, len(deal)), **{rank: state["used"] for rank, state in here.items()}}
        deal = deal.after([used.get(rank, 0) for rank in range(first["ranks"])])
        parts = dict[int, int]()  # a rank knows the parts of others as they were when all was dealt
        for place, rows in (part for state in here.values() for part in state["parts"].items()):
            parts[place] = max(rows, parts.get(place, 0))
        return {**first, **asdict(deal), "used": 0, "rank": index, "ranks": count, "parts": parts}

    def _checked(self, state: State) -> _Deal:
        """Return what is left by a position, of all data that there is now."""
        size, now = int(state["size"]), self._deal.size
        of_order = {name: state[name] for name in ("shuffle", "seed")}
        own = {"shuffle": self._shuffle, "seed": self._seed}
        if of_order != own:
            raise ValueError(
                f"the position is in another order: found {of_order}, expected {own}: give those, {_INSTEAD}"
            )
        if size > now or (self._shuffle and size != now):
            more = "" if self._shuffle else " or more"
            raise ValueError(
                f"the position is in other data: found {size} {self._unit}, expected {now}{more}: give that, {_INSTEAD}"
            )
        if state["content"] != _content_of(self._names[:size]):
            raise ValueError(
                f"the position is in other data: the first {size} {self._unit} differ: give those, {_INSTEAD}"
            )
        return _Deal(now, state["epoch"], state["left"], state["begin"])

    def _order(self, epoch: int) -> Places | None:
        """Return what is at each place of an epoch; None where that is its number.

        By ``RandomState``, whose numbers stay the same in all versions of numpy.
        """
        return np.random.RandomState([self._seed, epoch]).permutation(self._deal.size) if self._shuffle else None

    def _begun(self) -> int:
        """Begin an iterator, within the epoch of the position, or in the next where this has given some; its number."""
        now = this_rank(*self._asked)
        if self._is_loaded and not self._has_given and now != (self._rank, self._ranks):
            raise RuntimeError(
                f"the position was loaded for rank {self._rank} of {self._ranks}, and this is rank {now[0]} of "
                f"{now[1]}: init_process_group comes before restore(), and rank= and ranks= are those of the manager"
            )
        if self._has_given:
            self._end(self._iterator)
        self._rank, self._ranks = now
        self._iterator += 1
        return self._iterator

    def _give(self, iterator: int, used: int) -> None:
        """Count places as used, by the iterator that counts.

        Raises:
            RuntimeError: another one was begun, or a position was loaded since.
        """
        if iterator != self._iterator:
            raise RuntimeError(
                "this iterator is over: another one was begun, or a position was loaded, since it was made: call "
                "restore() before iter(), and use one iterator at a time"
            )
        self._used, self._has_given = used, True

    def _end(self, iterator: int) -> None:
        """Go to the next epoch, if this iterator is not over already."""
        if iterator == self._iterator:
            self._deal, self._used, self._parts = _Deal(self._deal.size, self.epoch + 1), 0, {}
            self._is_loaded = self._has_given = False


def _content_of(names: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(names).encode())


class _Batches:
    """A batch sampler: the places in the data of each batch of the iterator that was begun last."""

    def __init__(self) -> None:
        self._batches: Sequence[Places] = ()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches)

    def begin(self, batches: Sequence[Places]) -> Sequence[Places]:
        self._batches = batches
        return batches


class ElasticLoader(_Elastic):
    """Batches of a map-style dataset, in an order of each epoch, of which each rank gets its share.

    Each ``for`` is an epoch, or the rest of the one in which the position lies. Not thread-safe. Not collective.

    Args:
        dataset: has ``len()`` and gives a sample by its number.
        batch_size: samples of a batch of one rank.
        shuffle: whether each epoch has an order of its own; it takes 8 bytes a sample on each rank.
        seed: of these orders.
        drop_last: whether all ranks get equally many batches, all full; what is left over is not in the epoch then.
            Where False all of it is, and one rank may get a batch more than another.
        loader: makes what reads, from the dataset and a batch sampler, in whose order it must give batches, such as
            ``lambda data, batches: DataLoader(data, batch_sampler=batches, num_workers=8)``; None for a
            :class:`torch.utils.data.DataLoader` without workers.
        rank: of this process; None for that of the process group.
        ranks: how many there are; None for those of the process group.

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
            raise ValueError(f"dataset must have len(), found a {kind}: an iterable one keeps its own position")
        size = len(dataset)
        super().__init__(size, "samples", shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks)
        self._batch_size, self._batches = positive_int("batch_size", batch_size), _Batches()
        self._loader = (loader or _plain_loader)(dataset, self._batches)
        if not getattr(self._loader, "in_order", True):
            raise ValueError("loader: it gives batches as they come (in_order=False): which were used is not known")

    def __len__(self) -> int:
        """Return how many batches this rank gets of the epoch, or rest of one, that the next ``for`` is."""
        is_new, now = self._has_given, this_rank(*self._asked)
        return len(self._split(_Deal(self._deal.size) if is_new else self._deal, now, 0 if is_new else self._used))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._begun()
        batches = self._batches.begin(self._split(self._deal, (self._rank, self._ranks), self._used))
        used, n_batches = self._used, 0
        for batch in self._made_iterator():
            used += len(batches[n_batches]) if n_batches < len(batches) else 0
            n_batches += 1
            self._give(iterator, used)  # before it is trained on: a save within the step counts it
            yield batch
        if n_batches != len(batches):
            raise RuntimeError(
                f"loader: it gave {n_batches} batches, expected {len(batches)}: one for each of its batch sampler"
            )
        self._end(iterator)

    def _made_iterator(self) -> Iterator[Any]:
        """Make an iterator of the loader, for which the run draws nothing: one that resumes makes one more."""
        import torch

        with torch.random.fork_rng(devices=[]):
            place = [self._seed, self.epoch, self._rank, self._used]
            torch.default_generator.manual_seed(int(np.random.RandomState(place).randint(1 << 31)))  # of its workers
            return iter(self._loader)

    def _split(self, deal: _Deal, now: tuple[int, int], used: int) -> list[Places]:
        """Return the samples of each batch that is left of the share of a rank."""
        size, order, share = self._batch_size, self._order(deal.epoch), deal.share(*now)
        if self._drop_last:
            share = share[: len(deal) // now[1] // size * size]
        samples = share[used:] if order is None else order[share[used:]]
        return [samples[first : first + size] for first in range(0, len(samples), size)]


def _plain_loader(dataset: Any, batches: Iterable[list[int]]) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_sampler=batches)


class ElasticFiles(_Elastic):
    """Batches of rows from files of Parquet or Arrow, of whose row groups each rank gets its share.

    A group that was used in part goes on where it was, on whichever rank. Each ``for`` is an epoch, or the rest of the
    one in which the position lies; threads read a few groups ahead. Ranks have different numbers of batches.
    Not thread-safe. Not collective.

    Args:
        paths: files, or URLs of filesystems that pyarrow knows; the same on all ranks.
        batch_rows: rows of a batch.
        columns: their names; None for all.
        shuffle: whether each epoch has an order of groups of its own, and of the rows within a group.
        seed: of these orders.
        drop_last: whether the last rows of a rank are left out where they do not fill a batch.
        rank: of this process; None for that of the process group.
        ranks: how many there are; None for those of the process group.

    Raises:
        ValueError: an argument is invalid, or a file is neither of Parquet nor of Arrow.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        batch_rows: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if isinstance(paths, str | os.PathLike):
            raise ValueError(f"paths must be a list of files, found {os.fspath(paths)!r}")
        self._groups = [(os.fspath(path), group) for path in paths for group in range(_n_groups(os.fspath(path)))]
        names = [f"{PurePath(path).name}:{group}" for path, group in self._groups]
        super().__init__(
            len(names), "row groups", names, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks
        )
        self._batch_rows, self._columns = positive_int("batch_rows", batch_rows), columns

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        iterator, size = self._begun(), self._batch_rows
        before = self._used
        places: list[int] = self._deal.share(self._rank, self._ranks)[before:].tolist()
        pieces, n_rows, passed = [], 0, set[int]()
        tables = made_ahead(partial(self._read, self._order(self.epoch)), places, _READERS)
        for used, (place, table) in enumerate(zip(places, tables, strict=True), before):
            passed.add(place)
            begin = self._parts.get(place, 0)
            while begin < len(table):
                pieces.append(table.slice(begin, size - n_rows))
                begin, n_rows = begin + len(pieces[-1]), n_rows + len(pieces[-1])
                if n_rows == size:
                    self._give(iterator, used + (begin == len(table)))
                    others = {other: rows for other, rows in self._parts.items() if other not in passed}
                    self._parts = others if begin == len(table) else {**others, place: begin}
                    yield _joined(pieces)
                    pieces, n_rows = [], 0
        if pieces and not self._drop_last:
            self._give(iterator, before + len(places))
            yield _joined(pieces)
        self._end(iterator)

    def _read(self, order: Places | None, place: int) -> pa.Table:
        path, group = self._groups[place if order is None else order[place]]
        table = _read_group(path, group, self._columns)
        if self._shuffle:
            table = table.take(np.random.RandomState([self._seed, self.epoch, place]).permutation(len(table)))
        return table


def _joined(pieces: Sequence[pa.Table]) -> pa.RecordBatch:
    import pyarrow as pa

    [batch] = pa.concat_tables(pieces).combine_chunks().to_batches()
    return batch


def _opened(path: str) -> tuple[Any, bool]:
    """Return an open file, and whether it is one of Parquet."""
    import pyarrow as pa
    from pyarrow import fs, parquet

    system, name = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    file = system.open_input_file(name)
    magic = file.read_at(6, 0)
    if magic[:4] == b"PAR1":
        return parquet.ParquetFile(file), True
    if magic == b"ARROW1":
        return pa.ipc.open_file(file), False
    file.close()
    raise ValueError(f"paths: {path!r} is neither a file of Parquet nor one of Arrow: it begins with {magic!r}")


def _n_groups(path: str) -> int:
    file, is_parquet = _opened(path)
    return int(file.num_row_groups if is_parquet else file.num_record_batches)


def _read_group(path: str, group: int, columns: Sequence[str] | None) -> pa.Table:
    import pyarrow as pa

    file, is_parquet = _opened(path)
    if is_parquet:
        return file.read_row_group(group, columns=columns)
    table = pa.Table.from_batches([file.get_batch(group)])
    return table if columns is None else table.select(columns)
