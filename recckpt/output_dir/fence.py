"""One writer at a time: the last to claim an output dir owns it, and earlier ones stop writing.

Follows steps 0 and 1 of the commit protocol (docs/format.md, section 8).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from recckpt.errors import CorruptCheckpointError, FormatVersionError, WriterFencedError
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, Manifests
from recckpt.output_dir.claims import NO_TAKEOVER, Claim, claimed_epochs, encode_claim, has_claims, read_claim
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.index_file import is_of_recis, warn_of_index, warn_of_recis
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints
from recckpt.output_dir.near_at_takeover import NAMES_NONE, VOIDED, NearAtTakeover
from recckpt.output_dir.takeover import claim_next, publish
from recckpt.storage import Storage
from recckpt.text import plural

log = logging.getLogger("recckpt")

_made_at: dict[str, str] = {}  # nonce of a claim of this process -> where its writer was made


class _UnclaimedError(FileNotFoundError):
    """The claim of a writer is gone, and no other writer has one."""


class Fence:
    """A writer's hold on an output dir; claims it when it is first asked to. Not thread-safe, not collective.

    Args:
        storage: the output dir.
        made_at: where in the program the writer was made, for a later one of this process that takes over from it.
        purpose: the command that it is of, for the error of the one that it takes over from; "" of one that trains.
        near: what it says of near saves where it takes over.

    Attributes:
        listing: what was committed when :meth:`hold` last looked, and what this writer has committed and removed since.
        requests_seen: the requests to forget ids that were there when this process last read the output dir, None where
            it has not: its tables may hold what was asked for since.
        is_settled: whether it has carried out all requests to forget ids, those that earlier owners have left too.
        newest_at_takeover: place of the newest in the list that it published when it took over, damaged ones included.
    """

    listing = Listing((), {}, {})
    requests_seen: frozenset[str] | None = None
    is_settled = False
    newest_at_takeover = (0, 0)

    def __init__(
        self, storage: Storage, made_at: str | None = None, purpose: str = "", near: NearAtTakeover = VOIDED
    ) -> None:
        self._storage, self._made_at, self._purpose, self._near = storage, made_at, purpose, near
        self._known = Manifests()
        self._claim: Claim | None = None
        self._takeover = NO_TAKEOVER
        self._lost: WriterFencedError | None = None
        self._is_of_recis = False
        self._used = set[str]()  # names of directories that this writer has seen or made, those that are gone included
        self._passed_over: set[str] = set()  # directories whose INTENT cannot be read

    @property
    def epoch(self) -> int:
        """Number of the claim; 0 before there is one."""
        return self._claim.epoch if self._claim else 0

    @property
    def nonce(self) -> str:
        """The nonce of the claim; "" before there is one."""
        return self._claim.nonce if self._claim else ""

    def hold(self, *, is_resumed: bool = True) -> None:
        """Take the output dir over, or check that it is still held, and list what is committed.

        A run that began anew, which is not ``is_resumed``, is warned where it takes over checkpoints of another.

        Where it was removed and made anew since, and nobody has claimed it, it is taken over again. Raises
        WriterFencedError where somebody else has taken it over, FileNotFoundError while it is gone.
        """
        self._storage.check_there()
        if self._claim is None:
            self._take_over(self._near, is_resumed=is_resumed)
            return
        try:
            self.check()
        except _UnclaimedError:
            log.warning("%s was emptied or made anew since the last save; it is taken over again", self._storage.url)
            self._known = Manifests()
            self._used.clear()
            self._take_over(self._near)
            return
        self.look_again()
        if self.listing.highest_epoch > self.epoch:  # copied in: nothing would ever be newer
            self._take_over(self._near)

    def hold_once(self, *, is_resumed: bool) -> None:
        """Take the output dir over if this writer never has, as :meth:`hold`; without a request where it has."""
        if self._claim is None:
            self.hold(is_resumed=is_resumed)

    def take_over_from_itself(self) -> None:
        """Claim anew, and name no near save: none that was made so far counts (rule *forget_in_new_epoch*)."""
        self._take_over(NAMES_NONE)

    def note_requests(self, seen: Iterable[str]) -> None:
        """Note the requests to forget ids that were there when this process read the output dir."""
        self.requests_seen = frozenset(seen)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Count the requests to forget ids as carried out once the block ends without an error; a later one goes on."""
        self.is_settled = False
        yield
        self.is_settled = True

    def note_commit(self, checkpoint: Checkpoint) -> None:
        """Note what this writer has committed."""
        self.listing = self.listing.plus(checkpoint)

    def look_again(self) -> None:
        """List what is committed once more."""
        self.listing = list_checkpoints(self._storage, self._known)
        self._used.update(self.listing.directories)

    def _take_over(self, near: NearAtTakeover, *, is_resumed: bool = True) -> None:
        is_first = self._claim is None
        self._check_forgotten()
        claim = claim_next(self._storage, self._known, self.epoch, self._purpose)
        near.look()
        listing = list_checkpoints(self._storage, self._known)
        left = self.leftovers(listing, claim.epoch - 1)
        self._takeover = publish(self._storage, claim, listing, near)
        if self._made_at is not None:
            _made_at[claim.nonce] = self._made_at
        self.newest_at_takeover = listing.newest_place
        self.is_settled = False
        self._claim = claim  # only now: a claim without a list is harmless, and the next try makes another
        self.check()  # a later owner may have listed what was committed too late for this list
        for intent in left:
            rotation.remove_leftover(self._storage, intent.directory, rotation.THREADS)
        if is_first and listing.current and not is_resumed:
            log.warning(
                "%s: found %s of an earlier run, the newest %r, which this run has not loaded; it does not go on from "
                "them, and max_keep removes them: restore() or load() first, or use another output dir",
                self._storage.url,
                plural(len(listing.current), "checkpoint"),
                listing.current[-1].ckpt_id,
            )
        self._is_of_recis = is_of_recis(self._storage)
        warn_of_index(self._storage, listing.ckpt_ids)
        self.listing = listing
        self._used.update(listing.directories)

    def _check_forgotten(self) -> None:
        """Raise WriterFencedError where ids were forgotten since this process has read them from here."""
        if self.requests_seen is not None and requests(self._storage).keys() - self.requests_seen:
            raise WriterFencedError(
                f"{self._storage.url}: `recckpt forget` was called since this process restored from here, so its "
                "tables may hold the ids: nothing is saved; restart it from the newest checkpoint, which lacks them"
            )

    def free_dirs(self, ckpt_id: str) -> Iterator[str]:
        """Yield names for the directory of an attempt, best first: no attempt has had, or will have, one of them."""
        for directory in layout.attempt_dirs(ckpt_id, self.epoch):
            if directory not in self._used and not self.is_spent(directory):
                self._used.add(directory)
                yield directory

    def is_spent(self, directory: str) -> bool:
        """Say whether an earlier writer may still write to a directory of this name, though it is gone."""
        return self._takeover.has_seen(directory)

    def leftovers(self, listing: Listing, epoch: int) -> list[Intent]:
        """Return the attempts of writers up to an epoch that never committed or are half removed.

        An attempt whose ``INTENT`` does not say whose it is stays, and is logged once.
        """
        return rotation.leftovers(self._storage, listing, epoch, self._passed_over)

    def remove(self, victims: Iterable[Checkpoint], concurrency: int) -> list[str]:
        """Remove checkpoints, in this order, as long as nobody has taken over; return the directories that went.

        What one stands on that could not be removed stays with it. Raises as :meth:`check`.
        """
        removed: list[str] = []
        needed: set[str] = set()  # by what could not be removed
        for victim in (victim for victim in victims if victim.directory not in needed):
            self.check()
            if rotation.remove(self._storage, victim, concurrency):
                self.listing = self.listing.minus([victim.directory])
                removed.append(victim.directory)
            else:
                needed.update(link.directory for link in victim.below)
        return removed

    def write_index(self) -> None:
        """Replace the index file by the listing, unless RecIS has one there, as a run of it may from any time on."""
        if self._is_of_recis or self.listing.uncommitted:  # one of its checkpoints would be there
            was_of_recis, self._is_of_recis = self._is_of_recis, is_of_recis(self._storage)
            if self._is_of_recis and not was_of_recis:
                warn_of_recis(self._storage)
        if not self._is_of_recis:
            self._storage.replace(layout.INDEX_FILE, layout.encode_index(self.listing.ckpt_ids))

    def check(self) -> None:
        """Do nothing while nobody has taken the output dir over.

        Raises WriterFencedError where somebody has, FileNotFoundError where the output dir or all its claims are
        gone: this save fails then, and the next may work.
        """
        if self._lost is None:
            self._lost = self._why_lost()
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    def _why_lost(self) -> WriterFencedError | None:
        if self._claim is None:
            return None
        is_there, own = False, layout.claim(self._claim.epoch)
        with suppress(FileNotFoundError):
            is_there = self._storage.read(own, 1 << 20) == encode_claim(self._claim)
        last = max(claimed_epochs(self._storage), default=0)  # asked last, right before the caller acts on the answer
        if last > self._claim.epoch:
            return _fenced(self._storage, self._claim.epoch, last)
        if is_there:
            return None
        if not has_claims(self._storage):
            self._storage.check_there()
            problem = "the output dir was emptied or made anew during this save; the next one takes it over again"
            raise _UnclaimedError(errno.ENOENT, problem, self._storage.url)
        what = f"the claim {own} of this writer is gone or another's: the output dir was removed or made anew"
        return WriterFencedError(f"{self._storage.url}: {what}; this process writes nothing more there")


def check_epoch(storage: Storage, epoch: int) -> None:
    """Raise WriterFencedError where another writer has taken over from that of an epoch, as any rank may ask."""
    last = max(claimed_epochs(storage), default=0)
    if last > epoch:
        raise _fenced(storage, epoch, last)


def _fenced(storage: Storage, own: int, epoch: int) -> WriterFencedError:
    """Return the error that names the writer of ``epoch``, as far as its claim can be read."""
    by, since, writes = f"the writer of epoch {epoch}", None, "process"
    remedy = "stop one of the two, or give each an output dir of its own"
    with suppress(OSError, CorruptCheckpointError, FormatVersionError):  # it only says who
        claim = read_claim(storage, epoch)
        by, since = f"process {claim.pid} on {claim.host}", claim.time
        if claim.purpose:
            by = f"`{claim.purpose}`, {by},"
            remedy = f"restart it from the newest checkpoint, in which `{claim.purpose}` has done its work"
        if claim.nonce in _made_at:
            by, writes = f"another Saver of this process, made at {_made_at[claim.nonce]},", "Saver"
            remedy = "use one Saver for an output dir, or give each one of its own"
    return WriterFencedError(
        f"{storage.url}: taken over by {by}{f' since {since}' if since else ''} (epoch {epoch}, this {writes} has "
        f"epoch {own}); this {writes} writes nothing more there: {remedy}",
        epoch=epoch,
        by=by.rstrip(","),
        since=since,
    )
