"""Loads of one saver: finds the checkpoints that were asked for, and fills the live model from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.registered import Registry
from recckpt.errors import CheckpointNotFoundError
from recckpt.load import load as loading
from recckpt.load.conf import Bank, as_bank, parse_load_conf
from recckpt.load.inventory import list_inventory
from recckpt.load.live_state import LiveState
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.source import OpenSource, Source, locate_bank, opened
from recckpt.load.whole_restore import whole_restore
from recckpt.output_dir.at_path import locate_path, open_checkpoint
from recckpt.output_dir.listing import Checkpoint, list_checkpoints, locate, newest
from recckpt.output_dir.open_files import until_whole
from recckpt.parallel.ranks import this_rank
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import WorkDir
from recckpt.types import HashTable


@dataclass
class Loader:
    """What a saver loads into, and from where. Not thread-safe.

    Attributes:
        storage: the own output dir.
        concurrency: threads that read.
        download_dir: where to copy files that cannot be mapped, before they are read.
        is_resumed: whether a checkpoint of the own output dir was loaded.
        on_whole_restore: is told when the tables of this rank, which it is given, have become exactly those of a
            checkpoint of the own output dir; None where nobody asks.
    """

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    storage: Storage
    concurrency: int
    download_dir: WorkDir | None
    is_resumed: bool = False
    on_whole_restore: Callable[[Checkpoint, Iterable[HashTable]], object] | None = None

    def load(
        self,
        ckpt_path: str | None,
        ckpt_id: str | None,
        load_conf: Mapping[str, Any] | None,
        shard_id: int | None,
        direct_path: bool,
    ) -> LoadReport:
        """As :meth:`recckpt.Saver.load`."""
        entry = parse_load_conf(load_conf)
        if direct_path and (ckpt_path is None or ckpt_id is not None):
            raise ValueError("direct_path=True needs ckpt_path, the checkpoint itself, and no ckpt_id")

        def find() -> Source:
            if direct_path:
                storage, checkpoint = self._at(open_checkpoint, str(ckpt_path))
            elif ckpt_id is not None:
                storage = self.storage if ckpt_path is None else open_storage(str(ckpt_path))
                checkpoint = locate(storage, ckpt_id)
            elif ckpt_path is not None:
                storage, checkpoint = self._found(str(ckpt_path))
            else:
                storage, checkpoint = self.storage, newest(self.storage)
            return Source(replace(entry, is_own=storage.url == self.storage.url), storage, checkpoint)

        return until_whole(find, lambda source: self._load_from([source], Problems(), shard_id))

    def load_bank(self, bank: Bank, conf: Mapping[str, Any] | None, shard_id: int | None) -> LoadReport:
        """As :meth:`recckpt.Saver.load_by_config`."""
        entries = as_bank(bank, conf)
        return until_whole(lambda: locate_bank(entries), lambda found: self._load_from(*found, shard_id))

    def plan(self, bank: Bank, conf: Mapping[str, Any] | None, shard_id: int | None) -> LoadPlan:
        """As :meth:`recckpt.Saver.plan`."""
        entries = as_bank(bank, conf)

        def plan(found: tuple[list[Source], Problems]) -> LoadPlan:
            with opened(found[0]) as sources:
                return loading.plan(self.live_state(shard_id), sources, found[1])

        return until_whole(lambda: locate_bank(entries), plan)

    def names(self) -> list[str]:
        """As :meth:`recckpt.Saver.names`."""
        return list_inventory(self.live_state().inventory)

    def _load_from(self, sources: Sequence[Source], problems: Problems, shard_id: int | None) -> LoadReport:
        live = self.live_state(shard_id)
        with opened(sources, live.needs) as open_sources:
            report = self.load_sources(live, open_sources, problems)
            self.tell_if_whole(live, open_sources, report)
            return report

    def load_sources(
        self, live: LiveState, sources: Sequence[OpenSource], problems: Problems, *, rng: bool = False
    ) -> LoadReport:
        """Load from checkpoints that are open; what every load and restore comes down to."""
        self.is_resumed = self.is_resumed or any(source.at.entry.is_own for source in sources)
        return loading.load(
            live, sources, problems, concurrency=self.concurrency, download_dir=self.download_dir, rng=rng
        )

    def tell_if_whole(self, live: LiveState, sources: Sequence[OpenSource], report: LoadReport) -> None:
        """Tell the owner of a load that is over, on all ranks where they load together, if it was one of all."""
        whole = whole_restore(live.tables, report.items, [source.at for source in sources])
        if whole is not None and self.on_whole_restore is not None:
            self.on_whole_restore(whole.checkpoint, live.tables.values())

    def live_state(self, shard_id: int | None = None, shard_num: int | None = None) -> LiveState:
        """Return what a load fills, as it is now."""
        shard, shards = this_rank(shard_id, shard_num)
        return LiveState(self.model, self.sparse_optim, self.extra, self.io_state, shard, shards)

    def _found(self, word: str) -> tuple[Storage, Checkpoint]:
        """Return the checkpoint that a word means: an id of the own output dir goes before a path."""
        try:
            return self.storage, locate(self.storage, word)
        except (OSError, ValueError) as error:  # not an id, or not one of ours
            own = error
        try:
            return locate_path(word)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}; nor is it a checkpoint of the own output dir: {own}") from error

    def _at(self, locate: Callable[[str], tuple[Storage, Checkpoint]], path: str) -> tuple[Storage, Checkpoint]:
        """Return what is at a path; where there is nothing, look whether it is an id that ``save`` was given."""
        try:
            return locate(path)
        except CheckpointNotFoundError as error:
            try:
                is_id = list_checkpoints(self.storage).find(path) is not None
            except OSError:
                is_id = False
            if not is_id:
                raise
            hint = f"the own output dir has a checkpoint {path!r}: load(ckpt_id={path!r}) takes it"
            raise CheckpointNotFoundError(f"{error}; {hint}") from error
