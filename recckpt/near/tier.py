"""What one saver knows of near saves: of those that are there, and of its own (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

from recckpt.checkpoint.every_byte import problems
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format import near_names
from recckpt.format.near_list import NearList
from recckpt.format.near_seal import NearSeal
from recckpt.near.candidates import counting, merged
from recckpt.near.generations import Generation, Kept, newest
from recckpt.near.near_dir import NearDir
from recckpt.near.options import Near
from recckpt.near.views import HostView, Seen, look_together, seen_together
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.claims import Takeover, last_takeover
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.near_at_takeover import NearAtTakeover
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

_LOOKS = 3  # where what was listed is gone when it is read


class NearTier(NearAtTakeover):
    """The near saves of one saver and of those before it. Not thread-safe.

    Rank 0 decides which count, and which stay. The first rank of each host makes directories there, seals and removes.

    Attributes:
        dir: where they lie.
        timeout_sec: how long ranks wait for each other.
        copies: how many other hosts are to get what a host writes; None for one where there are several.
    """

    def __init__(self, near: Near, storage: Storage, concurrency: int) -> None:
        self.dir, self.timeout_sec, self.copies = NearDir.of(near, storage.url), near.timeout_sec, near.copies
        self._storage, self._concurrency, self._cut = storage, concurrency, 0
        self._seen: Sequence[Seen] = ()
        self._views: Callable[[], Sequence[HostView]] = self._views_here
        self._is_held_together = False
        self._named: tuple[Generation, ...] = ()  # in the list of the own takeover
        self._kept: tuple[Generation, ...] = ()  # acknowledged
        self._under_way: Generation | None = None
        self._made: str | None = None  # the directory of what is under way, on the first rank of each host

    def next_cut(self) -> int:
        """Return the number of a staging. Rule *cut_is_unique*: going back does not take it back."""
        self._cut += 1
        return self._cut

    # At a takeover

    def hold_together(self, ranks: Ranks, hold: Callable[[], object]) -> None:
        """Let rank 0 take the output dir over, and see then what all hosts have; once in a job. Collective.

        Rule *claim_before_list* asks for that order: what is acknowledged after a look counts no more after the claim.

        Raises:
            Exception: what ``hold`` raises on rank 0; on several ranks, as :meth:`Ranks.in_meetings`.
        """
        if ranks.size == 1 or self._is_held_together:
            return

        def work(meetings: Meetings) -> None:
            asked = cache(lambda: look_together(self.dir, meetings.rank, meetings.gather))
            if meetings.rank == 0:
                self._views = asked
                try:
                    hold()
                finally:
                    self._views = self._views_here
                    asked()  # the others wait for it, also where it was held already
            else:
                asked()

        ranks.in_meetings(work)
        self._is_held_together = True

    def look(self) -> None:
        """Look at the near dirs: of all hosts while ranks take over together, else of this one."""
        self._seen = seen_together(self.dir, self._views())

    def _views_here(self) -> Sequence[HostView]:
        return look_together(self.dir, 0, lambda own: [own])

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList:
        """Name each near save that counts, whether it was restored or not (rule *list_names_near*).

        While ids wait to be forgotten none is named (rule *forget_names_none*), since its rows may have them.
        """
        is_forgetting = not all(requests(self._storage).values())
        saves = [] if is_forgetting else counting(self._storage, self._seen, listing, before.near_list)
        self._named = tuple(map(Generation.of, saves))
        self._kept = ()
        return NearList(epoch, frozenset(save.manifest.save_id for save in saves))

    # At a restore

    def find(self, locate: Callable[[], tuple[Listing, Sequence[Checkpoint]]]) -> tuple[Listing, list[Checkpoint]]:
        """Return the listing of the output dir, and what may be restored: checkpoints and near saves, newest first.

        The first is read whole, if it is a near save (rule *verify_before_choice*). Where something that was listed is
        gone, all is listed once more (rule *relist_when_gone*).

        Args:
            locate: lists the output dir, and returns the checkpoints that can be used too, newest first.
        """
        for _ in range(_LOOKS):
            self.look()
            listing, checkpoints = locate()
            try:
                return listing, self.from_first_whole(merged(checkpoints, self._counting(listing)), is_first_look=True)
            except CheckpointRemovedError as error:
                log.info("%s; looking again", error)
        log.warning("%s: near saves there are passed over: others remove them", self.dir.storage.url)
        return listing, list(checkpoints)

    def _counting(self, listing: Listing) -> list[Checkpoint]:
        try:  # rule *list_read_last*: after the near dir and the manifests
            near_list = last_takeover(self._storage).near_list
        except (CorruptCheckpointError, FormatVersionError):  # which is in the listing as damaged
            return []
        return counting(self._storage, self._seen, listing, near_list)

    def from_first_whole(self, candidates: Sequence[Checkpoint], *, is_first_look: bool = False) -> list[Checkpoint]:
        """Return the candidates from the first on that is a checkpoint, or a near save of which each byte is right.

        Raises:
            CheckpointRemovedError: one is gone, at the first look after it was listed.
        """
        for number, candidate in enumerate(candidates):
            if candidate.near_dir is None:
                return list(candidates[number:])
            problem = self._problem_of(candidate)
            if problem is None:
                return list(candidates[number:])
            if is_first_look and isinstance(problem, CheckpointRemovedError):
                raise problem
            log.error("near save %s is damaged and passed over: %s", candidate.manifest.save_id, problem)
        return []

    def _problem_of(self, save: Checkpoint) -> Exception | None:
        try:
            return next(problems(self._storage, save, self._concurrency), None)
        except (CheckpointRemovedError, OSError) as error:
            return error

    def is_of_all(self, ranks: Ranks) -> bool:
        """Say whether all ranks see the same near saves: each its own part would not be one save. Collective."""
        if ranks.size == 1:
            return True
        hosts = ranks.gather(self._host())
        if hosts[0] is None or len(set(hosts)) > 1:
            log.warning("%s: near saves are passed over: not all ranks see that directory", self.dir.storage.url)
            return False
        return True

    def _host(self) -> str | None:
        try:
            return self.dir.host()
        except OSError:
            return None

    # At rotation

    def bases(self, newest: tuple[int, int]) -> set[str]:
        """Return what near saves stand on that are newer than the newest checkpoint (rule *keep_near_base*).

        Args:
            newest: the order of that checkpoint.
        """
        under_way = self._under_way  # before what is kept, where it is once it is not under way any more
        generations = (*self._named, *self._kept, *([under_way] if under_way else []))
        return {each.base for each in generations if each.order > newest}

    # In a near save

    def begin(self, epoch: int, nonce: str, step: int | None, base: str) -> tuple[Intent, int]:
        """Make the directory of a near save on the checkpoint of this save, and return it with its cut.

        Raises:
            OSError: that failed.
        """
        cut = self.next_cut()
        name = near_names.near_name(epoch, nonce, cut)
        intent = Intent(near_names.near_dir(name), epoch, name, step)
        self._under_way = Generation(intent.directory, (epoch, cut), base)
        self.join(intent)
        return intent, cut

    def join(self, intent: Intent) -> None:
        """Make the directory of a near save that rank 0 has begun, as the first rank of another host.

        Raises:
            OSError: that failed.
        """
        self._made = intent.directory
        self.dir.begin(intent)

    def seal(self, intent: Intent, seal: NearSeal) -> None:
        """Make it whole on this host; OSError where that fails, or near saves take more than they may."""
        if self._made is not None:
            self.dir.storage.check_room()
            self.dir.seal(intent, seal)

    def acknowledge(self) -> Kept:
        """Keep the near save that is under way, as rank 0, and return which stay on all hosts.

        Rule *two_generations*: the newest two stay, of those that were acknowledged or named at the takeover. What goes
        is decided here, so a writer that was overtaken since removes nothing that its successor has named.
        """
        done = self._under_way
        assert done is not None
        self._kept = newest((*self._kept, done))
        self._under_way = None  # only now: a checkpoint that is committed meanwhile may ask for bases between the two
        return Kept.of((*self._named, *self._kept), done.order[0])

    def keep(self, kept: Kept) -> None:
        """Remove from this host what an acknowledged near save replaces. The first rank of each host alone does so."""
        if self._made is not None:
            self._made = None
            self._remove_others(kept)

    def give_up(self) -> None:
        """Remove what was written here of the near save that is under way; a failure is logged."""
        failed, self._made, self._under_way = self._made, None, None
        if failed is not None:
            self._remove(failed)

    def forget(self, epoch: int) -> None:
        """Remove all near saves up to an epoch, which hold ids that were forgotten."""
        self._named = self._kept = ()
        self._remove_others(Kept.of((), epoch))

    def _remove_others(self, kept: Kept) -> None:
        """Remove near saves from this host, sealed or not, but for those that are kept."""
        try:
            directories = list(self.dir.directories())
        except OSError as error:
            log.warning("%s: nothing is removed there: %s", self.dir.storage.url, error)
            return
        for directory in directories:
            if kept.lets_go(directory):
                self._remove(directory)

    def _remove(self, directory: str) -> None:
        try:
            self.dir.remove(directory)
        except OSError as error:
            log.warning("could not remove all of %s/%s: %s", self.dir.storage.url, directory, error)
