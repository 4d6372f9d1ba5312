"""How a run resumes: from its newest undamaged checkpoint, and from a model bank."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

from recckpt import telemetry
from recckpt.dense.data_loaders import is_stateful, shuffling_loaders
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.format.codec import time_of
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.loader import Loader, misses_rows, rows_read
from recckpt.load.open_source import OpenSource, needed_files, opened
from recckpt.load.plan import resolve
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.serving import Taken
from recckpt.load.source import KnownDamage, LocatedBank, LocatedCheckpoint, damaged_link, locate_bank, locate_given
from recckpt.manager.autosave import Autosave
from recckpt.manager.run_state import Run
from recckpt.output_dir.candidates import CandidateFinder, merged
from recckpt.output_dir.index_file import warn_of_index
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints, locate, newest_first, usable
from recckpt.output_dir.open_files import first_whole
from recckpt.parallel.one_process import OneProcess
from recckpt.parallel.ranks import Ranks
from recckpt.policies.keep import best_id, best_in
from recckpt.policies.when import When, as_when
from recckpt.saver import Saver
from recckpt.storage import Storage
from recckpt.text.foreign_words import answers_by
from recckpt.types import flag

log = logging.getLogger("recckpt")

HyperParameters = Literal["load", "keep"]
_FELL_BACK = {"restore.fallbacks": 1}
_OWN = Entry(label="output_dir", is_own=True)
_TOO_LATE = (
    "hyper_parameters='keep': load_model_bank has already restored the run, and replaced its hyper-parameters; pass "
    "hyper_parameters='keep' to load_model_bank"
)


class RestoreOptions(TypedDict, total=False):
    load_conf: Mapping[str, Any] | None
    required: bool
    hyper_parameters: HyperParameters
    near: bool


@dataclass(frozen=True)
class Start:
    """The possible starts of a run: the checkpoints of a bank, and its own checkpoints and near saves, best first."""

    bank: LocatedBank
    own: Sequence[Checkpoint]
    otherwise: Start | None = None  # used if everything in the bank is damaged, too


class Restorer:
    """Loads checkpoints into a run. Collective; not thread-safe."""

    def __init__(
        self,
        loader: Loader,
        run: Run,
        ranks: Callable[[], Ranks],
        keep: Callable[[], object],
        candidates: CandidateFinder,
    ) -> None:
        self._loader, self._run, self._ranks_now, self._keep, self._candidates = loader, run, ranks, keep, candidates
        self._resumed_with_bank = ""  # save_id of the own checkpoint, until restore() is called
        self._keeps_settings = False  # whether that restore keeps hyper-parameters
        self._followed: list[tuple[Entry, Taken]] = []  # dynamic entries of the bank, and what they loaded

    @property
    def _ranks(self) -> Ranks:
        """The present ranks; a single rank raises its own error unchanged."""
        ranks = self._ranks_now()
        if ranks.size == 1:
            return ranks
        return ranks.raising(lambda rank, cause: RecckptError(f"restoring failed on rank {rank}: {cause}"))

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
        for name, value in {"rng": rng, "required": required, "near": near}.items():
            flag(name, value)
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
        start = partial(self._start, lambda: LocatedBank([], Problems()), global_step, near=near, is_whole=is_whole)
        first = start(required=required)
        if not first.own:
            log.info("%s: no checkpoint to restore, starting from step 0", self._loader.storage.url)
            return 0
        resumed, self._resumed_with_bank = self._resumed_with_bank, ""
        if is_whole and first.own[0].manifest.save_id == resumed and self._run.is_saved:
            if keeps_settings and not self._keeps_settings:
                raise ValueError(_TOO_LATE)
            log.info("%s was already restored with the model bank", first.own[0].ckpt_id)
            return self._run.global_step

        load = partial(self._load, entry, rng=rng, is_whole=is_whole, with_bank=False)
        instead = partial(self._instead, KnownDamage())
        first_whole(partial(start, required=True), load, instead=instead, first=first)
        return self._run.global_step

    def passes_over(self) -> bool:
        """Return, and warn, whether checkpoints exist that were not restored, because a save might rotate them away."""
        if self._run.is_saved:
            return False
        is_empty = self._ranks.on_first(lambda: list_checkpoints(self._loader.storage).is_empty)
        if not is_empty:
            url = self._loader.storage.url
            log.warning("%s: nothing is saved before training starts: found checkpoints that were not restored", url)
        return not is_empty

    def load_model_bank(self, bank: Sequence[Mapping[str, Any]], *, keeps_settings: bool) -> LoadReport:
        entry, self._keeps_settings = replace(_OWN, keeps_settings=keeps_settings), keeps_settings
        start = partial(self._start, partial(locate_bank, bank), None)
        first = start()
        load = partial(self._load, entry, rng=True, is_whole=True, with_bank=True)
        instead = partial(self._instead, KnownDamage())
        return first_whole(partial(start, required=bool(first.own)), load, instead=instead, first=first)

    def plan(self, bank: Sequence[Mapping[str, Any]]) -> LoadPlan:
        first = [self._start(partial(locate_bank, bank), None)] if self._candidates.is_shared else []

        def locate() -> LocatedBank:
            start = first.pop() if first else Start(locate_bank(bank), self._checkpoints(None))
            own = [LocatedCheckpoint(_OWN, self._loader.storage, checkpoint) for checkpoint in start.own[:1]]
            return replace(start.bank, sources=[*start.bank.sources, *own])

        return self._loader.plan_located(locate, self._ranks.rank, self._ranks.size)

    def reload_dynamic(self) -> list[LoadReport]:
        return [report for entry, taken in self._followed for report in self._reload(entry, taken)]

    def _reload(self, entry: Entry, taken: Taken) -> list[LoadReport]:
        """Load an entry of the bank again if its path has a newer checkpoint than the one loaded."""
        damage = KnownDamage()

        def newer() -> LocatedCheckpoint | None:
            try:
                there = locate_given(entry, entry.path)
            except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, OSError):
                return None  # such a run is being written or rotated; a later call looks again
            manifest = there.checkpoint.manifest
            is_newer = manifest.save_id != taken.manifest.save_id and manifest.place > taken.manifest.place
            return there if is_newer else None

        def locate() -> LocatedCheckpoint | None:
            source = self._ranks.on_first(newer)
            return source and taken.since(source, self._live())

        def load(source: LocatedCheckpoint | None) -> list[LoadReport]:
            if source is None:
                return []
            live = self._live()
            with self._opened(live, [source]) as sources:
                load_sources = partial(self._loader.load_sources, live, sources, Problems(), rng=False)
                report = self._ranks.in_meetings(lambda meetings: load_sources(meetings=meetings))
            taken.take(source, live)
            self._run.note_saved(False)
            log.info("loaded %s, a new checkpoint in the bank", source.label)
            return [report]

        def instead(source: LocatedCheckpoint | None, error: CorruptCheckpointError) -> LocatedCheckpoint | None:
            return source and self._ranks.on_first(partial(damage.stand_in, source, error))

        return first_whole(locate, load, instead=instead)

    def _instead(self, damage: KnownDamage, start: Start, error: CorruptCheckpointError) -> Start | None:
        """Return a start that avoids the damaged parts of ``start``; None if nothing is left. Collective.

        The start has another checkpoint of the same name in the bank, or the best own one that needs no damaged file.
        """
        other = self._ranks.on_first(lambda: _without_damage(damage, self._loader.storage, start, error))
        if other is not None:
            needed = self._needed(is_whole=False)
            own = self._candidates.without_damage(self._ranks, start.own, other.own, needed)
            other = replace(other, own=own) if own or not start.own else None
        if other is not None and other.own != start.own:
            best = start.own[0]
            link = damaged_link(best, error) or best.directory
            what = "is damaged" if link == best.directory else f"is based on {link}, which is damaged"
            log.error("%s %s, restoring %s instead: %s", best.ckpt_id, what, other.own[0].ckpt_id, error)
            self._measure(_FELL_BACK)
        return other

    def _load(self, entry: Entry, start: Start, *, rng: bool, is_whole: bool, with_bank: bool) -> LoadReport:
        """Load the bank and the best own checkpoint, if any, and continue from its step."""
        live, n_bank = self._live(), len(start.bank.sources)
        own = [LocatedCheckpoint(entry, self._loader.storage, checkpoint) for checkpoint in start.own[:1]]
        with self._opened(live, [*start.bank.sources, *own]) as sources:
            load_sources = partial(self._loader.load_sources, live, sources, start.bank.problems, rng=rng and bool(own))
            report = self._ranks.in_meetings(lambda meetings: load_sources(meetings=meetings))
            if not own or not misses_rows(self._ranks, own[0].checkpoint, rows_read(live, report, n_bank)):
                self._loader.note_if_whole(live, sources, report)
            if with_bank:
                self._followed = _dynamic_in(live, sources[:n_bank])
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
        """Open the checkpoints on all ranks before any rank changes state, because they may be removed later."""
        with ExitStack() as stack:
            yield self._ranks.on_each(lambda: stack.enter_context(opened(sources, live.needs)))

    def _go_on(self, checkpoint: Checkpoint, report: LoadReport, wholes: Sequence[tuple[bool, bool]]) -> None:
        """Continue the run from a checkpoint. ``wholes``: whether each rank loaded all its rows and has no others."""
        is_whole, is_saved = map(all, zip(*wholes, strict=True))
        record, step = checkpoint.manifest, report.global_step
        if step is None and record.step is None:
            log.warning("%s was saved without a step, so steps are counted from 0", checkpoint.ckpt_id)
            step = 0
        near_order = record.order if is_whole and checkpoint.near_dir is not None else None
        self._run.go_on(record.state, step, near_order=near_order)
        self._run.note_saved(is_saved and not record.ephemeral and checkpoint.near_dir is None)
        log.info("restored %s, step %d", checkpoint.ckpt_id, self._run.global_step)
        if (time := time_of(record.time)) is not None:  # metrics show its age before the first save
            self._measure({"last_save.time": time.timestamp()})

    def _measure(self, measured: Mapping[str, float]) -> None:
        """Report metrics of the restore to OpenTelemetry, on the first rank for all ranks."""
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
        """Return the start for ``global_step``, or for the newest state, with near saves if ``near``. Collective."""
        if global_step is None and near:
            needed = self._needed(is_whole=is_whole)
            start = Start(*self._candidates.find(self._ranks, bank, self._usable, needed))
        else:
            start = self._ranks.on_first(lambda: Start(bank(), self._checkpoints(global_step)))
        if required and not start.own:
            raise CheckpointNotFoundError(f"{self._loader.storage.url}: found no committed checkpoint to restore")
        return start

    def _checkpoints(self, global_step: int | str | None) -> list[Checkpoint]:
        storage = self._loader.storage
        if global_step == "best":
            best = best_in(self._keep())
            manifests = [checkpoint.manifest for checkpoint in reversed(newest_first(storage))]
            return [locate(storage, best_id(manifests, best, storage.url))]
        if isinstance(global_step, Integral):
            return [locate(storage, self._run.id_of(global_step))]
        return self._usable()[1]

    def _needed(self, *, is_whole: bool) -> Callable[[Checkpoint], frozenset[str]]:  # files of a near save
        return lambda save: needed_files(save.manifest, self._live().needs, is_whole=is_whole)

    def _usable(self) -> tuple[Listing, list[Checkpoint]]:
        """Return the listing of the output dir, and its usable checkpoints, newest first."""
        storage = self._loader.storage
        listing = list_checkpoints(storage)
        if self._ranks.rank == 0:
            warn_of_index(storage, listing.ckpt_ids, lambda: list_checkpoints(storage).ckpt_ids)
        candidates = usable(storage, listing)
        if candidates and candidates[0].manifest.place < listing.newest_place:
            self._measure(_FELL_BACK)
        return listing, candidates


def _dynamic_in(live: LiveState, bank: Sequence[OpenSource]) -> list[tuple[Entry, Taken]]:
    if not any(source.at.entry.is_dynamic for source in bank):
        return []
    items = resolve(live.inventory, [source.offer(live.inventory) for source in bank], Problems())
    dynamic = []
    for number, source in enumerate(bank):
        if source.at.entry.is_dynamic:
            names = frozenset(item.name for item in items if item.offer == number)
            dynamic.append((replace(source.at.entry, only=names), Taken(names, source.at, live)))
    return dynamic


def _without_damage(damage: KnownDamage, storage: Storage, start: Start, error: CorruptCheckpointError) -> Start | None:
    """Return ``start`` without the checkpoint that an error is about, in the bank or the own output dir.

    All ranks still have to check the near saves of the result.
    """
    link = damaged_link(start.own[0], error) if start.own else None
    bank = damage.instead(start.bank, error)
    if bank is None and link is None and (start.bank.sources or not start.own):
        return start.otherwise  # the damage is in the bank
    if bank is not None and link is None:
        return replace(start, bank=bank)
    known = damage if bank is None else KnownDamage()
    link = link or start.own[0].directory
    known.note(storage, link, error)
    ckpt_ids = {checkpoint.ckpt_id for checkpoint in start.own}
    saves = [save for save in start.own if save.near_dir is not None]
    saves = [save for save in saves if link not in {part.directory for part in save.links}]
    own = merged([each for each in reversed(known.whole(storage).current) if each.ckpt_id in ckpt_ids], saves)
    without = replace(start, own=own, otherwise=None) if own else None
    return without if bank is None else replace(start, bank=bank, otherwise=without)  # both may have this directory


class Resumable(OneProcess):
    """The loads of a :class:`recckpt.CheckpointManager`; each waits for the running save, and for other threads."""

    _saver: Saver
    _run: Run
    _autosave: Autosave
    _restorer: Restorer
    _ranks: Callable[[], Ranks]
    _looks_for_loaders = True  # loaders among the caller's variables

    @abstractmethod
    def _turn(self) -> AbstractContextManager[Any]: ...

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Let the run continue from the state that the block loads. Waits for running saves first. Collective.

        Requests to forget are carried out before the output dir is read.
        """
        with self._turn():
            self._autosave.settle_on_all()
            self._ranks().gather(None)  # raises here if other ranks save; else all would wait for the timeout
            self._saver.trainers.check_restore(is_logged=self._ranks().rank == 0)
            left = self._saver.removal.before_restore(self._ranks())
            yield
            self._saver.removal.after_restore(left, self._saver.model)
            self._autosave.start()

    def _warn_of_loaders(self) -> None:
        """Warn once of loaders in the calling code whose order is not saved, unless some loader is saved."""
        looks, self._looks_for_loaders = self._looks_for_loaders, False
        if not looks or len(self._saver.loader.io_state) or self._ranks().rank:
            return
        for name, loader in shuffling_loaders(sys._getframe()).items():
            made_stateful = f"{name} = torchdata.stateful_dataloader.StatefulDataLoader(...) and "
            log.warning(
                "%s: a %s that shuffles, but its position is not saved: a resumed run starts its data again, in "
                "another order; to save the position, use %sattach(..., loader=%s); loader=() disables this warning",
                *(name, type(loader).__name__, "" if is_stateful(loader) else made_stateful, name),
            )

    @answers_by("restore(), or restore(300); of another run load_model_bank([{'path': ...}])")
    def restore(
        self,
        global_step: int | Literal["latest", "best"] | None = None,
        *,
        load_conf: Mapping[str, Any] | None = None,
        rng: bool = True,
        required: bool = False,
        hyper_parameters: HyperParameters = "load",
        near: bool = True,
    ) -> int:
        """Restore the newest committed checkpoint or near save, or the checkpoint of one step; return its step.

        If the newest checkpoint is damaged, logs an error and restores the newest one that does not need the damaged
        files.

        Args:
            global_step: the step to restore; None or "latest" for the newest; "best" by ``Best`` in ``max_keep``.
            load_conf: what to restore, as in :meth:`recckpt.Saver.load`; None for everything.
            rng: whether to restore the random generators of torch, CUDA, numpy and Python.
            required: whether it is an error if there is nothing to restore.
            hyper_parameters: ``"load"`` takes them from the checkpoint, ``"keep"`` keeps those of all optimizers
                and the base rates of their schedulers; see docs/resume.md.
            near: whether to consider near saves, if the saver makes them; never with a step.

        Returns:
            The step; 0 if there was nothing to restore.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint, and ``global_step`` or ``required`` was given.
            CorruptCheckpointError: the checkpoint of ``global_step``, or every checkpoint, is damaged.
            FormatVersionError: a newer recckpt wrote one of the checkpoints.
            StateMismatchError: the checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError: another process removed each checkpoint before it was read, several times in a row.
            PartlyLoadedError: reading failed after tables with rows had been changed; restore again.
            ValueError: ``hyper_parameters`` is neither, or :meth:`load_model_bank` has already replaced them.
        """
        keeps = _keeps(hyper_parameters)
        if load_conf is None:
            self._warn_of_loaders()
        with self._loading():
            return self._restorer.restore(
                global_step, load_conf=load_conf, rng=rng, required=required, keeps_settings=keeps, near=near
            )

    def load_model_bank(
        self,
        bank: Sequence[Mapping[str, Any]] | None,
        *,
        hyper_parameters: HyperParameters = "load",
        reload_interval: int | When | None = None,
    ) -> LoadReport:
        """Start from other runs, or resume: the own output dir counts as the last entry of the bank.

        Call this method before :meth:`restore`, which then does nothing.

        Args:
            bank: entries ``{"path": ..., "load": [...], "exclude": [...], ...}``; see docs/load.md. None means no
                entries.
            hyper_parameters: as for :meth:`restore`, if the run resumes.
            reload_interval: when :meth:`reload_dynamic` looks for newer checkpoints: steps or a policy; None for after
                each save that :meth:`step`, :meth:`window` or :meth:`epoch` begins.

        Raises:
            ValueError: ``hyper_parameters`` or ``reload_interval`` is invalid.
            LoadConfError: keys, names or paths do not exist; lists all of them, before anything is changed.
            StateMismatchError: state does not fit the model; lists all of it.
            CheckpointNotFoundError: a path has no committed checkpoint.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError, PartlyLoadedError: as for :meth:`restore`.
        """
        keeps = _keeps(hyper_parameters)
        reload = None if reload_interval is None else as_when(reload_interval, "reload_interval")
        self._warn_of_loaders()
        with self._loading():
            self._autosave.reload_when(reload)
            return self._restorer.load_model_bank([] if bank is None else bank, keeps_settings=keeps)

    def plan(self, bank: Sequence[Mapping[str, Any]] | None) -> LoadPlan:
        """Return the plan of :meth:`load_model_bank`. Reads no rows and changes nothing.

        Raises:
            LoadConfError, StateMismatchError, CheckpointNotFoundError: as for :meth:`load_model_bank`.
        """
        with self._turn():
            return self._restorer.plan([] if bank is None else bank)

    def reload_dynamic(self) -> list[LoadReport]:
        """Load again the dynamic entries of the bank whose path now has another checkpoint than the loaded one.

        Called by :meth:`step`, :meth:`window` and :meth:`epoch` when they save, or by the ``reload_interval`` of
        :meth:`load_model_bank`. An entry loads the names that it provided when the bank was loaded.

        Raises:
            StateMismatchError: the new checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError, PartlyLoadedError: as for :meth:`restore`.
        """
        with self._turn():
            return self._restorer.reload_dynamic()


def _keeps(hyper_parameters: object) -> bool:
    if hyper_parameters not in get_args(HyperParameters):
        raise ValueError(f"hyper_parameters must be 'load' or 'keep', found {hyper_parameters!r:.100}")
    return hyper_parameters == "keep"
