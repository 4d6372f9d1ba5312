"""Batches from the shards of an iterable dataset of Hugging Face (``datasets``), which need not be installed here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from recckpt.positions.epochs import Elastic
from recckpt.types import positive_int

MakeReader: TypeAlias = Callable[[Any], Iterable[Any]]
_WHOLE = 1 << 62  # examples of a shard of which none is left
_NEEDED = ("n_shards", "shard", "skip", "iter", "set_epoch")


class ElasticShards(Elastic):
    """Batches of a :class:`datasets.IterableDataset`, of whose shards each rank and worker gets its share.

    A shard that was used in part goes on behind the last example of it, on whichever rank and worker: those before are
    read again and skipped. Each ``for`` is an epoch, or the rest of the one in which the position lies; the dataset's
    own shuffling gets the epoch too. A batch is of one shard, whose last may be smaller, and in the format of the
    dataset (``with_format``). Ranks have different numbers of batches, as of :class:`ElasticFiles`. Not thread-safe.
    Not collective.

    Args:
        dataset: the whole of it, the same on all ranks, with at least one shard for each (``n_shards``); it gives the
            same examples in the same order each time, so ``shuffle`` of it needs a ``seed``.
        batch_size: examples of a batch.
        shuffle: whether each epoch has an order of shards of its own.
        seed: of these orders.
        drop_last: whether the last examples of a shard are left out where they do not fill a batch.
        loader: makes what reads, of what it must hand on unbatched and unchanged, such as
            ``lambda shards: DataLoader(shards, batch_size=None, num_workers=4)``; None to read in this process.
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
        loader: MakeReader | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if missing := [name for name in _NEEDED if not hasattr(dataset, name)]:
            raise ValueError(
                f"dataset must be an IterableDataset of Hugging Face, found a {type(dataset).__name__}, which has no "
                f"{missing[0]}: one that has len() goes to ElasticLoader"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError("dataset is split by node already: give it whole, and each rank gets its shards here")
        if part := _part_of(dataset):
            raise ValueError(
                f"dataset has a {part}() that counts over all shards, and each shard alone would count anew: "
                "choose by filter(), or by the files that load_dataset is given"
            )
        names = [f"{getattr(dataset, 'split', None)}:{number}" for number in range(dataset.n_shards)]
        super().__init__(
            len(names), "shards", names, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks
        )
        self._shards = _Shards(dataset, positive_int("batch_size", batch_size), self._drop_last)
        self._loader = None
        if loader is not None:
            from torch.utils.data import IterableDataset

            IterableDataset.register(_Shards)  # as which a DataLoader knows it
            self._loader = loader(self._shards)
        if getattr(self._loader, "batch_size", None) is not None:
            raise ValueError("loader: it makes batches of batches: give it batch_size=None")
        if getattr(self._loader, "persistent_workers", False):
            raise ValueError("loader: workers that stay do not learn of the next epoch: persistent_workers=False")

    def __iter__(self) -> Iterator[Any]:
        iterator, used, parts = self._begun(), self._used, dict(self._parts)
        places: list[int] = self._deal.share(self._rank, self._ranks).tolist()
        self._check_share(len(places) - used)
        order = self._order(self.epoch)
        left = [(p, p if order is None else int(order[p]), parts.get(p, 0)) for p in places[used:]]
        self._shards.begin([each for each in left if each[2] < _WHOLE], self.epoch)
        read: Iterable[Any] = self._shards if self._loader is None else self._iterator_of(self._loader)
        for place, n_examples, batch in read:
            parts[place] = n_examples
            while used < len(places) and parts.get(places[used]) == _WHOLE:
                del parts[places[used]]
                used += 1
            if batch is not None:  # the end of a shard counts with the next batch
                self._give(iterator, used)
                self._parts = dict(parts)
                yield batch
        self._end(iterator)


def _part_of(dataset: Any) -> str | None:
    """Return ``take`` or ``skip`` where a dataset was made by one; the library keeps that in what it iterates."""
    step = getattr(dataset, "_ex_iterable", None)
    while step is not None:
        name = type(step).__name__
        if name in {"SkipExamplesIterable", "TakeExamplesIterable"}:
            return name[:4].lower()
        step = getattr(step, "ex_iterable", None)
    return None


class _Shards:
    """What a worker reads of the iterator that was begun last: a place, how much of it is used then, and a batch."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool) -> None:
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._epoch, self._left = 0, list[tuple[int, int, int]]()

    def begin(self, left: Sequence[tuple[int, int, int]], epoch: int) -> None:
        """Note what is to be read in an epoch: places, the shards that are there, and how much of each was used."""
        self._left, self._epoch = list(left), epoch

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        data = sys.modules.get("torch.utils.data")
        worker = None if data is None else data.get_worker_info()
        own = self._left if worker is None else self._left[worker.id :: worker.num_workers]
        for place, number, used_before in own:
            shard, used = self._dataset.shard(self._dataset.n_shards, number).skip(used_before), used_before
            shard.set_epoch(self._epoch)
            for batch in shard.iter(self._batch_size, self._drop_last):  # its __iter__ would split it by worker
                used += len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch)
                yield place, used, batch
            yield place, _WHOLE, None
