"""A look-up over all ranks: ids go to their owners, rows come back, and later gradients go to the owners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import N_BUCKETS, bucket_of, gen_slice
from recckpt.sparse.sharded.all_to_all import Exchange, agree, raise_alike
from recckpt.sparse.table.checks import check_proxy, flat_ids, opaque
from recckpt.sparse.table.gradients import add_by_group, captured, is_reached, of_present
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.nn_module import add_gradients
from recckpt.sparse.table.table import HashTable, counts_occurrences, fetch

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Route:
    """Distinct ids of a batch for each of several tables, in the order of sending."""

    ids: Int64s  # ordered by owner, then by table
    occurrences: Int64s | None  # of each id in the batch, if the owners need them
    counts: Int64s  # number of ids, shape (owners, tables)
    positions: tuple[Int64s, ...]  # by table: for each id of the batch, the index of its row among the returned rows

    def message(self) -> tuple[Int64s, list[int]]:
        n_ids = self.counts.sum(1)
        columns = [some for some in (self.ids, self.occurrences) if some is not None]
        blocks = [np.split(column, np.cumsum(n_ids)[:-1]) for column in columns]
        parts = [part for of_owner in zip(self.counts, *blocks, strict=True) for part in of_owner]
        return np.concatenate(parts), (len(columns) * n_ids + self.counts.shape[1]).tolist()


@dataclass(frozen=True)
class Requests:
    """Ids whose rows other ranks request from this rank; several ranks may request the same id."""

    ids: tuple[Int64s, ...]  # by table, in the order of the requesting ranks
    counts: Int64s  # number of ids, shape (ranks, tables)
    occurrences: tuple[Int64s, ...] | tuple[None, ...]  # by table, of each id on the requesting rank, if sent


def route(batches: Sequence[Int64s], n_owners: int, spacing: int, *, counted: bool) -> Route:
    """Return the route of one batch per table: each distinct id is sent once, to its owner by ``gen_slice``.

    ``spacing`` is the number of extra rows behind the rows that each owner returns. ``counted`` sends occurrences too.
    """
    numbered = []  # for each batch: (index of each id among the distinct ids, the distinct ids)
    for ids in batches:
        index = IdIndex()
        index.reserve(len(ids))
        numbered.append(index.find_or_add(ids))
    groups, different = zip(*numbered, strict=True)
    tables = np.repeat(np.arange(len(batches)), [len(ids) for ids in different])
    ids = np.concatenate(different)
    owners = _owners(n_owners)[bucket_of(ids)]
    keys = owners * len(batches) + tables
    n_keys = n_owners * len(batches)
    order = np.argsort(keys.astype(np.uint16) if n_keys <= N_BUCKETS else keys, kind="stable")  # 16 bits: radix sort
    places = np.empty(len(ids), np.int64)
    places[order] = np.arange(len(ids)) + owners[order] * spacing
    firsts = np.cumsum([0, *(len(some) for some in different[:-1])])
    sizes = [len(some) for some in different] if counted else []
    occurrences = [np.bincount(group, minlength=n) for group, n in zip(groups, sizes, strict=False)]
    return Route(
        ids[order],
        np.concatenate(occurrences)[order] if counted else None,
        np.bincount(keys, minlength=n_keys).reshape(n_owners, len(batches)),
        tuple(places[first:][group] for first, group in zip(firsts, groups, strict=True)),
    )


def requests_in(message: Int64s, lengths: Sequence[int], n_tables: int, *, counted: bool) -> Requests:
    parts = np.split(message, np.cumsum(lengths)[:-1])
    counts = np.stack([part[:n_tables] for part in parts])
    n_ids = counts.sum(1)
    ids = [part[n_tables : n_tables + n] for part, n in zip(parts, n_ids, strict=True)]
    occurrences = [part[n_tables + n :] for part, n in zip(parts, n_ids, strict=True)]
    return Requests(_by_table(ids, counts), counts, _by_table(occurrences, counts) if counted else (None,) * n_tables)


def _by_table(parts: Sequence[Int64s], counts: Int64s) -> tuple[Int64s, ...]:
    blocks = [np.split(part, np.cumsum(row)[:-1]) for part, row in zip(parts, counts, strict=True)]
    return tuple(np.concatenate(of_table) for of_table in zip(*blocks, strict=True))


@lru_cache
def _owners(n_owners: int) -> Int64s:  # the owner of each bucket
    begins = [gen_slice(owner, n_owners).begin for owner in range(n_owners)]
    return np.searchsorted(begins, np.arange(N_BUCKETS), side="right").astype(np.int64) - 1


class RoundTrip:
    """One look-up on all ranks, in tables of equal shape, dtype and device. All methods are collective.

    Rows sent between two ranks are followed by a trailer. Behind rows of tables it says whether their owner could read
    them; behind gradients, which tables the loss depends on. Gradients are multiplied by the ``scales`` of their
    tables. ``what`` describes the look-up, in equal words on all ranks. ``inserts`` has, for each table, whether the
    look-up inserts and counts.
    """

    def __init__(
        self,
        tables: Sequence[HashTable],
        exchange: Exchange,
        scales: Sequence[float],
        what: str,
        inserts: Sequence[bool],
    ) -> None:
        self._tables, self._exchange, self._scales, self._what = tables, exchange, scales, what
        self._shape = tables[0].embedding_shape
        self._like: dict[str, Any] = {"dtype": tables[0].dtype, "device": tables[0].device}
        self._inserts, self._counted = inserts, any(map(counts_occurrences, compress(tables, inserts)))
        self._n_trailer = -(-len(tables) // math.prod(self._shape))
        self._route: Route
        self._requests: Requests
        self._present: list[Int64s | None] = []  # by table: which requested ids have rows, None for all

    def rows(self, ids: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the rows for each table. Raises LookupFailedError on all ranks if one rank failed."""
        problem = None
        try:
            self._route = route(
                flat_batches(self._tables, ids), self._exchange.size, self._n_trailer, counted=self._counted
            )
            asked, lengths = self._route.message()
        except Exception as error:
            asked, lengths, problem = np.empty(0, np.int64), [0] * self._exchange.size, error
        coming = agree(self._exchange, f"looking up {self._what}", lengths, problem)
        received = self._exchange.all_to_all(torch.from_numpy(asked), lengths, coming)
        self._requests = requests_in(received.numpy(), coming, len(self._tables), counted=self._counted)
        message, problem = self._answer()
        owned, asked_for = self._lengths(self._requests), self._lengths(self._route)
        rows = self._exchange.all_to_all(message, owned, asked_for)
        if bool(rows[self._trailers(asked_for)].any()):
            remedy = "rows may have been inserted already: mend the cause on that rank"
            raise_alike(self._exchange, f"looking up {self._what}", problem, remedy)
        return tuple(rows[torch.from_numpy(places).to(rows.device)] for places in self._route.positions)

    def return_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the owners' tables; pass None for a table that the loss on this rank does not depend on.

        A table that any rank's loss depends on gets gradients on all ranks, perhaps for no rows. Raises
        LookupFailedError on all ranks if one of them makes another call, such as its next look-up.
        """
        owned, asked_for = self._lengths(self._requests), self._lengths(self._route)
        options = {"dtype": torch.promote_types(self._like["dtype"], torch.float32), "device": self._like["device"]}
        sums = torch.zeros((sum(asked_for), *self._shape), **options)
        flags = torch.zeros((self._n_trailer, *self._shape), **options)
        for number, (places, grad) in enumerate(zip(self._route.positions, grads, strict=True)):
            if grad is not None:
                add_by_group(places, grad, sums)
                flags.view(-1)[number] = 1
        sums[self._trailers(asked_for)] = flags
        agree(self._exchange, f"the backward pass through {self._what}", asked_for, None)
        returned = self._exchange.all_to_all(sums, asked_for, owned)
        flags = returned[self._trailers(owned)].flatten(1).any(0)
        counts = self._requests.counts.tolist()
        by_rank = [
            torch.split(rows, [*of_tables, self._n_trailer])
            for of_tables, rows in zip(counts, torch.split(returned, owned), strict=True)
        ]
        for number, table in enumerate(self._tables):
            if flags[number]:
                table_grads = torch.cat([of_tables[number] for of_tables in by_rank])
                scaled = table_grads.mul_(self._scales[number])
                for ids, of_ids in self._contributions(number, scaled):
                    add_gradients(table, ids, of_ids)

    def _contributions(self, number: int, grads: Tensor) -> Iterator[tuple[Int64s, Tensor]]:
        """Yield ids and gradients of a table: rank by rank if each rank's gradients are squared, else all at once."""
        ids, present = self._requests.ids[number], self._present[number]
        if not self._tables[number].pending_gradients.keeps_squares:
            yield of_present(ids, grads, present)
            return
        ranks = np.repeat(np.arange(self._exchange.size), self._requests.counts[:, number])
        places = np.arange(len(ids)) if present is None else present
        for rank in range(self._exchange.size):
            yield of_present(ids, grads, places[ranks[places] == rank])

    def _answer(self) -> tuple[Tensor, Exception | None]:
        """Return the requested rows and None; after an error, zeros and the error."""
        problem = None
        try:
            batches = zip(self._tables, self._requests.ids, self._requests.occurrences, self._inserts, strict=True)
            fetched = [fetch(table, ids, occurrences, admit=inserts) for table, ids, occurrences, inserts in batches]
            rows, self._present = [some for some, _ in fetched], [present for _, present in fetched]
        except Exception as error:
            problem = error
            rows = [torch.zeros((len(ids), *self._shape), **self._like) for ids in self._requests.ids]
        trailer = torch.full((self._n_trailer, *self._shape), int(problem is not None), **self._like)
        by_table = [
            torch.split(some, counts) for some, counts in zip(rows, self._requests.counts.T.tolist(), strict=True)
        ]
        return torch.cat([piece for by_rank in zip(*by_table, strict=True) for piece in (*by_rank, trailer)]), problem

    def _lengths(self, ids: Route | Requests) -> list[int]:
        lengths: list[int] = (ids.counts.sum(1) + self._n_trailer).tolist()
        return lengths

    def _trailers(self, lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor(lengths, device="cpu").cumsum(0).view(-1, 1)
        return (ends - self._n_trailer + torch.arange(self._n_trailer, device="cpu")).to(self._like["device"])


class DifferentiableRows(torch.autograd.Function):
    """Returns the rows of a look-up; its backward pass sends gradients to the tables that are not frozen."""

    @staticmethod
    def forward(ctx: Any, trip: RoundTrip, ids: Mapping[str, Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.trip, rows = trip, trip.rows(ids)
        is_frozen = (not needed for needed in ctx.needs_input_grad[2:])
        ctx.mark_non_differentiable(*compress(rows, is_frozen))
        return rows

    @staticmethod
    @opaque
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nodes = [node for node, _ in ctx.next_functions]  # None for a frozen table
        of_anchors = [node and captured(node) for node in nodes]
        adds_up = (node and anchor is None and is_reached(node) for node, anchor in zip(nodes, of_anchors, strict=True))
        ctx.trip.return_gradients([g if adds else None for g, adds in zip(grads, adds_up, strict=True)])
        return (None, None, *of_anchors)


def flat_batches(tables: Sequence[HashTable], ids: Mapping[str, Any]) -> list[Int64s]:
    """Return the ids for each table in one dimension. If an error stands in place of ids, raise that error."""
    names = [table.name for table in tables]
    if ids.keys() != {*names}:
        raise ValueError(
            f"found ids for {sorted(ids)}, expected for {sorted(names)}: for a table without ids, pass an empty tensor"
        )
    for name in names:
        if isinstance(ids[name], Exception):
            raise ids[name]
        if not isinstance(ids[name], Tensor):
            check_proxy(ids[name])
            raise ValueError(f"ids for {name!r}: found {type(ids[name]).__name__}, expected an int64 tensor")
    return [flat_ids(ids[name], as_asked=True) for name in names]
