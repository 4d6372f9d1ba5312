"""Which rank reads each batch that several need: decided by each of them alone, and by all alike (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recckpt.format.catalog import Part
from recckpt.sparse.files.owners import OwnedIds, Owners


@dataclass(frozen=True)
class TableRequest:
    """What a rank takes of a table of a link.

    Attributes:
        columns: the slots that it needs, beside the ids.
        row_bytes: bytes of a row in them, with the id.
        owned: the ids that it owns.
    """

    columns: frozenset[str]
    row_bytes: int
    owned: tuple[OwnedIds, ...]

    def __or__(self, other: TableRequest) -> TableRequest:
        """Return what a rank takes that fills two tables from one."""
        owned = tuple(dict.fromkeys((*self.owned, *other.owned)))
        return TableRequest(self.columns | other.columns, max(self.row_bytes, other.row_bytes), owned)


@dataclass(frozen=True)
class Turn:
    """Who reads a batch, and about which share of its rows each rank needs, of all that may need one."""

    reader: int
    shares: Mapping[int, float]


class LinkRequests:
    """What the ranks take of a link, by table.

    Args:
        of_ranks: of each rank, by its number: table -> what it takes.
    """

    def __init__(self, of_ranks: Sequence[Mapping[str, TableRequest]]) -> None:
        self._size = len(of_ranks)
        self._of_tables: dict[str, dict[int, TableRequest]] = {}
        for rank, requests in enumerate(of_ranks):
            for table, request in requests.items():
                self._of_tables.setdefault(table, {})[rank] = request
        known: dict[tuple[tuple[int, tuple[OwnedIds, ...]], ...], Owners] = {}  # tables mostly lie alike
        self._owners: dict[str, Owners] = {}
        for table, some in self._of_tables.items():
            owned = tuple((rank, request.owned) for rank, request in some.items())
            self._owners[table] = known.get(owned) or known.setdefault(owned, Owners(dict(owned)))

    def owners(self, table: str) -> Owners:
        """Return who owns which ids of a table."""
        return self._owners[table]

    def columns(self, table: str, rank: int) -> frozenset[str]:
        """Return the slots that a rank needs of a table."""
        return self._of_tables[table][rank].columns

    def deal(self, parts: Sequence[Part], shard: int) -> dict[tuple[str, int], Turn]:
        """Return who reads the batches of a shard, by file and number, of those that ranks take rows of.

        A batch goes to one of the ranks that need it: that which by then has read the fewest bytes, beside those that
        it owns. So a batch of one rank alone is read by it, ranks as of the save have nothing to send, and otherwise
        each reads about as many bytes of a shard as it owns there, give or take a batch.
        """
        owed: Counter[int] = Counter()  # bytes that a rank owns and has not read
        turns: dict[tuple[str, int], Turn] = {}
        for part in parts:
            for number, batch in enumerate(part.batches):
                shares = self._owners[batch.table].shares(batch) if batch.table in self._owners else {}
                if not shares:
                    continue
                n_bytes = batch.rows * (8 if part.holds == "deletes" else self._row_bytes(batch.table))
                whole = sum(shares.values())
                for rank, share in shares.items():
                    owed[rank] += round(n_bytes * share / whole)
                reader = max(shares, key=lambda rank: (owed[rank], (rank - shard) % self._size))
                owed[reader] -= n_bytes
                turns[part.file, number] = Turn(reader, shares)
        return turns

    def _row_bytes(self, table: str) -> int:
        return max(request.row_bytes for request in self._of_tables[table].values())
