"""One save, and where the saves of one saver go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.rank_digests import RankDigests
from recckpt.dense.registered import Registry
from recckpt.dense.state_copy import DenseBuffers
from recckpt.format import layout
from recckpt.format.manifest import StateValue
from recckpt.live.optimizers import RowOptimizers, row_optimizers
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.near.tier import NearTier
from recckpt.output_dir.fence import Fence
from recckpt.parallel.ranks import Ranks
from recckpt.policies.keep import Keep
from recckpt.save.choice import Choice
from recckpt.save.delta_base import Changes
from recckpt.save.offer_thread import OfferThread
from recckpt.save.save_info import SaveInfo
from recckpt.save.sparse_saver import SparseSaver
from recckpt.save.timeline import Timeline
from recckpt.save.trainers import Trainers
from recckpt.sparse.split import state_of
from recckpt.storage import Storage
from recckpt.storage.transfers import Transfers
from recckpt.telemetry import Operation
from recckpt.types import SavableTable

State = Mapping[str, StateValue] | None
OnSave = Callable[[SaveInfo], object]


@dataclass(frozen=True)
class Live:
    """What is saved: a model, the optimizer of its tables, registered objects; and which part of the tables.

    ``trainers`` knows who trains the model, and ``live_tables`` are those of its tables that are not ours.
    """

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    choice: Choice
    trainers: Trainers
    live_tables: LiveTables = NO_TABLES

    @property
    def parts(self) -> tuple[dict[str, SavableTable], dict[str, Any]]:
        """The tables of the model by name, and its dense state.

        Raises:
            ValueError: two tables share a name.
        """
        return self.live_tables.joined(*state_of(self.model))

    @property
    def row_optimizers(self) -> Optimizer | RowOptimizers | None:
        """The optimizers of the rows of all tables."""
        return row_optimizers(self.sparse_optim, self.live_tables)


@dataclass(frozen=True)
class Job:
    """One save."""

    info: SaveInfo  # its name, and how it goes
    ranks: Ranks  # that take part; one that fails is the failure of this save
    state: State  # what readers without torch want to know
    overwrite: bool  # whether it supersedes a committed checkpoint of its name
    is_resumed: bool  # whether it goes on from a checkpoint of the output dir
    max_keep: int | Keep | None  # which checkpoints stay
    span: Operation = field(default_factory=lambda: Operation("save", {}, is_reported=False))  # of OpenTelemetry
    step_prefix: str = layout.STEP_PREFIX  # of the ids that a manager gives
    cut: int | None = None  # number of its staging, where near saves are made, too; known to rank 0


@dataclass(frozen=True)
class Destination:
    """Where the saves of one saver go, and what they share."""

    storage: Storage  # the output dir
    fence: Fence  # the saver's hold on it
    transfers: Transfers  # how files go up
    sparse_saver: SparseSaver  # writes the tables of this rank
    concurrency: int  # threads that write and remove; with one, a save makes none, but where it takes over
    min_free_bytes: int  # what a save leaves of the storage's room
    on_save: OnSave | None  # called with each save that is committed, or has failed
    changes: Changes | None  # what deltas are made of; None where all saves are full
    has_bar: bool = True  # whether long saves show a bar
    buffers: DenseBuffers = field(default_factory=DenseBuffers)  # where staging copies dense tensors to
    digests: RankDigests = field(default_factory=RankDigests)  # of the state that one rank saves for all
    logged: set[tuple[str, str]] = field(default_factory=set)  # directories and what is wrong there, once it was logged
    timeline: Timeline = field(default_factory=Timeline)  # where saves leave a line each
    near: NearTier | None = None  # the near saves of the same saver
    offers: OfferThread = field(default_factory=OfferThread)  # compacts chains, where the policy wants that
