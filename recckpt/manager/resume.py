"""How a run takes up where it was left: the newest own checkpoint that is whole, and what a model bank adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from recckpt import telemetry
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, RecckptError
from recckpt.format.moments import time_of
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.loader import Loader
from recckpt.load.needed_files import needed_files
from recckpt.load.open_source import OpenSource, opened
from recckpt.load.other_forms import KnownDamage, damaged_link
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.rows_of_ranks import row_errors, rows_read
from recckpt.load.source import LocatedBank, LocatedCheckpoint, locate_bank
from recckpt.manager.followed import Followed, followed
from recckpt.manager.run_state import Run
from recckpt.manager.start import Start, without_damage
from recckpt.near.finder import NearFinder
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.index_file import warn_of_index
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints, locate, newest_first, usable
from recckpt.parallel.ranks import Ranks
from recckpt.policies.best import best_id, best_in
from recckpt.types import flag

log = logging.getLogger("recckpt")

_FELL_BACK = {"restore.fallbacks": 1}
_OWN = Entry(label="output_dir", is_own=True)
_TOO_LATE = (
    "hyper_parameters='keep': load_model_bank has restored the run already, and replaced its hyper-parameters; give "
    "hyper_parameters='keep' to load_model_bank"
)


def _failed(rank: int, cause: str) -> RecckptError:
    return RecckptError(f"restoring failed on rank {rank}: {cause}")


def _no_bank() -> LocatedBank:
    return LocatedBank([], Problems())


class Restorer:
    """Loads checkpoints into a run. Collective where there are several ranks; not thread-safe."""

    def __init__(
        self, loader: Loader, run: Run, ranks: Callable[[], Ranks], keep: Callable[[], object], near: NearFinder | None
    ) -> None:
        self._loader, self._run, self._ranks_now, self._keep, self._near = loader, run, ranks, keep, near
        self._resumed_with_bank = ""  # save_id of the own checkpoint, until it is asked for
        self._keeps_settings = False  # in that restore
        self._followed: list[Followed] = []

    @property
    def _ranks(self) -> Ranks:
        """Those of now; where one is alone, its error says enough by itself."""
        ranks = self._ranks_now()
        return ranks if ranks.size == 1 else ranks.raising(_failed)

    def restore(
        self,
        global_step: int | str | None,
        *,
        load_conf: Mapping[str, Any] | None,
        rng: bool,
        required: bool,
        keeps_settings: bool,
        near: bool,
    ) -> int:
        """As :meth:`recckpt.CheckpointManager.restore`."""
        flag("rng", rng)
        flag("required", required)
        flag("near", near)
        is_step = isinstance(global_step, Integral) and not isinstance(global_step, bool)
        if not is_step and global_step not in (None, "latest", "best"):
            raise TypeError(
                f"global_step must be an int or None, found {global_step!r:.200}: 300 for 'ckpt_300', or 'latest' or "
                "'best'; a checkpoint of another run comes by load_model_bank([{'path': ...}])"
            )
        if global_step == "latest":
            global_step = None
        entry = self._ranks.on_each(lambda: parse_load_conf(load_conf, own=True))
        entry = replace(entry, keeps_settings=keeps_settings)
        near, is_whole = near and global_step is None, load_conf is None
        start = partial(self._start, _no_bank, global_step, near=near, is_whole=is_whole)
        first = start(required=required)
        if not first.own:
            log.info("%s: no checkpoint to restore, starting from step 0", self._loader.storage.url)
            return 0
        resumed, self._resumed_with_bank = self._resumed_with_bank, ""
        if is_whole and first.own[0].manifest.save_id == resumed and self._run.is_saved:
            if keeps_settings and not self._keeps_settings:
                raise ValueError(_TOO_LATE)
            log.info("%s was restored with the model bank already", first.own[0].ckpt_id)
            return self._run.global_step

        load = partial(self._load, entry, rng=rng, is_whole=is_whole, with_bank=False)
        self._load_first_whole(partial(start, required=True), load, first)
        return self._run.global_step

    def passes_over(self) -> bool:
        """Say, and log, whether there are checkpoints that were not restored; a save might rotate them away."""
        if self._run.is_saved:
            return False
        is_empty = self._ranks.on_first(lambda: list_checkpoints(self._loader.storage).is_empty)
        if not is_empty:
            url = self._loader.storage.url
            log.warning("%s: nothing is saved before training starts: found checkpoints that were not restored", url)
        return not is_empty

    def load_model_bank(self, bank: Sequence[Mapping[str, Any]], *, keeps_settings: bool) -> LoadReport:
        """As :meth:`recckpt.CheckpointManager.load_model_bank`."""
        entry, self._keeps_settings = replace(_OWN, keeps_settings=keeps_settings), keeps_settings
        start = partial(self._start, partial(locate_bank, bank), None)
        first = start()
        load = partial(self._load, entry, rng=True, is_whole=True, with_bank=True)
        return self._load_first_whole(partial(start, required=bool(first.own)), load, first)

    def plan(self, bank: Sequence[Mapping[str, Any]]) -> LoadPlan:
        """As :meth:`recckpt.CheckpointManager.plan`."""
        first = [] if self._near is None else [self._start(partial(locate_bank, bank), None)]

        def locate() -> LocatedBank:
            start = first.pop() if first else Start(locate_bank(bank), self._checkpoints(None))
            own = [LocatedCheckpoint(_OWN, self._loader.storage, checkpoint) for checkpoint in start.own[:1]]
            return replace(start.bank, sources=[*start.bank.sources, *own])

        return self._loader.plan_located(locate, self._ranks.rank, self._ranks.size)

    def reload_dynamic(self) -> list[LoadReport]:
        """As :meth:`recckpt.CheckpointManager.reload_dynamic`."""
        return [report for entry in self._followed for report in self._reload(entry)]

    def _reload(self, entry: Followed) -> list[LoadReport]:
        """Load what an entry has that is newer than what was taken of it, if there is something."""
        damage = KnownDamage()

        def locate() -> LocatedCheckpoint | None:
            newer = self._ranks.on_first(entry.newer)
            return newer and entry.since_taken(newer, self._live())

        def load(source: LocatedCheckpoint | None) -> list[LoadReport]:
            if source is None:
                return []
            live = self._live()
            with self._opened(live, [source]) as sources:
                report = self._load_sources(live, sources, Problems(), rng=False)
            entry.take(source, live)
            self._run.note_saved(False)
            log.info("loaded %s, which is new in the bank", source.label)
            return [report]

        def instead(source: LocatedCheckpoint | None, error: CorruptCheckpointError) -> LocatedCheckpoint | None:
            return source and self._ranks.on_first(partial(damage.other_form, source, error))

        return first_whole(locate, load, instead=instead)

    def _load_first_whole(
        self, locate: Callable[[], Start], load: Callable[[Start], LoadReport], first: Start
    ) -> LoadReport:
        """Load what was located first, or is located later, and is neither removed meanwhile nor damaged."""
        instead = partial(self._instead, KnownDamage())
        return first_whole(locate, load, instead=instead, first=first)

    def _instead(self, damage: KnownDamage, start: Start, error: CorruptCheckpointError) -> Start | None:
        """Return what to start from where something in ``start`` is damaged; None where there is nothing. Collective.

        That is another form of a checkpoint of the bank, or the best of the own checkpoints that needs nothing damaged.
        """
        other = self._ranks.on_first(lambda: without_damage(damage, self._loader.storage, start, error))
        if self._near is not None and other is not None:
            own = self._near.here(other.own)  # of rank 0, whose near dir may be another
            if own != start.own:
                own = self._near.from_first_whole(self._ranks, own, self._needed(is_whole=False))
            other = replace(other, own=own) if own or not start.own else None
        if other is not None and other.own != start.own:
            best = start.own[0]
            link = damaged_link(best, error) or best.directory
            what = "is damaged" if link == best.directory else f"stands on {link}, which is damaged"
            log.error("%s %s, restoring %s instead: %s", best.ckpt_id, what, other.own[0].ckpt_id, error)
            self._measure(_FELL_BACK)
        return other

    def _load(self, entry: Entry, start: Start, *, rng: bool, is_whole: bool, with_bank: bool) -> LoadReport:
        """Load the bank and the best of the own checkpoints, if there is one, and go on from its step."""
        live, n_bank = self._live(), len(start.bank.sources)
        own = [LocatedCheckpoint(entry, self._loader.storage, checkpoint) for checkpoint in start.own[:1]]
        with self._opened(live, [*start.bank.sources, *own]) as sources:
            report = self._load_sources(live, sources, start.bank.problems, rng=rng and bool(own))
            for source in own:
                self._check_rows(live, source.checkpoint, report)
            self._loader.note_if_whole(live, sources, report)
            if with_bank:
                self._followed = followed(live, sources[:n_bank])
        if own:
            wholes = self._ranks.gather((is_whole, is_whole and report.comes_only_from(n_bank)))
            self._go_on(own[0].checkpoint, report, wholes)
            self._resumed_with_bank = own[0].checkpoint.manifest.save_id if with_bank else ""
        else:
            self._run.start_at(report.global_step)
        return report

    def _live(self) -> LiveState:
        return self._loader.live_state(self._ranks.rank, self._ranks.size)

    @contextmanager
    def _opened(self, live: LiveState, sources: Iterable[LocatedCheckpoint]) -> Iterator[list[OpenSource]]:
        """Have all ranks open what they need before any of them changes anything: it may be gone for a late one."""
        with ExitStack() as stack:
            yield self._ranks.on_each(lambda: stack.enter_context(opened(sources, live.needs)))

    def _load_sources(
        self, live: LiveState, sources: Sequence[OpenSource], problems: Problems, *, rng: bool
    ) -> LoadReport:
        load = partial(self._loader.load_sources, live, sources, problems, rng=rng)
        return self._ranks.in_meetings(lambda meetings: load(meetings=meetings))

    def _check_rows(self, live: LiveState, checkpoint: Checkpoint, report: LoadReport) -> None:
        """Refuse a chain that has given all ranks together more or fewer rows than it says; one alone has done so."""
        if self._ranks.size == 1 or not checkpoint.below:
            return
        own = rows_read(live, report, len(report.sources) - 1)
        for error in row_errors(checkpoint, self._ranks.gather(own)):
            raise error

    def _go_on(self, checkpoint: Checkpoint, report: LoadReport, wholes: Sequence[tuple[bool, bool]]) -> None:
        """Let the run go on from a checkpoint, of which each rank says whether it has all, and its tables no more."""
        is_whole, is_saved = map(all, zip(*wholes, strict=True))
        record, step = checkpoint.manifest, report.global_step
        if step is None and record.step is None:
            log.warning("%s was saved without a step: steps are counted from 0", checkpoint.ckpt_id)
            step = 0
        near_order = record.order if is_whole and checkpoint.near_dir is not None else None
        self._run.go_on(record.state, step, near_order=near_order)
        self._run.note_saved(is_saved and not record.ephemeral and checkpoint.near_dir is None)
        log.info("restored %s, step %d", checkpoint.ckpt_id, self._run.global_step)
        if (time := time_of(record.time)) is not None:  # its age is known before the first save
            self._measure({"last_save.time": time.timestamp()})

    def _measure(self, measured: Mapping[str, float]) -> None:
        """Give figures to OpenTelemetry; the first rank does so for all."""
        if self._ranks.rank == 0:
            telemetry.measure(self._loader.run, measured)

    def _start(
        self,
        bank: Callable[[], LocatedBank],
        global_step: int | str | None,
        *,
        required: bool = False,
        near: bool = True,
        is_whole: bool = True,
    ) -> Start:
        """Return what to start from; with near saves where that is the newest, and ``near``. Collective."""
        if self._near is not None and near:
            located = self._ranks.on_first(bank)
            start = Start(located, self._near.find(self._ranks, self._usable, self._needed(is_whole=is_whole)))
        else:
            start = self._ranks.on_first(lambda: Start(bank(), self._checkpoints(global_step)))
        if required and not start.own:
            raise CheckpointNotFoundError(f"{self._loader.storage.url}: found no committed checkpoint to restore")
        return start

    def _checkpoints(self, global_step: int | str | None) -> list[Checkpoint]:
        """Return the checkpoints that may be restored, best first."""
        storage = self._loader.storage
        if global_step == "best":
            best = best_in(self._keep())
            manifests = [checkpoint.manifest for checkpoint in reversed(newest_first(storage))]
            return [locate(storage, best_id(manifests, best, storage.url))]
        if isinstance(global_step, Integral):
            return [locate(storage, self._run.id_of(global_step))]
        return self._usable()[1]

    def _needed(self, *, is_whole: bool) -> Callable[[Checkpoint], frozenset[str]]:
        """Return what says which files of a near save this rank reads."""
        return lambda save: needed_files(save.manifest, self._live().needs, is_whole=is_whole)

    def _usable(self) -> tuple[Listing, list[Checkpoint]]:
        """Return what is in the output dir, and the checkpoints that can be used, newest first."""
        storage = self._loader.storage
        listing = list_checkpoints(storage)
        if self._ranks.rank == 0:
            warn_of_index(storage, listing.ckpt_ids, lambda: list_checkpoints(storage).ckpt_ids)
        candidates = usable(storage, listing)
        if candidates and candidates[0].manifest.place < listing.newest_place:
            self._measure(_FELL_BACK)
        return listing, candidates
