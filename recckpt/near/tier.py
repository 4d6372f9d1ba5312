"""What one saver knows of near saves: of those that are there, and of its own (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

from recckpt.format import near_names
from recckpt.format.near_list import NearList
from recckpt.format.near_seal import NearSeal
from recckpt.near.candidates import counting
from recckpt.near.finder import NearFinder
from recckpt.near.generations import Generation, Kept, newest
from recckpt.near.moving import MoveBuffers
from recckpt.near.near_dir import NearDir
from recckpt.near.noted_host import NotedHost
from recckpt.near.options import Near
from recckpt.near.views import HostView, complete, is_first_of_host, look_together, seen
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.claims import Takeover
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.near_at_takeover import NearAtTakeover
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


class NearTier(NearAtTakeover):
    """The near saves of one saver and of those before it. Not thread-safe.

    Rank 0 decides which count, and which stay. The first rank of each host makes directories there, seals and removes.

    Attributes:
        dir: where they lie.
        finder: finds those that a restore may take.
        timeout_sec: how long ranks wait for each other.
        copies: how many other hosts are to get what a host writes; None for one where there are several.
        copy_buffers: for what they get.
    """

    def __init__(self, near: Near, storage: Storage, concurrency: int) -> None:
        self.dir, self.timeout_sec, self.copies = NearDir.of(near, storage.url), near.timeout_sec, near.copies
        self.copy_buffers = MoveBuffers()
        self._noted = NotedHost(storage, self.dir)
        self.finder = NearFinder(self.dir, storage, concurrency, self._noted)
        self._storage, self._cut = storage, 0
        self._seen: Sequence[Checkpoint] = ()
        self._views: Callable[[], Sequence[HostView]] = self._views_here
        self._is_held_together = False
        self._named: tuple[Generation, ...] = ()  # in the list of the own takeover
        self._kept: tuple[Generation, ...] = ()  # acknowledged
        self._under_way: Generation | None = None
        self._forgotten = frozenset[str]()  # requests to forget ids, of which what counts has none
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
        self._seen = complete(seen(self.dir, self._views()))

    def _views_here(self) -> Sequence[HostView]:
        return look_together(self.dir, 0, lambda own: [own])

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList:
        """Name each near save that counts, whether it was restored or not (rule *list_names_near*).

        While ids wait to be forgotten none is named (rule *forget_names_none*), since its rows may have them.
        """
        asked = requests(self._storage)
        is_forgetting = not all(asked.values())
        self._forgotten = frozenset(asked)  # also of what waits: it is ended before a near save is made
        saves = [] if is_forgetting else counting(self._storage, self._seen, listing, before.near_list)
        self._named = tuple(map(Generation.of, saves))
        self._kept = ()
        return NearList(epoch, frozenset(save.manifest.save_id for save in saves))

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
        """Name the directory of a near save on the checkpoint of this save id, as rank 0, and return it with its cut.

        Nothing is made yet, but rotation keeps that checkpoint from now on.
        """
        cut = self.next_cut()
        name = near_names.near_name(epoch, nonce, cut)
        intent = Intent(near_names.near_dir(name), epoch, name, step)
        self._under_way = Generation(intent.directory, (epoch, cut), base)
        return intent, cut

    def make(self, intent: Intent) -> None:
        """Make the directory of a near save that rank 0 has begun, as the first rank of a host.

        Raises:
            OSError: that failed.
        """
        self._made = intent.directory
        self._noted.note(intent.epoch)  # first: a forgetting has to know where its ids may lie
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
        return Kept.of((*self._named, *self._kept), done.order[0], self._forgotten)

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

    def void(self) -> None:
        """Name and keep none any more, as rank 0: all hold ids that are to be forgotten."""
        self._named = self._kept = ()

    def clear_together(self, ranks: Ranks, epoch: Callable[[], int]) -> None:
        """Remove from all hosts what does not count, such as half of one that died, or of a file of one. Collective.

        It would take the room of those to come: three times the largest is to be enough.

        Args:
            ranks: all of the run.
            epoch: gives that of the takeover, as rank 0, once the list of it is there; what it raises is raised.
        """

        def kept(_: object) -> Kept:
            last = epoch()  # first: it makes the list
            return Kept(last, frozenset(each.directory for each in (*self._named, *self._kept)), self._forgotten)

        self._remove_together(ranks, ranks.concluded(lambda: None, kept))

    def forget_together(self, ranks: Ranks, epoch: int, forgotten: frozenset[str]) -> None:
        """Remove all near saves up to an epoch from all hosts, each by its first rank, which notes that. Collective.

        Args:
            ranks: all of the run.
            epoch: that of the takeover of a forgetting.
            forgotten: the requests that have been carried out.
        """
        self._forgotten = forgotten
        self._remove_together(ranks, Kept(epoch, forgotten=forgotten))

    def _remove_together(self, ranks: Ranks, kept: Kept) -> None:
        is_first = is_first_of_host(self.dir, ranks.rank, ranks.gather)
        ranks.on_each(lambda: self._clear_here(kept) if is_first else None)  # all have ended when this returns

    def _clear_here(self, kept: Kept) -> None:
        self._remove_others(kept)
        for directory in kept.directories:
            try:
                self.dir.remove_drafts(directory)
            except OSError as error:
                log.warning("could not remove all of %s/%s: %s", self.dir.storage.url, directory, error)

    def _remove_others(self, kept: Kept) -> None:
        """Remove near saves from this host, sealed or not, but for those that are kept; note what that forgets."""
        try:
            directories = list(self.dir.directories())
        except OSError as error:
            log.warning("%s: nothing is removed there: %s", self.dir.storage.url, error)
            return
        have_gone = [self._remove(directory) for directory in directories if kept.lets_go(directory)]
        if all(have_gone):
            self._noted.note_forgotten(kept.forgotten)

    def _remove(self, directory: str) -> bool:
        """Remove a near save, and say whether all of it has gone; a failure is logged."""
        try:
            self.dir.remove(directory)
        except OSError as error:
            log.warning("could not remove all of %s/%s: %s", self.dir.storage.url, directory, error)
            return False
        return True
