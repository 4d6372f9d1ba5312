"""The request for one save, and the context that all saves of one saver share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from recckpt.checkpoint.attempt import BATCH_BYTES, ShardWriter
from recckpt.dense.registered import Registry
from recckpt.dense.state_copy import DenseBuffers, RankDigests
from recckpt.format import layout
from recckpt.format.catalog import PartKind
from recckpt.format.forgetting import Ids
from recckpt.format.manifest import StateValue
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import Forgotten
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.parallel.ranks import Ranks
from recckpt.policies.keep import Keep
from recckpt.save.choice import Choice
from recckpt.save.deltas import Changes
from recckpt.save.save_info import SaveInfo, Timeline
from recckpt.save.trainers import Trainers
from recckpt.sparse.files.table_rows import OrderedRows, PieceBuffers, TableSource, deleted_from
from recckpt.sparse.split import state_of
from recckpt.storage import Storage
from recckpt.storage.transfers import Transport
from recckpt.telemetry import Operation
from recckpt.types import SavableTable

ORDER_BYTES = 128 << 20  # for all threads together
_ORDER_ITEM = 4
State = Mapping[str, StateValue] | None
OnSave = Callable[[SaveInfo], object]


class SparseSaver:
    """Writes the tables of one shard with several threads. Each thread has a buffer that it reuses in later saves.

    Memory besides the tables: one buffer of ``PIECE_BYTES`` per thread, and ``order_bytes`` to sort the rows. Tables
    that are too large for this are sorted in several passes.
    """

    def __init__(self, concurrency: int, *, batch_bytes: int = BATCH_BYTES, order_bytes: int = ORDER_BYTES) -> None:
        self._concurrency = concurrency
        self._batch_bytes = batch_bytes
        self._order_rows = max(1, order_bytes // concurrency // _ORDER_ITEM)
        self._buffers = PieceBuffers()

    def save(self, tables: Sequence[TableSource], shard: ShardWriter, advance: Callable[[int], object]) -> None:
        """Write the rows of tables, and for a delta also the deleted ids.

        ``advance`` is called with the bytes of each written batch, from several threads. Raises StateMismatchError if a
        table has an id twice.
        """
        holds: PartKind
        for holds, sources in (("rows", tables), ("deletes", [deleted_from(table) for table in tables])):
            rows = [OrderedRows(source, self._batch_bytes, self._order_rows, self._buffers) for source in sources]
            shard.rows(rows, self._concurrency, advance, least_bytes=self._batch_bytes, holds=holds)


@dataclass(frozen=True)
class Live:
    """The state that a saver saves: a model, the optimizer of its tables, registered objects; and its tables."""

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    choice: Choice
    trainers: Trainers
    live_tables: LiveTables = NO_TABLES

    @property
    def parts(self) -> tuple[dict[str, SavableTable], dict[str, Any]]:
        """The tables of the model by name, and its dense state; ValueError if two tables share a name."""
        return self.live_tables.joined(*state_of(self.model))


@dataclass(frozen=True)
class Job:
    info: SaveInfo
    ranks: Ranks  # if one fails, this save fails
    state: State  # for readers without torch
    overwrite: bool  # whether it may supersede a committed checkpoint of its name
    is_resumed: bool  # whether the run continues from a checkpoint of the output dir
    max_keep: int | Keep | None
    span: Operation = field(default_factory=lambda: Operation("save", {}, is_reported=False))  # for OpenTelemetry
    step_prefix: str = layout.STEP_PREFIX  # begins the ids that a manager gives
    cut: int | None = None  # sequence number of the staging if there are guests; set on rank 0


class Guest(Protocol):
    """Makes something besides checkpoints with the same saver, such as near saves."""

    def hold_together(self, ranks: Ranks, hold: Callable[[], object]) -> None:
        """Call ``hold`` on rank 0 to take the output dir over, before the first save. Collective."""

    def next_cut(self) -> int: ...

    def bases(self, newest: tuple[int, int]) -> Collection[str]:
        """Return the save ids of further checkpoints to keep. ``newest``: position of the newest commit."""

    def void(self) -> None:
        """Declare invalid all that the guest has made so far, because it may contain ids to be forgotten; on rank 0."""

    def forget_together(self, ranks: Ranks, epoch: int) -> None:
        """Remove what the guest has made up to ``epoch``, the epoch of a forgetting. Collective."""


class Forgets(Protocol):
    """Carries out requests to forget ids, as the owner of an output dir."""

    def check(self, storage: Storage, listing: Listing, table: str, ids: Ids, *, is_live: bool) -> None:
        """Raise, before anything changes, if these ids cannot be forgotten; ``is_live``: the model has the table."""

    def forget_as_owner(self, storage: Storage, fence: Fence, table: str, ids: Ids, by: str) -> list[Forgotten]:
        """Make a request and carry it out after pending requests. The caller has removed the ids from the tables."""

    def settle(self, storage: Storage, fence: Fence) -> bool:
        """Carry out the requests of earlier owners, once per takeover; return whether all are done."""


class Compactor(Protocol):
    """Makes full checkpoints from chains while saves continue, for example in a thread."""

    def begin(self, storage: Storage, listing: Listing, checkpoint: Checkpoint, reason: str) -> None:
        """Start compacting a checkpoint, the newest of the listing, unless a compaction runs or waits."""

    def close(self) -> None:
        """Stop. An unfinished compaction leaves no files."""


@dataclass(frozen=True)
class Destination:
    storage: Storage  # the output dir
    fence: Fence  # the saver's hold on it
    transport: Transport  # how files get to the storage
    sparse_saver: SparseSaver  # writes the tables of this rank
    concurrency: int  # threads that write and remove; with 1, only a takeover starts threads
    min_free_bytes: int  # space that a save must leave free
    on_save: OnSave | None  # called with each save that was committed or has failed
    changes: Changes | None  # for deltas; None if all saves are full
    forgets: Forgets  # carries out requests to forget ids
    buffers: DenseBuffers = field(default_factory=DenseBuffers)  # memory for staged dense tensors
    digests: RankDigests = field(default_factory=RankDigests)  # digests of the state that rank 0 saves for all
    logged: set[tuple[str, str]] = field(default_factory=set)  # (directory, problem) pairs that were logged
    timeline: Timeline = field(default_factory=Timeline)  # gets one line per save
    guests: tuple[Guest, ...] = ()  # such as near saves
    compactors: tuple[Compactor, ...] = ()

    def bases_of_guests(self, listing: Listing) -> set[str]:
        newest = max((checkpoint.manifest.order for checkpoint in listing.committed), default=(0, 0))
        return {base for guest in self.guests for base in guest.bases(newest)}

    def end_compactions(self) -> None:
        """Stop the compactors before ids are forgotten, because a compactor could write rows of these ids."""
        for compactor in self.compactors:
            compactor.close()
