"""Several tables as one module, whose lookups share their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from recckpt.sparse.sharded.table import ShardedHashTable, look_up_together
from recckpt.sparse.table.nn_module import opaque


class EmbeddingCollection(nn.Module):
    """Sharded tables that are looked up together: those of one shape and dtype cost the messages of one.

    Named after TorchRec's. Calling it is collective, as with the tables.

    Args:
        tables: in the same order on all ranks.

    Raises:
        ValueError: two tables share a name.
    """

    def __init__(self, tables: Iterable[ShardedHashTable]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        names = [table.name for table in self._sharded]
        if len({*names}) < len(names):
            raise ValueError(f"tables need names of their own, found {names}")

    @opaque
    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings for each table. Collective.

        Args:
            ids: table name -> int64, any shape; each table has to be there, if only with no ids.

        Returns:
            Table name -> tensor of shape ``ids.shape + embedding_shape``, differentiable.

        Raises:
            LookupFailedError: the ids of a rank do not fit, or it is at another lookup; all ranks raise it.
        """
        groups: dict[Any, list[ShardedHashTable]] = {}
        for table in self._sharded:
            key = (table.embedding_shape, table.dtype, table.device, table.exchange)
            groups.setdefault(key, []).append(table)
        given = ids if isinstance(ids, Mapping) else {}  # which all ranks are told of, as of any that do not fit
        unknown = given.keys() - {table.name for table in self._sharded}
        rows: dict[str, Tensor] = {}
        for tables in groups.values():
            names = [table.name for table in tables]
            own = {name: given[name] for name in (*names, *unknown) if name in given}
            rows |= zip(names, look_up_together(tables, own), strict=True)
        return rows

    @property
    def _sharded(self) -> list[ShardedHashTable]:
        return list(self.tables)  # type: ignore[arg-type]  # nn.ModuleList forgets what it holds
