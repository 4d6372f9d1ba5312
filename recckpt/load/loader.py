"""Loads of one saver: finds the requested checkpoints, and fills the live model from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.registered import Registry
from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import Slice
from recckpt.format.names import ID, Pattern
from recckpt.live.attached import AttachedTable
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.load import load as loading
from recckpt.load.conf import Bank, as_bank, parse_load_conf
from recckpt.load.inventory import list_inventory
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource, opened
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.source import KnownDamage, LocatedBank, LocatedCheckpoint, locate_asked, locate_bank
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import first_whole
from recckpt.parallel.one_process import OneProcess
from recckpt.parallel.ranks import Meetings, Ranks, this_rank
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.owners import IdBlock, OwnedIds
from recckpt.storage import Storage
from recckpt.storage.transfers import WorkDir
from recckpt.telemetry import Operation
from recckpt.text import count
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")
_MISSED = (
    "%s: table %r: the ranks of this run hold %s of its %s rows; the other rows are in no rank's slice, and later "
    "checkpoints will not have them: give the tables of n ranks the slices gen_slice(0, n) to gen_slice(n - 1, n), or "
    "none if there is one rank"
)
Counts = Mapping[tuple[str, str], tuple[OwnedIds, int]]  # table there and here -> ids of a rank, rows of them


def rows_read(live: LiveState, report: LoadReport, number: int) -> Counts:
    """Return the number of rows read from a source for each table that only this source has filled."""
    filled = {item.name.table for item in report.items if item.name.is_slot and item.offer == number}
    filled -= {item.name.table for item in report.items if item.name.is_slot and item.offer not in (None, number)}
    counts = {}
    for item in report.items:
        here, there = item.name.table, item.source.rpartition("@")[0]
        if item.name.slot != ID or item.offer != number or here not in filled or item.thing.tensor:
            continue
        n_rows = report.rows_taken.get(here, 0) + report.rows_filtered.get(here, 0)
        counts[there, here] = live.targets[here].owned_ids, n_rows
    return counts


def row_errors(checkpoint: Checkpoint, of_ranks: Sequence[Counts]) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each table whose ranks own all ids, but have read more or fewer rows than were saved."""
    for key in dict.fromkeys(key for counts in of_ranks for key in counts):
        rows = dict(counts[key] for counts in of_ranks if key in counts)
        spans = sorted(span for owned in rows for span in _spans(owned) if span[0] < span[1])
        meets = all(before[1] == after[0] for before, after in pairwise(spans)) and len({*map(type, rows)}) == 1
        is_all_ids = meets and bool(spans) and spans[0][0] == 0 and spans[-1][1] == 1  # copies: only once
        entry = checkpoint.manifest.named_table(key[0])
        if is_all_ids and sum(rows.values()) != entry.rows:
            yield count_error(checkpoint.directory, entry.name, entry.rows, sum(rows.values()))


def misses_rows(ranks: Ranks, checkpoint: Checkpoint, of_rank: Counts) -> bool:
    """Return whether some rows of a checkpoint belong to no rank, and warn. Collective.

    Raises CorruptCheckpointError if the ranks own all ids of a table, and have read more or fewer rows than it has.
    """
    rows = ranks.gather(of_rank)
    # A rank alone has looked at the rows of its chain itself; of several, all together have as many as it says.
    for error in row_errors(checkpoint, rows) if checkpoint.below and ranks.size > 1 else ():
        raise error
    of_table: dict[tuple[str, str], dict[OwnedIds, int]] = {}
    for key, (owned, n_rows) in (item for counts in rows for item in counts.items()):
        of_table.setdefault(key, {})[owned] = n_rows  # copies count once
    saved, n_missed = {entry.name: entry.rows for entry in checkpoint.manifest.tables}, 0
    for (table, _), owned_rows in of_table.items():
        if (n_rows := sum(owned_rows.values())) < saved[table]:
            n_missed += 1
            if ranks.rank == 0:
                log.warning(_MISSED, checkpoint.ckpt_id, table, count(n_rows), count(saved[table]))
    return n_missed > 0


def _spans(owned: OwnedIds) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield the owned fractions of all buckets, or of all ids."""
    if isinstance(owned, Slice):
        yield Fraction(owned.begin, owned.size), Fraction(owned.end, owned.size)
    elif isinstance(owned, IdBlock):
        yield Fraction(owned.number, owned.size), Fraction(owned.number + 1, owned.size)
    else:
        for begin, end, _ in owned.spans:
            yield Fraction(begin + (1 << 63), 1 << 64), Fraction(end + (1 << 63), 1 << 64)


@dataclass
class Loader:
    """The objects that a saver loads into, and the default source. Not thread-safe.

    Attributes:
        storage: the own output dir.
        download_dir: directory to which files that cannot be memory-mapped are copied before reading.
        run: the name of the job in metrics.
        before_load: called with the output dirs of a load, before anything in them is opened.
        on_whole_restore: called with a checkpoint of the own output dir and this rank's tables, once the tables equal
            it.
        is_resumed: whether a checkpoint of the own output dir was loaded.
        loaded_step: the step that the last load took over; None if no load did.
    """

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    storage: Storage
    concurrency: int
    download_dir: WorkDir | None
    run: str = ""
    before_load: Callable[[Sequence[Storage]], object] = lambda storages: None
    on_whole_restore: Callable[[Checkpoint, Iterable[SavableTable]], object] | None = None
    live_tables: LiveTables = NO_TABLES
    after_load: Callable[[], object] = lambda: None
    is_resumed: bool = field(default=False, init=False)
    loaded_step: int | None = field(default=None, init=False)

    def load_located(self, locate: Callable[[], LocatedBank], shard_id: int | None = None) -> LoadReport:
        """Load the bank that ``locate`` returns. If a checkpoint is removed before the read, call ``locate`` again."""
        return first_whole(locate, partial(self.load_once, shard_id), instead=KnownDamage().instead)

    def plan_located(
        self, locate: Callable[[], LocatedBank], shard_id: int | None, shard_num: int | None = None
    ) -> LoadPlan:
        """Plan a load of the bank that ``locate`` returns."""

        def plan(bank: LocatedBank) -> LoadPlan:
            with opened(bank.sources) as sources:
                return loading.plan(self.live_state(shard_id, shard_num), sources, bank.problems)

        return first_whole(locate, plan, instead=KnownDamage().instead)

    def load_once(self, shard_id: int | None, bank: LocatedBank) -> LoadReport:
        """Load a located bank, without retries; the caller handles removal and damage."""
        self.before_load([source.storage for source in bank.sources])
        live = self.live_state(shard_id)
        with opened(bank.sources, live.needs) as sources:
            alone = Meetings()  # a rank that calls a saver directly may be the only one that does
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
        """Load from open checkpoints; every load and restore ends here. Collective."""
        self.is_resumed = self.is_resumed or any(source.at.entry.is_own for source in sources)
        records = [source.at.checkpoint.manifest for source in sources]
        attributes: dict[str, str | int] = {"id": ", ".join(record.ckpt_id for record in records)}
        if records:
            attributes["kind"] = records[-1].kind
        if records and records[-1].step is not None:
            attributes["step"] = records[-1].step
        retries, is_first = (lambda: self.storage.n_retries), live.shard == 0  # rank 0 reports for all ranks
        with Operation("load", attributes, run=self.run, retries=retries, is_reported=is_first) as span:
            report = loading.load(
                live,
                sources,
                problems,
                concurrency=self.concurrency,
                download_dir=self.download_dir,
                rng=rng,
                meetings=meetings,
            )
            self.after_load()
            self.loaded_step = self.loaded_step if report.global_step is None else report.global_step
            span.end(attributes={"rows": sum(report.rows_taken.values()), "bytes": report.bytes_read})
            return report

    def note_if_whole(self, live: LiveState, sources: Sequence[OpenSource], report: LoadReport) -> None:
        """Call ``on_whole_restore`` if a load was whole; after loads of several ranks, on all of them.

        A load is whole if everything comes from one source, unconverted and under the same names, and no live table
        has other rows. Of several ranks, the caller has checked that together they have all rows.
        """
        numbers = {item.offer for item in report.items if item.offer is not None}
        if self.on_whole_restore is None or len(numbers) != 1 or any(item.conversion for item in report.items):
            return
        number = numbers.pop()
        at = sources[number].at
        entry, saved = at.entry, {table.name: table for table in at.checkpoint.manifest.tables}
        is_everything = entry.load == (Pattern("*"),) and not entry.exclude and entry.only is None
        if not (entry.is_own and is_everything and entry.hashtable_clear and entry.where == RowFilter()):
            return
        own = rows_read(live, report, number) if live.shards == 1 else {}
        if any(n_rows < saved[there].rows for (there, _), (_, n_rows) in own.items()):
            return
        taken = {(i.name.text, i.source) for i in report.items if i.offer is not None and i.name.is_slot}
        slots = [f"{one.name}@{slot}" for one in saved.values() for slot in (ID, *(spec.name for spec in one.slots))]
        if taken != {(name, name) for name in slots} or saved.keys() != live.tables.keys():
            return
        attached = (table for table in live.tables.values() if isinstance(table, AttachedTable))
        if all(table.has_all_of(saved[table.name].rows) for table in attached):
            self.on_whole_restore(at.checkpoint, live.tables.values())

    def live_state(self, shard_id: int | None = None, shard_num: int | None = None) -> LiveState:
        """Return the objects that a load fills, looked up now."""
        shard, shards = this_rank(shard_id, shard_num)
        return LiveState(self.model, self.sparse_optim, self.extra, self.io_state, shard, shards, self.live_tables)


class Loads(OneProcess):
    """The loading half of a saver."""

    loader: Loader

    def load(
        self,
        ckpt_path: str | None = None,
        ckpt_id: str | None = None,
        load_conf: Mapping[str, Any] | None = None,
        shard_id: int | None = None,
        direct_path: bool = False,
    ) -> LoadReport:
        """Load a checkpoint into the model and the registered objects.

        Args:
            ckpt_path: an id of the own output dir, an output dir, or a checkpoint itself; None for the own output dir.
            ckpt_id: which checkpoint in it; None for the newest.
            load_conf: what to load, as an entry of a bank without ``path``; None for everything.
            shard_id: number of this rank, to choose its dataset positions; None as in :meth:`save`.
            direct_path: whether ``ckpt_path`` must be a checkpoint itself; then None loads nothing.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            LoadConfError, StateMismatchError: requested state does not exist or does not fit; nothing has changed.
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed before it was read.
            PartlyLoadedError: reading failed after tables with rows had begun to change.
        """
        with self._turn():
            loader, entry = self.loader, parse_load_conf(load_conf)
            if direct_path and ckpt_id is not None:
                raise ValueError("direct_path=True needs ckpt_path, the checkpoint itself, and no ckpt_id")
            if direct_path and ckpt_path is None:
                return loader.load_once(shard_id, LocatedBank([], Problems()))

            def locate() -> LocatedBank:
                storage, checkpoint = locate_asked(loader.storage, ckpt_path, ckpt_id, direct_path)
                own_entry = replace(entry, is_own=storage.url == loader.storage.url)
                return LocatedBank([LocatedCheckpoint(own_entry, storage, checkpoint)], Problems())

            return loader.load_located(locate, shard_id)

    def load_by_config(
        self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None
    ) -> LoadReport:
        """Load from a model bank: entries with a ``path``. If several entries offer a name, the last one is used.

        Args:
            bank: a list of entries, or one entry, or the path of one; see docs/load.md. None loads nothing.
            conf: the rest of the entry, if ``bank`` is a path.
            shard_id: number of this rank; None as in :meth:`save`.

        Raises:
            Exception: as :meth:`load`; LoadConfError and StateMismatchError list all problems.
        """
        with self._turn():
            entries = as_bank(bank, conf)
            return self.loader.load_located(lambda: locate_bank(entries), shard_id)

    def plan(self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None) -> LoadPlan:
        """Return the plan of :meth:`load_by_config`, or raise the same errors. Reads no rows, and changes nothing."""
        with self._turn():
            entries = as_bank(bank, conf)
            return self.loader.plan_located(lambda: locate_bank(entries), shard_id)

    def names(self) -> list[str]:
        """Return one line per name that can be loaded, with its group, dtype and so on, for ``recckpt plan``."""
        with self._turn():
            return list_inventory(self.loader.live_state().inventory)
