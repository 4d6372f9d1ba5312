"""What a restore may take beside checkpoints: near saves of which each byte is right, on whichever host it lies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.near.candidates import counting, merged
from recckpt.near.moves import Move
from recckpt.near.moving import move
from recckpt.near.near_dir import HostSeen, NearDir
from recckpt.near.noted_host import NotedHost
from recckpt.near.views import HostView, complete, host_of, look_together
from recckpt.near.whole_files import WholeFiles, lacking, whole_files
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

_LOOKS = 3  # where what was listed is gone when it is read

Usable = Callable[[], tuple[Listing, Sequence[Checkpoint]]]
Needed = Callable[[Checkpoint], frozenset[str]]


@dataclass(frozen=True)
class _Checked:
    """What rank 0 makes of what all hosts have of a near save: why it cannot be restored, or who has which file."""

    problem: Exception | None
    of_hosts: Sequence[WholeFiles]


class NearFinder:
    """Finds what a restore may take. All methods are collective, but for :meth:`here`; not thread-safe.

    Args:
        dir: the near saves on this host.
        storage: the output dir.
        concurrency: number of threads that read.
        noted: the note of this host in the output dir.
    """

    def __init__(self, dir: NearDir, storage: Storage, concurrency: int, noted: NotedHost) -> None:
        self._dir, self._storage, self._concurrency, self._noted = dir, storage, concurrency, noted
        self._files_here: Mapping[str, frozenset[str]] = {}  # by directory, as of the last look

    def find(self, ranks: Ranks, usable: Usable, needed: Needed) -> list[Checkpoint]:
        """Return what may be restored: checkpoints and near saves, newest first.

        Each byte of the first is read, if it is a near save (rule *verify_before_choice*), and what other hosts have of
        it is brought to those that need it. Where something that was listed is gone, all is listed once more (rule
        *relist_when_gone*).

        Args:
            ranks: those that restore.
            usable: lists the output dir, and returns the checkpoints that can be used, too, newest first; for rank 0.
            needed: the files of a near save that this rank reads.

        Raises:
            RecckptError: a rank failed, or is missing.
        """
        for _ in range(_LOOKS):
            views = look_together(self._dir, ranks.rank, ranks.gather)
            own = (sealed for view in views if view.rank == ranks.rank for sealed in view.saves)
            self._files_here = {sealed.directory: sealed.files for sealed in own}
            candidates = ranks.on_first(partial(self._listed, usable, views))
            try:
                return self.from_first_whole(ranks, self.here(candidates), needed, is_first_look=True)
            except CheckpointRemovedError as error:
                log.info("%s; looking again", error)
        log.warning("%s: near saves there are passed over: others remove them", self._dir.storage.url)
        return [candidate for candidate in candidates if candidate.near_dir is None]

    def _listed(self, usable: Usable, views: Sequence[HostView]) -> list[Checkpoint]:
        listing, checkpoints = usable()
        try:  # rule *list_read_last*: after the near dirs and the manifests
            near_list = last_takeover(self._storage).near_list
        except (CorruptCheckpointError, FormatVersionError):  # which is in the listing as damaged
            return list(checkpoints)
        return merged(checkpoints, counting(self._storage, complete(self._dir, views), listing, near_list))

    def here(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return candidates of rank 0 as this rank sees them, whose near dir may be another. Not collective."""
        own = self._dir.storage
        return [each if each.near_dir is None else replace(each, near_dir=own) for each in candidates]

    def from_first_whole(
        self, ranks: Ranks, candidates: Sequence[Checkpoint], needed: Needed, *, is_first_look: bool = False
    ) -> list[Checkpoint]:
        """Return the candidates from the first on that is a checkpoint, or a near save of which each byte is right.

        Arguments as of :meth:`find`.

        Raises:
            CheckpointRemovedError: one is gone, at the first look after it was listed.
        """
        for number, candidate in enumerate(candidates):
            if candidate.near_dir is None:
                return list(candidates[number:])
            problem = self._problem_of(ranks, candidate, needed)
            if problem is None:
                return list(candidates[number:])
            if is_first_look and isinstance(problem, CheckpointRemovedError):
                raise problem
            if ranks.rank == 0:  # for all
                log.error("near save %s is damaged and passed over: %s", candidate.manifest.save_id, problem)
        return []

    def _problem_of(self, ranks: Ranks, save: Checkpoint, needed: Needed) -> Exception | None:
        """Return why all ranks pass a near save over; else bring here what is needed. Rule *one_choice*."""
        checked = ranks.concluded(lambda: self._checked_here(save, ranks.rank), partial(_concluded, save))
        if checked.problem is not None or ranks.size == 1:
            return checked.problem
        for error in (error for host in checked.of_hosts for error in host.errors if ranks.rank == 0):
            log.warning("near save %s: another host has what is damaged on one: %s", save.manifest.save_id, error)
        return self._bring(ranks, save, checked.of_hosts, needed(save))

    def _checked_here(self, save: Checkpoint, rank: int) -> WholeFiles | None:
        names = self._files_here.get(save.directory)
        return None if names is None else whole_files(save, names, self._concurrency, rank)

    def _bring(
        self, ranks: Ranks, save: Checkpoint, of_hosts: Sequence[WholeFiles], needed: frozenset[str]
    ) -> Exception | None:
        """Bring what ranks need and their hosts lack from hosts that have it; return why that failed."""
        lacks = _lacks(ranks.gather((host_of(self._dir), needed)), of_hosts)
        moves = [
            Move(file.name, file.n_bytes, file.xxh3, holders[number % len(holders)], to)
            for number, file in enumerate(save.manifest.files)
            for holders in [[host.rank for host in of_hosts if file.name in host.names]]
            for to, names in lacks.items()
            if file.name in names
        ]
        if not moves:
            return None
        if any(each.receiver == ranks.rank for each in moves):
            self._note(save)
        failures = ranks.in_meetings(lambda meetings: move(meetings, self._dir.storage, save.directory, moves))
        return OSError(failures[0].reason) if failures else None

    def _note(self, save: Checkpoint) -> None:
        """Note this host before rows come to it; where that fails, a restore goes on, and the next near save tries."""
        try:
            self._noted.note(save.manifest.epoch)
        except OSError as error:
            log.warning("%s: cannot note there that this host has near saves: %s", self._storage.url, error)


def _concluded(save: Checkpoint, checked: Sequence[WholeFiles | None]) -> _Checked:
    of_hosts = [each for each in checked if each is not None]
    return _Checked(lacking(save, of_hosts), of_hosts)


def _lacks(
    by_rank: Sequence[tuple[HostSeen | None, frozenset[str]]], of_hosts: Sequence[WholeFiles]
) -> dict[int, frozenset[str]]:
    """Return what each host lacks of what its ranks read, by its first rank."""
    first, lacks = dict[HostSeen | None, int](), dict[int, frozenset[str]]()
    whole = {host.rank: host.names for host in of_hosts}
    for rank, (host, needed) in enumerate(by_rank):
        to = first.setdefault(host, rank)
        lacks[to] = lacks.get(to, frozenset()) | needed - whole.get(to, frozenset())
    return lacks
