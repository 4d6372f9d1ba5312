"""Tables with rows on many ranks: every rank can look up any id and train its row, which one rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recckpt.errors import LookupFailedError
from recckpt.format.buckets import gen_slice
from recckpt.policies.admit import Admit, AdmitFunction
from recckpt.policies.evict import Mask, first_rows
from recckpt.sparse.sharded.all_to_all import Exchange, SharedGradients, agree, exchange_of
from recckpt.sparse.sharded.lookup import DifferentiableRows, RoundTrip, flat_batches
from recckpt.sparse.table.bags import Bags, Mode, bags_of, check_mode, pool
from recckpt.sparse.table.checks import opaque
from recckpt.sparse.table.eviction import OnEvict, Policy
from recckpt.sparse.table.initializers import InitializerLike
from recckpt.sparse.table.nn_module import Sharing
from recckpt.sparse.table.table import HashTable, inserts
from recckpt.text.foreign_words import answers_by

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Int64s = npt.NDArray[np.int64]


class SharedByRanks(Sharing):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.n_ranks = exchange, exchange.size

    def numbers(self, what: str, number: int, problem: Exception | None = None) -> list[int]:
        return agree(self._exchange, what, [number] * self._exchange.size, problem)

    def first_rows(self, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
        """Return which rows of this rank are among the first ``n`` rows of all ranks. Collective.

        ``by`` and ``ids`` are int64, for rows of this rank; ``n`` is equal on all ranks. No rank sends more than ``n``.
        """
        exchange, mask = self._exchange, np.zeros(len(ids), np.bool_)
        if n <= 0:
            return mask
        offered = np.flatnonzero(first_rows(by, ids, n))  # this rank's other rows cannot be among the first ``n``
        lengths = agree(exchange, "agreeing on what is evicted", [len(offered)] * exchange.size, None)
        pairs = torch.from_numpy(np.stack([by[offered], ids[offered]], 1))
        of_all = exchange.all_to_all(pairs.repeat(exchange.size, 1), [len(offered)] * exchange.size, lengths).numpy()
        begin = sum(lengths[: exchange.rank])
        mask[offered] = first_rows(of_all[:, 0], of_all[:, 1], n)[begin : begin + len(offered)]
        return mask

    def refuse(self, table: Any, error: Exception, admit: bool | None) -> NoReturn:
        """Raise the error on all ranks, because the other ranks wait for the ids of this rank."""
        look_up_together([table], {table.name: error}, admit=admit)
        raise error

    def exposed(self, grads: Tensor, name: str) -> Tensor:
        return grads if self._exchange.size == 1 else SharedGradients(grads, self._exchange, name)


class ShardedHashTable(HashTable):
    """A :class:`recckpt.sparse.HashTable` over all ranks; each rank holds one slice of the ids.

    Calling it is collective, and so is the backward pass: all ranks call the same tables in the same order, each with
    its own ids, perhaps none. Ids go to the rank that owns them, where training inserts new ids. Rows come back, and
    later gradients go to the owners and add up. After a backward pass :meth:`take_gradients` is None on all ranks or on
    none. The norm of :attr:`grad` covers the rows of all ranks; computing or unscaling it is collective.

    Everything else is local and about the rows of this rank: ``insert``, ``lookup``, ``erase``, ``ids()``, ``slots``,
    ``len()``. In ``state_dict()`` and checkpoints it is a table with a slice. With one rank it is a plain table. See
    docs/distributed.md.

    Args:
        embedding_shape: as for a plain table; all arguments must be equal on all ranks.
        name: name in checkpoints.
        dtype: as for a plain table.
        device: device of the slots of this rank.
        initializer: as for a plain table. Those of :mod:`recckpt.sparse` give an id the same initial values for any
            number of ranks; those of ``torch.nn.init`` draw from the generator of the rank that owns the id.
        padding_id: as for a plain table.
        track: as for a plain table; an id is counted over all ranks, and dated by its owner.
        admit: as for a plain table, by the occurrences on all ranks and the step of the owner, so the same ids get rows
            for any number of ranks. A callable must be equal on all ranks.
        evict: as for a plain table; a capacity counts the rows of all ranks, which agree on the rows to evict.
        evict_every: as for a plain table.
        budget_ms: as for a plain table.
        on_evict: as for a plain table, called with the ids of this rank.
        group: the process group whose ranks share the table; None for the default group, or for one rank without a
            group. Its backend (gloo, nccl) carries the rows, and its timeout applies.
        gradients: ``"mean"`` divides the sum of gradients by the number of ranks, as DistributedDataParallel does for
            dense parameters; use it if the loss is a mean over the batch of a rank. ``"sum"`` does not divide.

    Raises:
        ValueError: an argument is out of range, or this is one of several processes without a process group.
    """

    @answers_by("ShardedHashTable(16, name='item'), with a dimension, a name of its own, and no number of rows")
    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        initializer: InitializerLike | None = None,
        padding_id: int | None = None,
        track: Sequence[str] = (),
        admit: Admit | AdmitFunction | None = None,
        evict: Policy | Sequence[Policy] = (),
        evict_every: int | None = None,
        budget_ms: float | None = None,
        on_evict: OnEvict | None = None,
        group: ProcessGroup | Exchange | None = None,
        gradients: Literal["mean", "sum"] = "mean",
    ) -> None:
        if gradients not in ("mean", "sum"):
            raise ValueError(f"found gradients={gradients!r}, expected 'mean' or 'sum'")
        exchange = exchange_of(group)
        super().__init__(
            embedding_shape,
            name=name,
            dtype=dtype,
            device=device,
            initializer=initializer,
            slice=gen_slice(exchange.rank, exchange.size),
            padding_id=padding_id,
            track=track,
            admit=admit,
            evict=evict,
            evict_every=evict_every,
            budget_ms=budget_ms,
            on_evict=on_evict,
        )
        self.exchange, self.gradients = exchange, gradients
        self.sharing = SharedByRanks(exchange)

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this table; the rows are those of this rank."""
        rank = f"rank {self.exchange.rank} of {self.exchange.size}" if "exchange" in vars(self) else "of no rank yet"
        return f"{super().extra_repr()}, {rank}"

    @opaque
    def forward(self, ids: Tensor, *, admit: bool | None = None) -> Tensor:
        """Return the embeddings of ``ids``, whichever rank holds them. Collective.

        In training mode, unseen ids that are admitted get rows on their owners. In eval mode nothing is inserted, and
        an unseen id gives the initializer's constant, or zeros if the initializer is random.

        Args:
            ids: int64, any shape.
            admit: as for a plain table; must be equal on all ranks. The table is frozen on all ranks or on none.

        Returns:
            Tensor of shape ``ids.shape + embedding_shape``, differentiable unless the table is frozen.

        Raises:
            LookupFailedError: on all ranks, if one has no int64 ids, makes another look-up, or fails.
        """
        return look_up_together([self], {self.name: ids}, admit=admit)[0]


def look_up_together(tables: Sequence[ShardedHashTable], ids: Mapping[str, Any], *, admit: bool | None) -> list[Tensor]:
    """Return the embeddings for each table, with the messages of a single look-up. Collective.

    Tables have one shape, dtype, device and group, and are the same on all ranks. If this rank has no ids because of an
    error, pass the error in their place. Raises LookupFailedError on all ranks if one rank failed.
    """
    first, exchange = tables[0], tables[0].exchange
    is_inserting = [inserts(table, admit) for table in tables]
    if exchange.size == 1:
        flat_batches(tables, ids)
        return [HashTable.forward(table, ids[table.name], admit=admit) for table in tables]
    for table in compress(tables, is_inserting):
        try:
            table.eviction.evict_due(table)
        except LookupFailedError:  # already raised on all ranks
            raise
        except Exception as error:  # sent in place of ids, so that the ranks that wait for ids raise it, too
            ids = {**ids, table.name: error}
            break
    has_grad = torch.is_grad_enabled() and first.dtype.is_floating_point
    scales = [1 / exchange.size if table.gradients == "mean" else 1.0 for table in tables]
    trip = RoundTrip(tables, exchange, scales, _described(tables, has_grad, is_inserting), is_inserting)
    anchors = [table.anchor for table in tables]
    rows = DifferentiableRows.apply(trip, ids, *anchors) if has_grad else trip.rows(ids)  # type: ignore[no-untyped-call]
    return [some.view(*ids[table.name].shape, *first.embedding_shape) for some, table in zip(rows, tables, strict=True)]


def _described(tables: Sequence[ShardedHashTable], has_grad: bool, is_inserting: Sequence[bool]) -> str:
    """Describe a look-up so that the texts of two ranks are equal exactly if their look-ups fit together."""
    lookups = []
    for table, does_insert in zip(tables, is_inserting, strict=True):
        words = ["training" if table.training else "eval"]
        words += [] if table.requires_grad else ["frozen"]
        words += [table.gradients]
        words += [f"track={'+'.join(table.track)}"] if table.track else []
        words += [] if table.padding_id is None else [f"padding_id={table.padding_id}"]
        if not does_insert or table.admit is not None:
            words.append(f"admit={table.admit if does_insert else False}")
        lookups.append(f"{table.name!r} ({', '.join(words)})")
    shape = f"{str(tables[0].dtype).removeprefix('torch.')} {tables[0].embedding_shape}"
    return f"{', '.join(lookups)} of {shape} {'with' if has_grad else 'without'} gradients"


class EmbeddingCollection(nn.Module):
    """Sharded tables that are looked up together: all tables of one shape and dtype share one look-up's messages.

    Named after TorchRec's class. Calling it is collective, as with the tables.

    Args:
        tables: the tables, in the same order on all ranks.

    Attributes:
        tables: the tables as a ``ModuleList``.

    Raises:
        TypeError: an item is not a sharded table.
        ValueError: two tables share a name.
    """

    def __init__(self, tables: Iterable[ShardedHashTable]) -> None:
        super().__init__()
        members = list(tables)
        others: list[Any] = [table for table in members if not isinstance(table, ShardedHashTable)]
        if others:
            kind = f"the {type(others[0]).__name__} {getattr(others[0], 'name', others[0])!r:.100}"
            raise TypeError(
                f"a collection takes recckpt.sparse.ShardedHashTable, found {kind}: use a ShardedHashTable, "
                "also for one rank, or put plain tables into an nn.ModuleDict, and call each"
            )
        self.tables = nn.ModuleList(members)
        names = [table.name for table in self._sharded]
        if len({*names}) < len(names):
            raise ValueError(f"tables need names of their own, found {names}")

    @opaque
    def forward(self, ids: Mapping[str, Tensor], *, admit: bool | None = None) -> dict[str, Tensor]:
        """Return the embeddings for each table. Collective.

        Args:
            ids: table name -> int64, any shape; every table must be named, an empty tensor is allowed.
            admit: as for a table, applied to all tables.

        Returns:
            Table name -> tensor of shape ``ids.shape + embedding_shape``, differentiable unless the table is frozen.

        Raises:
            LookupFailedError: on all ranks, if the ids of one do not fit or it makes another look-up.
        """
        groups: dict[Any, list[ShardedHashTable]] = {}
        for table in self._sharded:
            key = (table.embedding_shape, table.dtype, table.device, table.exchange)
            groups.setdefault(key, []).append(table)
        by_name = ids if isinstance(ids, Mapping) else {}  # {} raises an error on all ranks, as for ids that do not fit
        unknown = by_name.keys() - {table.name for table in self._sharded}
        rows: dict[str, Tensor] = {}
        for tables in groups.values():
            names = [table.name for table in tables]
            own = {name: by_name[name] for name in (*names, *unknown) if name in by_name}
            rows |= zip(names, look_up_together(tables, own, admit=admit), strict=True)
        return rows

    @opaque
    def bag(
        self,
        ids: Any,
        *,
        mode: Mode = "sum",
        weights: Mapping[str, Any] | None = None,
        padding_id: int | None = None,
        admit: bool | None = None,
    ) -> dict[str, Tensor]:
        """Return the rows of each bag, pooled, for each table, with the messages of a single look-up. Collective.

        Args:
            ids: table name -> ids of two dimensions, a jagged nested tensor, or an object such as TorchRec's
                ``JaggedTensor``; or its ``KeyedJaggedTensor`` with the names of the tables as keys. Ids with lengths
                become a nested tensor by ``torch.nested.nested_tensor_from_jagged(ids, lengths=lengths)``.
            mode: as in :meth:`HashTable.bag`, for all tables.
            weights: table name -> weights as in :meth:`HashTable.bag`, for some or all tables.
            padding_id: as in :meth:`HashTable.bag`, for all tables.
            admit: as for a table, applied to all tables.

        Returns:
            Table name -> tensor of shape (bags, *embedding_shape).

        Raises:
            LookupFailedError: on all ranks, if the ids, weights or mode of one do not fit, or it makes another
                look-up.
        """
        by_name = ids if hasattr(ids, "keys") else {}
        names = {*by_name.keys()}
        batches: dict[str, Any] = {name: by_name[name] for name in names}
        bags: dict[str, Bags] = {}
        own_weights = dict(weights or {})
        for table in (table for table in self._sharded if table.name in names):
            try:
                weights_of_table = own_weights.pop(table.name, None)
                of_table = bags_of(table, batches[table.name], weights_of_table, padding_id)
                check_mode(table, mode, of_table.weights)
                bags[table.name], batches[table.name] = of_table, of_table.ids
            except (TypeError, ValueError) as error:
                batches[table.name] = error
        if own_weights:
            batches[self._sharded[0].name] = ValueError(
                f"found weights for {sorted(own_weights)}, expected them only for tables that have ids"
            )
        rows = self(batches, admit=admit)
        return {table.name: pool(rows[table.name], bags[table.name], mode) for table in self._sharded}

    @property
    def _sharded(self) -> list[ShardedHashTable]:
        return list(self.tables)  # type: ignore[arg-type]  # nn.ModuleList does not know the type of its items
