"""Finds near saves that a restore may use besides checkpoints: all their bytes must be intact, on any hosts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.format.near_seal import NearList
from recckpt.near.bringing import Bringing, Place, WholeFiles, lacking, whole_files
from recckpt.near.moving import move
from recckpt.near.near_dir import NearDir, NotedHost
from recckpt.near.views import HostView, SeenSave, complete, counting, look_together, seen
from recckpt.output_dir.candidates import CandidateFinder, Needed, Usable, merged
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.notes import one_of_the_hosts
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage
from recckpt.text import plural

log = logging.getLogger("recckpt")
_VOID = "it is no longer valid: ids were forgotten since it was made, or another process has taken over the output dir"
_NO_BASE = "its base checkpoint is damaged, missing or unreadable"
_LOOKS = 3  # listings to try, if listed files are gone when they are read
_T = TypeVar("_T")


def skipped(
    seen: Iterable[SeenSave], near_list: NearList, candidates: Sequence[Checkpoint]
) -> list[tuple[Checkpoint, str]]:
    """Return the unusable near saves newer than the first candidate, oldest first, each with the reason."""
    newest = candidates[0].manifest.order if candidates else (0, 0)
    saves = []
    for save, files in sorted(seen, key=lambda each: each[0].manifest.order):
        record = save.manifest
        if record.order > newest and near_list.is_of_run(record.save_id):
            n_missing = len({file.name for file in record.files} - files)
            reason = _NO_BASE if near_list.counts(record.save_id) else _VOID
            if reason == _NO_BASE and n_missing:
                of, verb = plural(len(record.files), "file"), "is" if n_missing == 1 else "are"
                reason = f"{n_missing} of its {of} {verb} on no host that takes part, or cut short"
            saves.append((save, reason))
    return saves


class NearFinder(CandidateFinder):
    """Finds the checkpoints and near saves that a restore may use. Collective; not thread-safe."""

    is_shared = True

    def __init__(self, dir: NearDir, storage: Storage, concurrency: int, noted: NotedHost) -> None:
        self._dir, self._storage, self._concurrency, self._noted = dir, storage, concurrency, noted
        self._files_here: Mapping[str, frozenset[str]] = {}  # directory -> files on this host, at the last listing
        self._skipped: Sequence[tuple[Checkpoint, str]] = ()  # of the last listing, on rank 0
        self._logged = set[str]()  # directories of near saves whose loss was logged

    def find(self, ranks: Ranks, bank: Callable[[], _T], usable: Usable, needed: Needed) -> tuple[_T, list[Checkpoint]]:
        """Return the bank, and the checkpoints and near saves that may be restored, newest first.

        Arguments are as in the base class. If the first is a near save, all its bytes are verified (rule
        *verify_before_choice*), and hosts that lack needed files receive them. If a listed near save is gone, the
        listing is repeated (rule *relist_when_gone*).
        """
        located = ranks.on_first(bank)
        for _ in range(_LOOKS):
            views = look_together(self._dir, ranks.rank, ranks.gather)
            own = (sealed for view in views if view.rank == ranks.rank for sealed in view.saves)
            self._files_here = {sealed.directory: sealed.files for sealed in own}
            candidates = ranks.on_first(partial(self._listed, usable, views))
            try:
                whole = self._from_first_whole(ranks, self._here(candidates), needed, is_first_look=True)
            except CheckpointRemovedError as error:
                log.info("%s; looking again", error)
            else:
                # Log each lost near save once, and what is restored instead.
                restored = whole[0].ckpt_id if whole else "nothing"
                for save, reason in self._skipped:
                    if save.directory not in self._logged:
                        self._logged.add(save.directory)
                        name, step = save.manifest.save_id, save.manifest.step
                        log.warning("near save %s of step %s is passed over for %s: %s", name, step, restored, reason)
                return located, whole
        log.warning(
            "%s: near saves there are passed over, because they disappear while they are read: the process that makes "
            "them is probably still running; end it, and restore again",
            self._dir.storage.url,
        )
        return located, [candidate for candidate in candidates if candidate.near_dir is None]

    def without_damage(
        self, ranks: Ranks, before: Sequence[Checkpoint], left: Sequence[Checkpoint], needed: Needed
    ) -> list[Checkpoint]:
        own = self._here(left)
        return own if own == before else self._from_first_whole(ranks, own, needed)

    def _listed(self, usable: Usable, views: Sequence[HostView]) -> list[Checkpoint]:
        listing, checkpoints = usable()
        self._skipped = ()
        try:  # rule *list_read_last*: read after the near dirs and the manifests
            near_list = last_takeover(self._storage).near
        except (CorruptCheckpointError, FormatVersionError):  # the listing reports this damage
            return list(checkpoints)
        seen_saves = seen(self._dir, views)
        counted = counting(complete(seen_saves), listing, near_list)
        candidates = merged(checkpoints, counted)  # rule *one_order*
        self._skipped = skipped(seen_saves, near_list, candidates)
        if checkpoints and not seen_saves:
            host, n_hosts = None, 0
            with suppress(OSError):
                host, n_hosts = one_of_the_hosts(self._storage)
            if host is not None:
                others = f" and on {plural(n_hosts - 1, 'other host')}" if n_hosts > 1 else ""
                log.info("no near save in %s; there have been some on %s%s", self._dir.path, host.shown, others)
        return candidates

    def _here(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return rank 0's candidates, with this rank's own near dir in place of rank 0's. Not collective."""
        own = self._dir.storage
        return [each if each.near_dir is None else replace(each, near_dir=own) for each in candidates]

    def _from_first_whole(
        self, ranks: Ranks, candidates: Sequence[Checkpoint], needed: Needed, *, is_first_look: bool = False
    ) -> list[Checkpoint]:
        """Return the candidates from the first checkpoint or intact near save on.

        Raises:
            CheckpointRemovedError: at the first look, a near save was removed after it was listed.
        """
        for number, candidate in enumerate(candidates):
            if candidate.near_dir is None:
                return list(candidates[number:])
            problem = self._problem_of(ranks, candidate, needed)
            if problem is None:
                return list(candidates[number:])
            if is_first_look and isinstance(problem, CheckpointRemovedError):
                raise problem
            if ranks.rank == 0:  # logs for all ranks
                how = "damaged and passed over" if isinstance(problem, RecckptError) else "passed over"
                log.error("near save %s is %s: %s", candidate.manifest.save_id, how, problem)
        return []

    def _problem_of(self, ranks: Ranks, save: Checkpoint, needed: Needed) -> Exception | None:
        """Return why all ranks skip a near save; None once this host has the needed files. Rule *one_choice*."""
        problem, of_hosts = ranks.concluded(lambda: self._checked_here(save, ranks.rank), partial(_concluded, save))
        if problem is not None or ranks.size == 1:
            return problem
        for error in (error for host in of_hosts for error in host.errors if ranks.rank == 0):
            log.warning("near save %s: another host has an intact copy of a file: %s", save.manifest.save_id, error)
        # Copy files that ranks need and their hosts lack, from hosts that have them.
        bringing = Bringing.of(save, ranks.gather(Place.of(self._dir, needed(save))), of_hosts)
        shortage = bringing.shortage()
        if shortage is not None or not bringing.moves:
            return shortage
        is_taking = any(each.receiver == ranks.rank for each in bringing.moves)
        if is_taking:
            self._note(save)
        failures = ranks.in_meetings(lambda meetings: move(meetings, self._dir.storage, save.directory, bringing.moves))
        if not failures:
            for what in bringing.in_words() if ranks.rank == 0 else ():
                log.info("near save %s: copied %s", save.manifest.save_id, what)
            return None
        if is_taking and save.directory not in self._files_here:
            self._dir.try_remove(save.directory)  # the copied files have no seal, and would only use space
        return bringing.failure(failures[0].move.receiver, failures[0].reason)

    def _checked_here(self, save: Checkpoint, rank: int) -> WholeFiles | None:
        names = self._files_here.get(save.directory)
        return None if names is None else whole_files(save, names, self._concurrency, rank)

    def _note(self, save: Checkpoint) -> None:
        """Note that this host has near saves, before it gets rows. Only log a failure; the next near save retries."""
        try:
            self._noted.note(save.manifest.epoch)
        except OSError as error:
            log.warning("%s: cannot note there that this host has near saves: %s", self._storage.url, error)


def _concluded(save: Checkpoint, checked: Sequence[WholeFiles | None]) -> tuple[Exception | None, Sequence[WholeFiles]]:
    of_hosts = [each for each in checked if each is not None]
    return lacking(save, of_hosts), of_hosts
