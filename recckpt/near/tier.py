"""What one saver knows of near saves: of those that are there, and of its own (docs/format.md, section 16)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recckpt.checkpoint.every_byte import problems
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format import near_names
from recckpt.format.near_list import NearList
from recckpt.format.near_seal import NearSeal
from recckpt.near.candidates import counting, merged
from recckpt.near.near_dir import NearDir
from recckpt.near.options import Near
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.claims import Takeover, last_takeover
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.near_at_takeover import NearAtTakeover
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

_LOOKS = 3  # where what was listed is gone when it is read
_GENERATIONS = 2


@dataclass(frozen=True)
class Generation:
    """A near save that is kept, or under way.

    Attributes:
        directory: in the near dir.
        order: its epoch and cut.
        base: save id of the checkpoint that it stands on.
    """

    directory: str
    order: tuple[int, int]
    base: str


class NearTier(NearAtTakeover):
    """The near saves of one saver and of those before it. Rank 0 alone asks, but for the directory; not thread-safe.

    Attributes:
        dir: where they lie.
        timeout_sec: how long ranks wait for each other.
    """

    def __init__(self, near: Near, storage: Storage, concurrency: int) -> None:
        self.dir, self.timeout_sec = NearDir.of(near, storage.url), near.timeout_sec
        self._storage, self._concurrency, self._cut = storage, concurrency, 0
        self._seen: Sequence[Checkpoint] = ()
        self._named: tuple[Generation, ...] = ()  # in the list of the own takeover
        self._kept: tuple[Generation, ...] = ()  # acknowledged
        self._under_way: Generation | None = None

    def next_cut(self) -> int:
        """Return the number of a staging. Rule *cut_is_unique*: going back does not take it back."""
        self._cut += 1
        return self._cut

    # At a takeover

    def look(self) -> None:
        """Look at the near dir."""
        try:
            self._seen = self.dir.saves()
        except OSError as error:
            log.warning("%s: near saves there are passed over: %s", self.dir.storage.url, error)
            self._seen = ()

    def near_list(self, listing: Listing, before: Takeover, epoch: int) -> NearList:
        """Name each near save that counts, whether it was restored or not (rule *list_names_near*).

        While ids wait to be forgotten none is named (rule *forget_names_none*), since its rows may have them.
        """
        is_forgetting = not all(requests(self._storage).values())
        saves = [] if is_forgetting else counting(self._storage, self._seen, listing, before.near_list)
        self._named = tuple(map(_generation, saves))
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
        intent = self.dir.begin(epoch, nonce, cut, step)
        self._under_way = Generation(intent.directory, (epoch, cut), base)
        return intent, cut

    def seal(self, intent: Intent, seal: NearSeal) -> None:
        """Make it whole; OSError where that fails."""
        self.dir.seal(intent, seal)

    def acknowledge(self) -> None:
        """Keep the near save that is under way, and remove what it replaces.

        Rule *two_generations*: the newest two stay, of those that were acknowledged or named at the takeover. What goes
        is decided here, so a writer that was overtaken since removes nothing that its successor has named.
        """
        done = self._under_way
        assert done is not None
        self._kept = (*self._kept, done)[-_GENERATIONS:]
        self._under_way = None  # only now: a checkpoint that is committed meanwhile may ask for bases between the two
        self._remove_others(done.order[0])

    def give_up(self) -> None:
        """Remove what was written of the near save that is under way; a failure is logged."""
        failed, self._under_way = self._under_way, None
        if failed is not None:
            self._remove(failed.directory)

    def forget(self, epoch: int) -> None:
        """Remove all near saves up to an epoch, which hold ids that were forgotten."""
        self._named = self._kept = ()
        self._remove_others(epoch)

    def _remove_others(self, epoch: int) -> None:
        """Remove near saves up to an epoch, sealed or not, but for the newest (rule *gc_by_epoch*)."""
        ordered = sorted((*self._named, *self._kept), key=lambda each: each.order)
        kept = {each.directory for each in ordered[-_GENERATIONS:]}
        try:
            directories = list(self.dir.directories())
        except OSError as error:
            log.warning("%s: nothing is removed there: %s", self.dir.storage.url, error)
            return
        for directory in directories:
            parsed = near_names.parse_near(directory)
            if parsed is not None and parsed[0] <= epoch and directory not in kept:
                self._remove(directory)

    def _remove(self, directory: str) -> None:
        try:
            self.dir.remove(directory)
        except OSError as error:
            log.warning("could not remove all of %s/%s: %s", self.dir.storage.url, directory, error)


def _generation(save: Checkpoint) -> Generation:
    parent = save.manifest.parent
    assert parent is not None  # as the seal was checked for
    return Generation(save.directory, save.manifest.order, parent.save_id)
