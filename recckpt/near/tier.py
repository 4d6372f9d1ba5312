"""The near saves that one saver manages: those found at a takeover, and its own (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from recckpt.format import layout, near_seal
from recckpt.format.near_seal import NearList, NearSeal
from recckpt.near.finder import NearFinder
from recckpt.near.moving import MoveBuffers
from recckpt.near.near_dir import NearDir, NotedHost
from recckpt.near.views import HostView, complete, counting, is_first_of_host, look_together, seen
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.claims import Takeover
from recckpt.output_dir.fence import NearAtTakeover
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.parallel.ranks import Meetings, Ranks
from recckpt.parallel.roll_call import in_time
from recckpt.policies.options import Near
from recckpt.storage import Storage

_GENERATIONS = 2
log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Generation:
    directory: str  # inside the near dir
    order: tuple[int, int]  # (epoch, staging number)
    base: str  # save id of its parent

    @classmethod
    def of(cls, save: Checkpoint) -> Generation:
        parent = save.manifest.parent
        assert parent is not None  # reading the seal has checked that
        return cls(save.directory, save.manifest.order, parent.save_id)


def newest(generations: Iterable[Generation]) -> tuple[Generation, ...]:
    """Return the near saves to keep. Rule *two_generations*: the second newest is a fallback for a damaged newest."""
    return tuple(sorted(generations, key=lambda each: each.order)[-_GENERATIONS:])


@dataclass(frozen=True)
class Kept:
    """The near saves that every host keeps when a near save is acknowledged, or before the first one of a job."""

    epoch: int  # near saves up to this epoch are removed (rule *gc_by_epoch*)
    directories: frozenset[str] = frozenset()  # except these near saves


class NearTier(NearAtTakeover):
    """The near saves of one saver and of its predecessors. Not thread-safe.

    Rank 0 decides which near saves are valid and which are kept. On each host, the first rank creates, seals and
    deletes directories.
    """

    def __init__(self, near: Near, storage: Storage, concurrency: int) -> None:
        self.dir, self.timeout_sec, self.copies = NearDir.of(near, storage.url), near.timeout_sec, near.copies
        self.when = near.when
        self.copy_buffers = MoveBuffers()
        self._noted = NotedHost(storage, self.dir)
        self.finder = NearFinder(self.dir, storage, concurrency, self._noted)
        self._storage, self._cut = storage, 0
        self._seen: Sequence[Checkpoint] = ()
        self._views: Callable[[], Sequence[HostView]] = self._views_here
        self._is_held_together = False
        self._named: tuple[Generation, ...] = ()  # near saves in the list that this saver published at its takeover
        self._kept: tuple[Generation, ...] = ()  # acknowledged near saves
        self._under_way: Generation | None = None  # the near save being made
        self._made: str | None = None  # directory of the near save being made, on the first rank of each host

    def next_cut(self) -> int:
        """Return a number for a staging. Rule *cut_is_unique*: numbers are never reused."""
        self._cut += 1
        return self._cut

    def in_time(self, ask: Callable[[], object], n_ranks: int = 2) -> None:
        """Call ``ask``, which accesses the output dir, within half of the time after which this rank counts as lost.

        Raises TimeoutError if the output dir does not answer. Then this near save fails, and the next one tries again.
        """
        if n_ranks == 1:
            ask()
        else:
            in_time(self.timeout_sec / 2, ask, self._storage.url)

    def reach(self, n_ranks: int) -> None:
        """Check that the output dir answers, before uninterruptible work. Raises the errors of :meth:`in_time`."""
        self.in_time(lambda: self._storage.list_files(layout.OWNER_DIR), n_ranks)

    # At a takeover

    def hold_together(self, ranks: Ranks, hold: Callable[[], object]) -> None:
        """Call ``hold`` on rank 0 to take over the output dir, then list the near saves of all hosts; once per job.
        Collective.

        Rule *claim_before_list* requires this order: the claim makes near saves that are acknowledged after the listing
        invalid.

        Raises:
            Exception: on rank 0, any error of ``hold``; with several ranks, the errors of :meth:`Ranks.in_meetings`.
        """
        if ranks.size == 1 or self._is_held_together:
            return

        def work(meetings: Meetings) -> None:
            asked = cache(lambda: look_together(self.dir, meetings.rank, meetings.gather))
            if meetings.rank == 0:
                self._views = asked
                try:
                    self.reach(ranks.size)
                    hold()
                finally:
                    self._views = self._views_here
                    asked()  # the other ranks wait for this call, even if the output dir was held already
            else:
                asked()

        ranks.in_meetings(work)
        self._is_held_together = True

    def look(self) -> None:
        """Read the near dirs: of all hosts while the ranks take over together, otherwise of this host only."""
        self._seen = complete(seen(self.dir, self._views()))

    def _views_here(self) -> Sequence[HostView]:
        return look_together(self.dir, 0, lambda own: [own])

    def near_list(self, listing: Listing, before: Takeover, by: str) -> NearList:
        """List each valid near save, whether or not it was restored (rule *list_names_near*).

        While a request to forget ids is pending, list none (rule *forget_names_none*), because near saves may have rows
        of these ids.
        """
        is_forgetting = not all(requests(self._storage).values())
        saves = [] if is_forgetting else counting(self._seen, listing, before.near)
        self._named = tuple(map(Generation.of, saves))
        self._kept = ()
        return NearList(by, frozenset(save.manifest.save_id for save in saves))

    # At rotation

    def bases(self, newest: tuple[int, int]) -> set[str]:
        """Return the parents of near saves newer than ``newest``, a checkpoint's order (rule *keep_near_base*)."""
        under_way = self._under_way  # read before ``_kept``, because another thread moves it there
        generations = (*self._named, *self._kept, *([under_way] if under_way else []))
        return {each.base for each in generations if each.order > newest}

    # In a near save

    def begin(self, epoch: int, nonce: str, step: int | None, base: str) -> tuple[Intent, int]:
        """Return the intent of a near save on the checkpoint with save id ``base``, and its staging number. Called on
        rank 0.

        Creates nothing, but from now on rotation keeps the base.
        """
        cut = self.next_cut()
        name = near_seal.near_name(epoch, nonce, cut)
        intent = Intent(near_seal.near_dir(name), epoch, name, step)
        self._under_way = Generation(intent.directory, (epoch, cut), base)
        return intent, cut

    def make(self, intent: Intent, n_ranks: int) -> None:
        """Make the directory of a near save that rank 0 has begun. Called by the first rank of each host."""
        self._made = intent.directory
        # Note the host first: forgetting ids must find every place that may have their rows.
        self._noted.note(intent.epoch, lambda: self.reach(n_ranks))
        self.dir.begin(intent)

    def seal(self, intent: Intent, seal: NearSeal) -> None:
        """Seal the near save on this host. Raises OSError if that fails, or if near saves use too much space."""
        if self._made is not None:
            self.dir.storage.check_room()
            self.dir.seal(intent, seal)

    def acknowledge(self) -> Kept:
        """Keep the near save being made; return the near saves to keep on all hosts. Called by rank 0.

        Rule *two_generations*: the newest two stay, of the acknowledged near saves and those listed at the takeover.
        This call decides what is removed, so a writer that is overtaken later removes nothing that its successor has
        listed.
        """
        done = self._under_way
        assert done is not None
        self._kept = newest((*self._kept, done))
        self._under_way = None  # after ``_kept`` is set, because another thread may call bases() in between
        return Kept(done.order[0], frozenset(each.directory for each in newest((*self._named, *self._kept))))

    def keep(self, kept: Kept) -> None:
        """Remove from this host the near saves that an acknowledged one replaces, if this is the host's first rank."""
        if self._made is not None:
            self._made = None
            self._remove_others(kept)

    def give_up(self) -> None:
        """Remove this host's files of the near save being made; log a failure."""
        failed, self._made, self._under_way = self._made, None, None
        if failed is not None:
            self.dir.try_remove(failed)

    def void(self) -> None:
        """Stop listing and keeping near saves, because any may have ids that must be forgotten. Called by rank 0."""
        self._named = self._kept = ()

    def clear_together(self, ranks: Ranks, epoch: Callable[[], int]) -> None:
        """Remove everything invalid from all hosts, such as drafts and unfinished near saves. Collective.

        This frees space, so that three times the largest near save suffices. Rank 0 calls ``epoch``, which publishes
        the list of near saves and returns the epoch of the takeover, or raises.
        """

        def kept(_: object) -> Kept:
            last = epoch()  # first, because it publishes the list
            return Kept(last, frozenset(each.directory for each in (*self._named, *self._kept)))

        stays = ranks.concluded(lambda: None, kept)
        self._by_first_ranks(ranks, lambda: self._clear_here(stays))

    def forget_together(self, ranks: Ranks, epoch: int) -> None:
        """Remove all near saves up to ``epoch``, when ids were forgotten; each host's first rank acts. Collective."""
        self._by_first_ranks(ranks, lambda: self._noted.remove() if self._remove_others(Kept(epoch)) else None)

    def _by_first_ranks(self, ranks: Ranks, act: Callable[[], None]) -> None:
        is_first = is_first_of_host(self.dir, ranks.rank, ranks.gather)
        ranks.on_each(lambda: act() if is_first else None)  # returns after all ranks are done

    def _clear_here(self, kept: Kept) -> None:
        self._remove_others(kept)
        for directory in kept.directories:
            try:
                self.dir.remove_drafts(directory)
            except OSError as error:
                log.warning("could not remove all of %s/%s: %s", self.dir.storage.url, directory, error)

    def _remove_others(self, kept: Kept) -> bool:
        """Remove near saves that are not kept from this host, sealed or not; return whether all are gone."""
        try:
            directories = list(self.dir.directories())
        except OSError as error:
            log.warning("%s: nothing is removed there: %s", self.dir.storage.url, error)
            return False
        have_all_gone = True
        for directory in directories:
            parsed = near_seal.parse_near(directory)
            if parsed is not None and parsed[0] <= kept.epoch and directory not in kept.directories:
                have_all_gone &= self.dir.try_remove(directory)
        return have_all_gone
