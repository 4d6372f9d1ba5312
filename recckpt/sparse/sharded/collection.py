"""Sharded tables that are looked up together, by the messages of one lookup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from recckpt.sparse.sharded.table import ShardedHashTable, look_up_together
from recckpt.sparse.table.bags import Bags, Mode, bags_of, check_mode, pool
from recckpt.sparse.table.checks import opaque


class EmbeddingCollection(nn.Module):
    """Sharded tables that are looked up together: those of one shape and dtype cost the messages of one.

    Named after TorchRec's. Calling it is collective, as with the tables.

    Args:
        tables: in the same order on all ranks.

    Attributes:
        tables: a ``ModuleList`` of them.

    Raises:
        TypeError: there is something else than sharded tables.
        ValueError: two tables share a name.
    """

    def __init__(self, tables: Iterable[ShardedHashTable]) -> None:
        super().__init__()
        members = list(tables)
        others: list[Any] = [table for table in members if not isinstance(table, ShardedHashTable)]
        if others:
            kind = f"the {type(others[0]).__name__} {getattr(others[0], 'name', others[0])!r:.100}"
            raise TypeError(
                f"a collection takes recckpt.sparse.ShardedHashTable, found {kind}: make it one, which with one rank "
                "is a plain table; several plain ones go into an nn.ModuleDict, and are called one by one"
            )
        self.tables = nn.ModuleList(members)
        names = [table.name for table in self._sharded]
        if len({*names}) < len(names):
            raise ValueError(f"tables need names of their own, found {names}")

    @opaque
    def forward(self, ids: Mapping[str, Tensor], *, admit: bool | None = None) -> dict[str, Tensor]:
        """Return the embeddings for each table. Collective.

        Args:
            ids: table name -> int64, any shape; each table has to be there, if only with no ids.
            admit: as of a table, for all of them.

        Returns:
            Table name -> tensor of shape ``ids.shape + embedding_shape``, differentiable but for frozen tables.

        Raises:
            LookupFailedError: the ids of a rank do not fit, or it is at another lookup; all ranks raise it.
        """
        groups: dict[Any, list[ShardedHashTable]] = {}
        for table in self._sharded:
            key = (table.embedding_shape, table.dtype, table.device, table.exchange)
            groups.setdefault(key, []).append(table)
        by_name = ids if isinstance(ids, Mapping) else {}  # an error on all ranks, as ids that do not fit
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
        """Return the rows of each bag, pooled, for each table, by the messages of one lookup. Collective.

        Args:
            ids: table name -> ids of two dimensions, a jagged nested tensor, or an object such as TorchRec's
                ``JaggedTensor``; or its ``KeyedJaggedTensor`` with the names of the tables as keys. Ids with lengths
                become a nested tensor by ``torch.nested.nested_tensor_from_jagged(ids, lengths=lengths)``.
            mode: as of :meth:`HashTable.bag`, for all tables.
            weights: table name -> weights as there, for some of the tables or all.
            padding_id: as there, for all tables.
            admit: as of a table, for all of them.

        Returns:
            Table name -> tensor of shape (bags, *embedding_shape).

        Raises:
            LookupFailedError: the ids, weights or mode of a rank do not fit, or it is at another lookup; all ranks
                raise it.
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
                f"found weights for {sorted(own_weights)}, expected for the tables"
            )
        rows = self(batches, admit=admit)
        return {table.name: pool(rows[table.name], bags[table.name], mode) for table in self._sharded}

    @property
    def _sharded(self) -> list[ShardedHashTable]:
        return list(self.tables)  # type: ignore[arg-type]  # nn.ModuleList forgets what it holds
