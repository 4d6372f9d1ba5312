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
from recckpt.format import layout
from recckpt.format.moments import time_of
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.load import plan
from recckpt.load.loader import Loader
from recckpt.load.open_source import OpenSource, opened
from recckpt.load.other_forms import FoundDamage, alone, damaged_link, from_whole
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.rows_of_ranks import row_errors, rows_read
from recckpt.load.source import LocatedCheckpoint, locate_bank
from recckpt.manager.followed import Followed, followed
from recckpt.manager.run_state import Run
from recckpt.output_dir.index_file import warn_of_index
from recckpt.output_dir.listing import Checkpoint, list_checkpoints, locate, newest_first, usable
from recckpt.output_dir.open_files import until_whole
from recckpt.parallel.ranks import Ranks
from recckpt.policies.keep import best_id, best_in
from recckpt.types import flag

log = logging.getLogger("recckpt")

_Located = tuple[list[LocatedCheckpoint], list[Checkpoint], Problems]  # a bank, the own checkpoints, and what is wrong
_FELL_BACK = {"restore.fallbacks": 1}
_OWN = Entry(label="output_dir", is_own=True)
_TOO_LATE = (
    "hyper_parameters='keep': load_model_bank has restored the run already, and replaced its hyper-parameters; give "
    "hyper_parameters='keep' to load_model_bank"
)


def _failed(rank: int, cause: str) -> RecckptError:
    return RecckptError(f"restoring failed on rank {rank}: {cause}")


def _said(checkpoint: Checkpoint, link: str) -> str:
    if link == checkpoint.directory:
        return f"{checkpoint.ckpt_id} is damaged"
    return f"{checkpoint.ckpt_id} stands on {link}, which is damaged"


class Restorer:
    """Loads checkpoints into a run. Collective where there are several ranks; not thread-safe."""

    def __init__(self, loader: Loader, run: Run, ranks: Callable[[], Ranks], keep: Callable[[], object]) -> None:
        self._loader, self._run, self._ranks_now, self._keep = loader, run, ranks, keep
        self._resumed_with_bank = ""  # save_id of the own checkpoint, until it is asked for
        self._keeps_settings = False  # in that restore
        self._followed: list[Followed] = []

    @property
    def _ranks(self) -> Ranks:
        """Those of now; where one is alone, its error says enough by itself."""
        ranks = self._ranks_now()
        return ranks if ranks.size == 1 else ranks.telling(_failed)

    def restore(
        self,
        global_step: int | str | None,
        *,
        load_conf: Mapping[str, Any] | None,
        rng: bool,
        required: bool,
        keeps_settings: bool,
    ) -> int:
        """As :meth:`recckpt.CheckpointManager.restore`."""
        flag("rng", rng)
        flag("required", required)
        is_step = isinstance(global_step, Integral) and not isinstance(global_step, bool)
        if not is_step and global_step not in (None, "latest", "best"):
            raise TypeError(
                f"global_step must be an int or None, found {global_step!r}: 300 for 'ckpt_300', or 'latest' or 'best'"
            )
        if global_step == "latest":
            global_step = None
        entry = self._ranks.on_each(lambda: parse_load_conf(load_conf, own=True))
        entry = replace(entry, keeps_settings=keeps_settings)
        candidates = self._ranks.on_first(lambda: self._candidates(global_step, required=required))
        if not candidates:
            log.info("%s: no checkpoint to restore, starting from step 0", self._loader.storage.url)
            return 0
        whole = load_conf is None
        resumed, self._resumed_with_bank = self._resumed_with_bank, ""
        if whole and candidates[0].manifest.save_id == resumed and self._run.held_step == self._run.global_step:
            if keeps_settings and not self._keeps_settings:
                raise ValueError(_TOO_LATE)
            log.info("%s was restored with the model bank already", candidates[0].ckpt_id)
            return self._run.global_step

        def load(found: Sequence[Checkpoint]) -> LoadReport:
            return self._load(self._live(), [], found, entry, Problems(), rng=rng, holds=whole, with_bank=False)

        again = partial(self._ranks.on_first, partial(self._candidates, global_step, required=True))
        until_whole(again, load, first=candidates)
        return self._run.global_step

    def passes_over(self) -> bool:
        """Say, and log, whether there are checkpoints that were not restored; a save might rotate them away."""
        if self._run.held_step is not None:
            return False
        is_empty = self._ranks.on_first(lambda: list_checkpoints(self._loader.storage).is_empty)
        if not is_empty:
            url = self._loader.storage.url
            log.warning("%s: nothing is saved before training starts: found checkpoints that were not restored", url)
        return not is_empty

    def load_model_bank(self, bank: Sequence[Mapping[str, Any]], *, keeps_settings: bool) -> LoadReport:
        """As :meth:`recckpt.CheckpointManager.load_model_bank`."""
        own, self._keeps_settings = replace(_OWN, keeps_settings=keeps_settings), keeps_settings

        def load_from(
            candidates: Sequence[Checkpoint], problems: Problems, sources: Sequence[LocatedCheckpoint]
        ) -> LoadReport:
            live = self._live()
            with self._opened(live, sources) as of_bank:
                report = self._load(live, of_bank, candidates, own, problems, rng=True, holds=True, with_bank=True)
                self._followed = followed(live, of_bank)
            return report

        def load(found: _Located) -> LoadReport:
            sources, candidates, problems = found
            return from_whole(sources, partial(load_from, candidates, problems), self._ranks.on_first)

        first = self._ranks.on_first(lambda: self._located(bank))
        again = partial(self._ranks.on_first, partial(self._located, bank, required=bool(first[1])))
        return until_whole(again, load, first=first)

    def plan(self, bank: Sequence[Mapping[str, Any]]) -> LoadPlan:
        """As :meth:`recckpt.CheckpointManager.plan`."""

        def plan_from(problems: Problems, sources: Sequence[LocatedCheckpoint]) -> LoadPlan:
            with opened(sources) as open_sources:
                return plan(self._live(), open_sources, problems)

        def plan_one(found: _Located) -> LoadPlan:
            sources, candidates, problems = found
            own = [LocatedCheckpoint(_OWN, self._loader.storage, checkpoint) for checkpoint in candidates[:1]]
            return from_whole([*sources, *own], partial(plan_from, problems), alone)

        return until_whole(lambda: self._located(bank), plan_one)

    def reload_dynamic(self) -> list[LoadReport]:
        """As :meth:`recckpt.CheckpointManager.reload_dynamic`."""
        reports: list[LoadReport] = []

        def load_from(live: LiveState, sources: Sequence[LocatedCheckpoint]) -> LocatedCheckpoint:
            with self._opened(live, sources) as open_sources:
                reports.append(self._load_sources(live, open_sources, Problems(), rng=False))
            return sources[0]

        def load(entry: Followed, source: LocatedCheckpoint | None) -> LocatedCheckpoint | None:
            if source is not None:
                live = self._live()
                new = [entry.since_taken(source, live)]
                source = from_whole(new, partial(load_from, live), self._ranks.on_first)
                entry.take(source, live)
            return source

        for entry in self._followed:
            taken = until_whole(partial(self._ranks.on_first, entry.newer), partial(load, entry))
            if taken is not None:
                self._run.held_step = None
                log.info("loaded %s, which is new in the bank", taken.label)
        return reports

    def _load(
        self,
        live: LiveState,
        bank: Sequence[OpenSource],
        candidates: Sequence[Checkpoint],
        entry: Entry,
        problems: Problems,
        *,
        rng: bool,
        holds: bool,
        with_bank: bool,
    ) -> LoadReport:
        """Load the bank and the best of the own checkpoints that is whole, and take over its step."""
        damage = FoundDamage()
        while candidates:
            checkpoint = candidates[0]
            try:
                with self._opened(live, [LocatedCheckpoint(entry, self._loader.storage, checkpoint)]) as own:
                    report = self._load_sources(live, [*bank, *own], problems, rng=rng)
                    self._check_rows(live, checkpoint, report)
                    self._loader.tell_if_whole(live, [*bank, *own], report)
            except CorruptCheckpointError as error:
                link = damaged_link(checkpoint, error)
                if link is None and bank:
                    raise  # it is in the bank
                link = link or checkpoint.directory
                damage.note(self._loader.storage, link, error)
                candidates = self._ranks.on_first(partial(self._without, candidates, damage))
                if not candidates:
                    raise
                log.error("%s, restoring %s instead: %s", _said(checkpoint, link), candidates[0].ckpt_id, error)
                self._measure(_FELL_BACK)
                continue
            # Ranks may hold different tables, of which the bank has some.
            holds = all(self._ranks.gather(holds and all(item.offer in (None, len(bank)) for item in report.items)))
            self._take_step(checkpoint, report, holds=holds, with_bank=with_bank)
            return report
        report = self._load_sources(live, bank, problems, rng=False)
        self._run.global_step, self._run.held_step = report.global_step or self._run.global_step, None
        return report

    def _live(self) -> LiveState:
        return self._loader.live_state(self._ranks.rank, self._ranks.size)

    @contextmanager
    def _opened(self, live: LiveState, sources: Iterable[LocatedCheckpoint]) -> Iterator[list[OpenSource]]:
        """Have all ranks open what they need before any of them changes anything: it may be gone for a late one."""
        with ExitStack() as held:
            yield self._ranks.on_each(lambda: held.enter_context(opened(sources, live.needs)))

    def _load_sources(
        self, live: LiveState, sources: Sequence[OpenSource], problems: Problems, *, rng: bool
    ) -> LoadReport:
        return self._ranks.on_each(lambda: self._loader.load_sources(live, sources, problems, rng=rng))

    def _check_rows(self, live: LiveState, checkpoint: Checkpoint, report: LoadReport) -> None:
        """Refuse a chain that has given all ranks together more or fewer rows than it says; one alone has done so."""
        if self._ranks.size == 1 or not checkpoint.below:
            return
        own = rows_read(live, report, len(report.sources) - 1)
        for error in row_errors(checkpoint, self._ranks.gather(own)):
            raise error

    def _take_step(self, checkpoint: Checkpoint, report: LoadReport, *, holds: bool, with_bank: bool) -> None:
        has_step = checkpoint.manifest.step is not None
        self._run.take(checkpoint.manifest.state, counts=report.global_step is not None or not has_step)
        if report.global_step is not None:
            self._run.global_step = report.global_step
        elif not has_step:
            log.warning("%s was saved without a step: steps are counted from 0", checkpoint.ckpt_id)
            self._run.global_step = 0
        stays = holds and not checkpoint.manifest.ephemeral
        self._run.held_step = self._run.global_step if stays else None
        self._resumed_with_bank = checkpoint.manifest.save_id if with_bank else ""
        log.info("restored %s, step %d", checkpoint.ckpt_id, self._run.global_step)
        if (time := time_of(checkpoint.manifest.time)) is not None:  # its age is known before the first save
            self._measure({"last_save.time": time.timestamp()})

    def _measure(self, measured: Mapping[str, float]) -> None:
        """Tell OpenTelemetry; the first rank does for all."""
        if self._ranks.rank == 0:
            telemetry.measure(self._loader.run, measured)

    def _without(self, candidates: Sequence[Checkpoint], damage: FoundDamage) -> list[Checkpoint]:
        """Return the candidates that need nothing damaged, or other forms of them, best first."""
        wanted = {checkpoint.ckpt_id for checkpoint in candidates}
        whole = damage.whole(self._loader.storage)
        return [checkpoint for checkpoint in reversed(whole.current) if checkpoint.ckpt_id in wanted]

    def _located(self, bank: Sequence[Mapping[str, Any]], *, required: bool = False) -> _Located:
        sources, problems = locate_bank(bank)
        return sources, self._candidates(None, required=required), problems

    def _candidates(self, global_step: int | str | None, *, required: bool) -> list[Checkpoint]:
        """Return what may be restored, best first."""
        storage = self._loader.storage
        if global_step == "best":
            best = best_in(self._keep())
            manifests = [checkpoint.manifest for checkpoint in reversed(newest_first(storage))]
            return [locate(storage, best_id(manifests, best, storage.url))]
        if isinstance(global_step, Integral):
            return [locate(storage, layout.step_id(int(global_step)))]
        listing = list_checkpoints(storage)
        found = usable(storage, listing)
        if found and found[0].manifest.place < listing.newest_place:
            self._measure(_FELL_BACK)
        if required and not found:
            raise CheckpointNotFoundError(f"{storage.url}: found no committed checkpoint to restore")
        if self._ranks.rank == 0:
            found_ids = [checkpoint.ckpt_id for checkpoint in reversed(found)]
            warn_of_index(storage, found_ids, lambda: list_checkpoints(storage).ckpt_ids)
        return found
