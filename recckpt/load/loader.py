"""Loads of one saver: finds the checkpoints that were asked for, and fills the live model from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.registered import Registry
from recckpt.format.manifest import Manifest
from recckpt.format.names import ID, Pattern
from recckpt.live.attached import AttachedTable
from recckpt.live.library_rows import LibraryRows
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.load import load as loading
from recckpt.load.conf import Bank, Entry, as_bank, parse_load_conf
from recckpt.load.inventory import list_inventory
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource, opened
from recckpt.load.other_forms import KnownDamage
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport, Planned
from recckpt.load.source import LocatedBank, LocatedCheckpoint, locate_asked, locate_bank
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.ranks import this_rank
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.storage import Storage
from recckpt.storage.transfers import WorkDir
from recckpt.telemetry import Operation
from recckpt.types import SavableTable


@dataclass
class Loader:
    """What a saver loads into, and from where. Not thread-safe.

    Attributes:
        storage: the own output dir.
        concurrency: threads that read.
        download_dir: where to copy files that cannot be mapped, before they are read.
        has_bar: whether long loads show a bar.
        run: the job, as metrics name it.
        before_own: is called before :meth:`load` opens a checkpoint of the own output dir.
        on_whole_restore: is called with a checkpoint of the own output dir and the tables of this rank once these have
            become exactly those of the checkpoint; None where nobody asks.
        live_tables: those of the model that are not ours.
        is_resumed: whether a checkpoint of the own output dir was loaded.
    """

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    storage: Storage
    concurrency: int
    download_dir: WorkDir | None
    has_bar: bool = True
    run: str = ""
    before_own: Callable[[], object] = lambda: None
    on_whole_restore: Callable[[Checkpoint, Iterable[SavableTable]], object] | None = None
    live_tables: LiveTables = NO_TABLES
    is_resumed: bool = field(default=False, init=False)

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
        if direct_path and ckpt_id is not None:
            raise ValueError("direct_path=True needs ckpt_path, the checkpoint itself, and no ckpt_id")
        if direct_path and ckpt_path is None:
            return self.load_once(shard_id, LocatedBank([], Problems()))

        def locate() -> LocatedBank:
            storage, checkpoint = locate_asked(self.storage, ckpt_path, ckpt_id, direct_path)
            is_own = storage.url == self.storage.url
            if is_own:
                self.before_own()
            return LocatedBank([LocatedCheckpoint(replace(entry, is_own=is_own), storage, checkpoint)], Problems())

        return self.load_located(locate, shard_id)

    def load_bank(self, bank: Bank, conf: Mapping[str, Any] | None, shard_id: int | None) -> LoadReport:
        """As :meth:`recckpt.Saver.load_by_config`."""
        entries = as_bank(bank, conf)
        return self.load_located(lambda: locate_bank(entries), shard_id)

    def load_located(self, locate: Callable[[], LocatedBank], shard_id: int | None = None) -> LoadReport:
        """Load what ``locate`` returns; it is asked again where that is removed before it is read."""
        return first_whole(locate, partial(self.load_once, shard_id), instead=KnownDamage().instead)

    def plan(self, bank: Bank, conf: Mapping[str, Any] | None, shard_id: int | None) -> LoadPlan:
        """As :meth:`recckpt.Saver.plan`."""
        entries = as_bank(bank, conf)
        return self.plan_located(lambda: locate_bank(entries), shard_id)

    def plan_located(
        self, locate: Callable[[], LocatedBank], shard_id: int | None, shard_num: int | None = None
    ) -> LoadPlan:
        """Plan a load of what ``locate`` returns."""

        def plan(bank: LocatedBank) -> LoadPlan:
            with opened(bank.sources) as sources:
                return loading.plan(self.live_state(shard_id, shard_num), sources, bank.problems)

        return first_whole(locate, plan, instead=KnownDamage().instead)

    def names(self) -> list[str]:
        """As :meth:`recckpt.Saver.names`."""
        return list_inventory(self.live_state().inventory)

    def load_once(self, shard_id: int | None, bank: LocatedBank) -> LoadReport:
        """Load what was located, once; whoever calls it makes up for what is removed or damaged meanwhile."""
        live = self.live_state(shard_id)
        with opened(bank.sources, live.needs) as sources:
            alone = Meetings()  # whoever calls a saver by itself may be the only one who does
            report = self.load_sources(live, sources, bank.problems, meetings=alone)
            self.note_if_whole(live, sources, report)
            return report

    def load_sources(
        self,
        live: LiveState,
        sources: Sequence[OpenSource],
        problems: Problems,
        *,
        meetings: Meetings,
        rng: bool = False,
    ) -> LoadReport:
        """Load from checkpoints that are open; what every load and restore comes down to. Collective."""
        self.is_resumed = self.is_resumed or any(source.at.entry.is_own for source in sources)
        with self._begun(live, sources) as span:
            report = loading.load(
                live,
                sources,
                problems,
                concurrency=self.concurrency,
                download_dir=self.download_dir,
                rng=rng,
                meetings=meetings,
                has_bar=self.has_bar,
            )
            span.end(attributes={"rows": sum(report.rows_taken.values()), "bytes": report.bytes_read})
            return report

    def note_if_whole(self, live: LiveState, sources: Sequence[OpenSource], report: LoadReport) -> None:
        """Call ``on_whole_restore`` after a load, on all ranks where they load together, if it was one of all."""
        whole = _whole_restore(live.tables, report.items, [source.at for source in sources])
        if whole is not None and self.on_whole_restore is not None:
            self.on_whole_restore(whole.checkpoint, live.tables.values())

    def live_state(self, shard_id: int | None = None, shard_num: int | None = None) -> LiveState:
        """Return what a load fills, as it is now."""
        shard, shards = this_rank(shard_id, shard_num)
        return LiveState(self.model, self.sparse_optim, self.extra, self.io_state, shard, shards, self.live_tables)

    def _begun(self, live: LiveState, sources: Sequence[OpenSource]) -> Operation:
        """Return the span of a load that begins, which the first rank gives to OpenTelemetry for all."""
        records = [source.at.checkpoint.manifest for source in sources]
        attributes: dict[str, str | int] = {"id": ", ".join(record.ckpt_id for record in records)}
        if records:
            attributes["kind"] = records[-1].kind
        if records and records[-1].step is not None:
            attributes["step"] = records[-1].step
        retries, is_first = (lambda: self.storage.n_retries), live.shard == 0
        return Operation("load", attributes, run=self.run, retries=retries, is_reported=is_first)


def _whole_restore(
    tables: Mapping[str, SavableTable], items: Sequence[Planned], sources: Sequence[LocatedCheckpoint]
) -> LocatedCheckpoint | None:
    """Return the source all of which was loaded, unconverted and by its own names, None where there is none.

    Args:
        tables: those of the model.
        items: what came from where.
        sources: by their numbers.
    """
    numbers = {item.offer for item in items if item.offer is not None}
    if len(numbers) != 1 or any(item.conversion for item in items):
        return None
    source = sources[numbers.pop()]
    taken = {(item.name.text, item.source) for item in items if item.offer is not None and item.name.is_slot}
    saved = {(name, name) for name in _slots(source.checkpoint.manifest)}
    names = {table.name for table in source.checkpoint.manifest.tables}
    is_whole = _takes_all(source.entry) and taken == saved and names == tables.keys()
    return source if is_whole and not _lacks_rows(tables, source.checkpoint.manifest) else None


def _lacks_rows(tables: Mapping[str, SavableTable], manifest: Manifest) -> bool:
    """Say whether a live table has other rows than the checkpoint: some that stay as they are, or had no room."""
    rows = {table.name: table.rows for table in manifest.tables}
    live = (table for table in tables.values() if isinstance(table, AttachedTable | LibraryRows))
    return any(not table.has_all_of(rows[table.name]) for table in live)


def _takes_all(entry: Entry) -> bool:
    is_everything = entry.load == (Pattern("*"),) and not entry.exclude and entry.only is None
    return entry.is_own and is_everything and entry.hashtable_clear and entry.where == RowFilter()


def _slots(manifest: Manifest) -> set[str]:
    return {f"{table.name}@{slot}" for table in manifest.tables for slot in (ID, *(spec.name for spec in table.slots))}
