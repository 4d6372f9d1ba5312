"""The manager: counts steps, saves at intervals, and takes up a run where its newest checkpoint left it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from recckpt import layout, pins
from recckpt.arguments import positive_int
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, RecckptError
from recckpt.group import together
from recckpt.listing import Checkpoint, locate, newest_first
from recckpt.load import plan
from recckpt.load_conf import Entry, parse_load_conf
from recckpt.manifest import Manifest, Scalar
from recckpt.plan_report import LoadPlan, LoadReport
from recckpt.problems import Problems
from recckpt.removal import until_whole
from recckpt.saver import Saver
from recckpt.sources import Source, located_bank, open_files
from recckpt.warm_start import Followed, followed

log = logging.getLogger("recckpt")
_T = TypeVar("_T")

_Located = tuple[list[Source], list[Checkpoint], Problems]  # a bank, the own checkpoints, and what is wrong
_OWN = Entry(label="output_dir", is_own=True)


class CheckpointManager:
    """Saves a run every ``save_interval`` steps as ``ckpt_<step>``, and restores it. Not thread-safe.

    Args:
        saver: what is saved, and where.
        save_interval: steps between checkpoints.
        shard_id: number of this rank.
        shard_num: number of ranks; with more than 1, ``step``, ``save`` and ``restore`` are collective.

    Raises:
        ValueError: ``save_interval`` is not an int of at least 1.
    """

    def __init__(self, saver: Saver, save_interval: int, *, shard_id: int = 0, shard_num: int = 1) -> None:
        self._saver = saver
        self._save_interval = positive_int("save_interval", save_interval)
        self._shard_id, self._shard_num = shard_id, shard_num
        self._global_step = 0
        self._held_step: int | None = None  # the step whose state is in a checkpoint
        self._resumed_with_bank = ""  # save_id of the own checkpoint, until it is asked for
        self._followed: list[Followed] = []

    @property
    def saver(self) -> Saver:
        """What is saved, and where."""
        return self._saver

    @property
    def save_interval(self) -> int:
        """Steps between checkpoints."""
        return self._save_interval

    @property
    def global_step(self) -> int:
        """Steps so far, those of the restored run included."""
        return self._global_step

    def register_for_checkpointing(self, name: str, obj: Any) -> None:
        """Save an object beside the model; see :meth:`recckpt.Saver.register_for_checkpointing`."""
        self._saver.register_for_checkpointing(name, obj)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset; see :meth:`recckpt.Saver.register_io_state`."""
        self._saver.register_io_state(name, obj)

    def step(self, *, state: Mapping[str, Scalar] | None = None) -> None:
        """Count a step, and save if it is a multiple of ``save_interval``; call it after each batch.

        Args:
            state: numbers and strings for readers without torch, such as metrics; kept with the checkpoint, if this
                step makes one.

        Raises:
            SaveFailedError: nothing was committed; the next save may well work.
        """
        self._global_step += 1
        if self._global_step % self._save_interval == 0:
            self.save(state=state)
            self.reload_dynamic()

    def save(self, *, state: Mapping[str, Scalar] | None = None) -> Manifest | None:
        """Save this step now; None, and a log line, where it is in a checkpoint already.

        A checkpoint of this step that another branch of the run left behind is superseded.

        Args:
            state: numbers and strings for readers without torch, such as metrics.

        Raises:
            SaveFailedError: nothing was committed; the next save may well work.
        """
        ckpt_id = layout.step_id(self._global_step)
        if self._held_step == self._global_step:
            log.info("%s is saved already", ckpt_id)
            return None
        manifest = self._saver.save(
            ckpt_id, self._shard_id, self._shard_num, step=self._global_step, state=state, overwrite=True
        )
        self._held_step = self._global_step
        return manifest

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step until it is unpinned, whatever ``max_keep`` says. Not collective.

        Raises:
            CheckpointNotFoundError: this step is not committed.
        """
        pins.pin(self._saver.storage, layout.step_id(step))

    def unpin(self, step: int) -> None:
        """Let rotation have the checkpoint of a step again, at the next save; no error where it is not pinned."""
        pins.unpin(self._saver.storage, layout.step_id(step))

    def restore(
        self,
        global_step: int | None = None,
        *,
        load_conf: Mapping[str, Any] | None = None,
        rng: bool = True,
        required: bool = False,
    ) -> int:
        """Bring back the newest committed checkpoint, or that of one step, and return its step.

        A newest checkpoint that turns out damaged is passed over, with an error in the log, for the one before.

        Args:
            global_step: the step to restore; None for the newest.
            load_conf: what to take; None for everything.
            rng: whether to restore the random generators of torch, CUDA, numpy and Python.
            required: whether it is an error that there is nothing to restore.

        Returns:
            The step; 0 where there was nothing to restore.

        Raises:
            CheckpointNotFoundError: no such checkpoint, and ``global_step`` or ``required`` was given.
            CorruptCheckpointError: the checkpoint of ``global_step``, or every one, is damaged.
            FormatVersionError: a newer recckpt wrote one of them.
            StateMismatchError: the checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError: time and again another process removed it before it was read.
            PartlyLoadedError: reading failed when tables with rows had been changed; restoring again mends that.
        """
        entry = parse_load_conf(load_conf, own=True)
        candidates = self._on_all_ranks(lambda: self._candidates(global_step, required=required))
        if not candidates:
            log.info("%s: no checkpoint to restore, starting from step 0", self._saver.output_dir)
            return 0
        whole = load_conf is None
        resumed, self._resumed_with_bank = self._resumed_with_bank, ""
        if whole and candidates[0].manifest.save_id == resumed and self._held_step == self._global_step:
            log.info("%s was restored with the model bank already", candidates[0].ckpt_id)
            return self._global_step
        again = partial(self._on_all_ranks, partial(self._candidates, global_step, required=True))
        until_whole(again, partial(self._load, [], entry=entry, rng=rng, holds=whole), first=candidates)
        return self._global_step

    def load_model_bank(self, bank: Sequence[Mapping[str, Any]]) -> LoadReport:
        """Start from other runs, or resume: the own output dir counts as the very last entry of the bank.

        Call it before :meth:`restore`, which then has nothing left to do.

        Args:
            bank: entries ``{"path": ..., "load": [...], "exclude": [...], ...}``; see docs/warm-start.md.

        Raises:
            LoadConfError: keys, names or paths that do not exist; all of them, before anything is changed.
            StateMismatchError: state that does not fit the model; all of it.
            CheckpointNotFoundError: a path holds no committed checkpoint.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`restore`.
        """

        def load(found: _Located) -> LoadReport:
            sources, candidates, problems = found
            report = self._load(sources, candidates, _OWN, rng=True, holds=True, problems=problems)
            self._followed = followed(self._saver.target(self._shard_id, self._shard_num).inventory(), sources)
            return report

        first = self._on_all_ranks(lambda: self._located(bank))
        again = partial(self._on_all_ranks, partial(self._located, bank, required=bool(first[1])))
        return until_whole(again, load, first=first)

    def plan(self, bank: Sequence[Mapping[str, Any]]) -> LoadPlan:
        """Say what :meth:`load_model_bank` would do; reads no rows and changes nothing.

        Raises:
            LoadConfError, StateMismatchError, CheckpointNotFoundError: as it would.
        """

        def plan_one(found: _Located) -> LoadPlan:
            sources, candidates, problems = found
            own = [Source(_OWN, self._saver.storage, checkpoint) for checkpoint in candidates[:1]]
            return plan(self._saver.target(self._shard_id, self._shard_num), [*sources, *own], problems)

        return until_whole(lambda: self._located(bank), plan_one)

    def reload_dynamic(self) -> list[LoadReport]:
        """Load the dynamic entries of the bank whose path has another checkpoint now than the one taken.

        Called by :meth:`step` whenever it saves. An entry takes the names that it won when the bank was loaded.

        Raises:
            StateMismatchError: the new checkpoint does not fit the model; nothing has been changed.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`restore`.
        """
        reports = []

        def load(source: Source | None) -> Source | None:
            reports.extend([self._load_sources([source], rng=False)] if source else [])
            return source

        for number, entry in enumerate(self._followed):
            taken = until_whole(partial(self._on_all_ranks, entry.newer), load)
            if taken is not None:
                self._followed[number] = replace(entry, taken=taken)
                self._held_step = None
                log.info("loaded %s, which is new in the bank", taken.label)
        return reports

    def _load(
        self,
        bank: Sequence[Source],
        candidates: Sequence[Checkpoint],
        entry: Entry,
        *,
        rng: bool,
        holds: bool,
        problems: Problems | None = None,
    ) -> LoadReport:
        """Load the bank and the best of the own checkpoints that is whole, and take over its step."""
        for older, checkpoint in enumerate(candidates, start=1):
            own = Source(entry, self._saver.storage, checkpoint)
            try:
                report = self._load_sources([*bank, own], rng=rng, problems=problems)
            except CorruptCheckpointError as error:
                if older == len(candidates):
                    raise
                next_id = candidates[older].ckpt_id
                log.error("%s is damaged, restoring %s instead: %s", checkpoint.ckpt_id, next_id, error)
                continue
            holds = holds and all(item.offer in (None, len(bank)) for item in report.items)
            self._take_step(checkpoint, report, holds=holds, with_bank=bool(bank))
            return report
        report = self._load_sources(bank, rng=False, problems=problems)
        self._global_step, self._held_step = report.global_step or self._global_step, None
        return report

    def _load_sources(self, sources: Sequence[Source], *, rng: bool, problems: Problems | None = None) -> LoadReport:
        reports: list[LoadReport] = []  # that of this rank, since each tells of its own rows

        def load() -> None:
            shards = {"shard_id": self._shard_id, "shard_num": self._shard_num}
            reports.append(self._saver.load_sources(sources, **shards, rng=rng, problems=problems))

        # All ranks open all files before any of them changes anything: they may be gone for one that comes late.
        self._on_all_ranks(partial(open_files, sources))
        self._on_all_ranks(load)
        return reports[0]

    def _take_step(self, checkpoint: Checkpoint, report: LoadReport, *, holds: bool, with_bank: bool) -> None:
        if report.global_step is not None:
            self._global_step = report.global_step
        elif checkpoint.manifest.step is None:
            log.warning("%s was saved without a step: steps are counted from 0", checkpoint.ckpt_id)
            self._global_step = 0
        self._held_step = self._global_step if holds else None
        self._resumed_with_bank = checkpoint.manifest.save_id if with_bank else ""
        log.info("restored %s, step %d", checkpoint.ckpt_id, self._global_step)

    def _on_all_ranks(self, work: Callable[[], _T]) -> _T:
        """Do work on every rank and return what rank 0 found; if it fails on any, raise on all."""
        if self._shard_num == 1:
            return work()
        group = self._saver.group(self._shard_id, self._shard_num)
        return together(group, work, lambda rank, cause: RecckptError(f"restoring failed on rank {rank}: {cause}"))[0]

    def _located(self, bank: Sequence[Mapping[str, Any]], *, required: bool = False) -> _Located:
        sources, problems = located_bank(bank)
        return sources, self._candidates(None, required=required), problems

    def _candidates(self, global_step: int | None, *, required: bool = False) -> list[Checkpoint]:
        """Return what may be restored, best first."""
        storage = self._saver.storage
        if global_step is not None:
            return [locate(storage, layout.step_id(global_step))]
        found = newest_first(storage)
        if required and not found:
            raise CheckpointNotFoundError(f"{storage.url}: found no committed checkpoint to restore")
        return found
