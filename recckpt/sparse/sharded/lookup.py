"""A lookup over all ranks: ids go to their owners and rows come back; later gradients go to the owners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.sharded.all_to_all import Exchange, agree, raise_alike
from recckpt.sparse.sharded.routing import Requests, Route, requests_in, route
from recckpt.sparse.table.anchor import captured, is_reached
from recckpt.sparse.table.checks import asked_ids
from recckpt.sparse.table.differentiable import add_gradients, of_present
from recckpt.sparse.table.fetch import counts_occurrences, fetch
from recckpt.sparse.table.gradients import add_by_group
from recckpt.sparse.table.opaque import check_proxy, opaque
from recckpt.sparse.table.table import HashTable

Int64s = npt.NDArray[np.int64]


class RoundTrip:
    """One lookup in tables of one shape, dtype and device, on all ranks. All methods are collective.

    The rows that go from one rank to another are followed by a few more, the trailer. With rows of a table it says
    whether their owner could read them, with gradients which of the tables the loss has reached at all. Gradients are
    multiplied with the scale of their table; ``what`` names the lookup in words that are the same on all ranks;
    ``inserts`` says of each table whether it inserts and counts.
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
        self._present: list[Int64s | None] = []  # by table: which of the ids asked for have rows, None for all

    def rows(self, ids: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the rows of the ids for each table, shape (ids, *embedding_shape).

        Raises:
            LookupFailedError: it failed on a rank; all ranks raise it.
        """
        self._ask(ids)
        message, problem = self._answer()
        owned, asked_for = self._lengths(self._requests), self._lengths(self._route)
        rows = self._exchange.all_to_all(message, owned, asked_for)
        if bool(rows[self._trailers(asked_for)].any()):
            remedy = "rows may have been inserted already: mend the cause on that rank"
            raise_alike(self._exchange, f"looking up {self._what}", problem, remedy)
        return tuple(rows[torch.from_numpy(places).to(rows.device)] for places in self._route.positions)

    def return_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of the rows to the owners' tables; None for a table that the loss does not depend on here.

        A table that the loss of any rank depends on gets gradients on all ranks, if only of no rows.

        Raises:
            LookupFailedError: a rank is at something else, such as its next lookup; all ranks raise it.
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
        by_rank = [self._cut(rows, rank) for rank, rows in enumerate(torch.split(returned, owned))]
        for number, table in enumerate(self._tables):
            if flags[number]:
                table_grads = torch.cat([of_tables[number] for of_tables in by_rank])
                scaled = table_grads.mul_(self._scales[number])
                for ids, of_ids in self._contributions(number, scaled):
                    add_gradients(table, ids, of_ids)

    def _contributions(self, number: int, grads: Tensor) -> Iterator[tuple[Int64s, Tensor]]:
        """Yield ids of a table and their gradients: rank by rank where they are squared, else of all ranks at once."""
        ids, present = self._requests.ids[number], self._present[number]
        if not self._tables[number].pending_gradients.keeps_squares:
            yield of_present(ids, grads, present)
            return
        ranks = np.repeat(np.arange(self._exchange.size), self._requests.counts[:, number])
        places = np.arange(len(ids)) if present is None else present
        for rank in range(self._exchange.size):
            yield of_present(ids, grads, places[ranks[places] == rank])

    def _ask(self, ids: Mapping[str, Tensor]) -> None:
        """Send the ids to their owners."""
        problem = None
        try:
            self._route = route(
                flat_batches(self._tables, ids), self._exchange.size, self._n_trailer, counted=self._counted
            )
            message, lengths = self._route.message()
        except Exception as error:
            message, lengths, problem = np.empty(0, np.int64), [0] * self._exchange.size, error
        coming = agree(self._exchange, f"looking up {self._what}", lengths, problem)
        received = self._exchange.all_to_all(torch.from_numpy(message), lengths, coming)
        self._requests = requests_in(received.numpy(), coming, len(self._tables), counted=self._counted)

    def _answer(self) -> tuple[Tensor, Exception | None]:
        """Return the rows that the ranks ask for; where they cannot be had, others, and the reason."""
        problem = None
        try:
            batches = zip(self._tables, self._requests.ids, self._requests.occurrences, self._inserts, strict=True)
            fetched = [fetch(table, ids, occurrences, admit=inserts) for table, ids, occurrences, inserts in batches]
            rows, self._present = [some.rows for some in fetched], [some.present for some in fetched]
        except Exception as error:
            problem = error
            rows = [torch.zeros((len(ids), *self._shape), **self._like) for ids in self._requests.ids]
        trailer = torch.full((self._n_trailer, *self._shape), int(problem is not None), **self._like)
        by_table = [
            torch.split(some, counts) for some, counts in zip(rows, self._requests.counts.T.tolist(), strict=True)
        ]
        return torch.cat([piece for by_rank in zip(*by_table, strict=True) for piece in (*by_rank, trailer)]), problem

    def _lengths(self, ids: Route | Requests) -> list[int]:
        """Return how many rows go to or come from each rank."""
        lengths: list[int] = (ids.counts.sum(1) + self._n_trailer).tolist()
        return lengths

    def _trailers(self, lengths: Sequence[int]) -> Tensor:
        """Return where the trailers are among rows of these lengths, shape (ranks, rows of a trailer)."""
        ends = torch.tensor(lengths, device="cpu").cumsum(0).view(-1, 1)
        return (ends - self._n_trailer + torch.arange(self._n_trailer, device="cpu")).to(self._like["device"])

    def _cut(self, rows: Tensor, rank: int) -> Sequence[Tensor]:
        """Return what a rank sent, table by table."""
        return torch.split(rows, [*self._requests.counts[rank].tolist(), self._n_trailer])


class _RoundTrip(torch.autograd.Function):
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
        nodes = [node for node, _ in ctx.next_functions]  # None where a table is frozen
        of_anchors = [node and captured(node) for node in nodes]
        adds_up = (node and anchor is None and is_reached(node) for node, anchor in zip(nodes, of_anchors, strict=True))
        ctx.trip.return_gradients([g if adds else None for g, adds in zip(grads, adds_up, strict=True)])
        return (None, None, *of_anchors)


def differentiable_rows(trip: RoundTrip, ids: Mapping[str, Tensor], anchors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows of a lookup, whose backward pass returns the gradients of those whose anchor requires one."""
    rows: tuple[Tensor, ...] = _RoundTrip.apply(trip, ids, *anchors)  # type: ignore[no-untyped-call]
    return rows


def flat_batches(tables: Sequence[HashTable], ids: Mapping[str, Any]) -> list[Int64s]:
    """Return the ids for each table in one dimension; in place of ids there may be the error of why there are none.

    Raises:
        ValueError: a table has none, a name is that of no table, or something is no int64 tensor.
        Exception: what stood in place of ids.
    """
    names = [table.name for table in tables]
    if ids.keys() != {*names}:
        raise ValueError(
            f"found ids for {sorted(ids)}, expected for {sorted(names)}: for a table without ids, give an empty tensor"
        )
    for name in names:
        if isinstance(ids[name], Exception):
            raise ids[name]
        if not isinstance(ids[name], Tensor):
            check_proxy(ids[name])
            raise ValueError(f"ids for {name!r}: found {type(ids[name]).__name__}, expected an int64 tensor")
    return [asked_ids(ids[name]) for name in names]
