"""Batches from the shards of a Hugging Face iterable dataset; this module does not import ``datasets``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from recckpt.positions.epochs import Elastic
from recckpt.types import positive_int

MakeReader: TypeAlias = Callable[[Any], Iterable[Any]]
_WHOLE = 1 << 62  # replaces the number of used examples if the whole shard is used
_NEEDED = ("n_shards", "shard", "skip", "iter", "set_epoch")


class ElasticShards(Elastic):
    """Batches of a :class:`datasets.IterableDataset`; each rank and worker reads its share of the shards.

    After a restore, a partly used shard continues after its last used example, on any rank and worker: the earlier
    examples are read again and skipped. Each ``for`` runs one epoch; after a restore, the first ``for`` runs the rest
    of the saved epoch. The dataset gets ``set_epoch`` for its own shuffling. A batch has examples of one shard, in the
    format of the dataset (``with_format``); the last batch of a shard may be smaller. Ranks get different numbers of
    batches, as with :class:`ElasticFiles`. Not thread-safe. Not collective.

    Args:
        dataset: the whole dataset, the same on all ranks, with at least one shard per rank (``n_shards``). It must have
            the same examples in the same order each time, so its ``shuffle`` needs a ``seed``.
        batch_size: examples per batch.
        shuffle: whether to shuffle the shards anew for each epoch.
        seed: seed of the shuffling.
        drop_last: whether to omit the last examples of a shard if they do not fill a batch.
        loader: function (iterable of batches) -> iterable that yields the same items, unbatched and unchanged, such as
            ``lambda shards: DataLoader(shards, batch_size=None, num_workers=4)``; None to read in this process.
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
        loader: MakeReader | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if missing := [name for name in _NEEDED if not hasattr(dataset, name)]:
            raise ValueError(
                f"dataset must be an IterableDataset of Hugging Face, found a {type(dataset).__name__}, which has no "
                f"{missing[0]}: pass a dataset with len() to ElasticLoader"
            )
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError("dataset is already split by node: pass the whole dataset, and each rank reads its shards")
        if part := _part_of(dataset):
            raise ValueError(
                f"dataset has a {part}() that counts over all shards, but each shard alone would count from 0: "
                "choose by filter(), or by the files passed to load_dataset"
            )
        names = [f"{getattr(dataset, 'split', None)}:{number}" for number in range(dataset.n_shards)]
        super().__init__(
            len(names), "shards", names, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, ranks=ranks
        )
        self._shards = _Shards(dataset, positive_int("batch_size", batch_size), self._drop_last)
        self._loader = None
        if loader is not None:
            from torch.utils.data import IterableDataset

            IterableDataset.register(_Shards)  # so that a DataLoader treats it as an iterable dataset
            self._loader = loader(self._shards)
        if getattr(self._loader, "batch_size", None) is not None:
            raise ValueError("loader: it makes batches of batches: pass batch_size=None")
        if getattr(self._loader, "persistent_workers", False):
            raise ValueError("loader: persistent workers do not see the next epoch: pass persistent_workers=False")

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
            if batch is not None:  # the next batch records the end of the shard
                self._give(iterator, used)
                self._parts = dict(parts)
                yield batch
        self._end(iterator)


def _part_of(dataset: Any) -> str | None:
    """Return "take" or "skip" if the dataset was made by that method, which its ``_ex_iterable`` shows; else None."""
    step = getattr(dataset, "_ex_iterable", None)
    while step is not None:
        name = type(step).__name__
        if name in {"SkipExamplesIterable", "TakeExamplesIterable"}:
            return name[:4].lower()
        step = getattr(step, "ex_iterable", None)
    return None


class _Shards:
    """Reads the shards of the newest iterator.

    Yields (place, number of examples of the shard that are used after this batch, batch); at the end of a shard, the
    number is ``_WHOLE`` and the batch None. In a DataLoader, each worker reads its share.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool) -> None:
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._epoch, self._left = 0, list[tuple[int, int, int]]()

    def begin(self, left: Sequence[tuple[int, int, int]], epoch: int) -> None:
        """Set what to read in an epoch: (place, shard at that place, number of used examples) per shard."""
        self._left, self._epoch = list(left), epoch

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        data = sys.modules.get("torch.utils.data")
        worker = None if data is None else data.get_worker_info()
        own = self._left if worker is None else self._left[worker.id :: worker.num_workers]
        for place, number, used_before in own:
            shard, used = self._dataset.shard(self._dataset.n_shards, number).skip(used_before), used_before
            shard.set_epoch(self._epoch)
            for batch in shard.iter(self._batch_size, self._drop_last):  # __iter__ would split the shard by worker
                used += len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch)
                yield place, used, batch
            yield place, _WHOLE, None
