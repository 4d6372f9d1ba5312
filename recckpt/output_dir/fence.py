"""One writer at a time: the last writer to claim an output dir owns it, and earlier writers stop writing.

Follows steps 0 and 1 of the commit protocol (docs/format.md, section 8).
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError, WriterFencedError
from recckpt.format import layout
from recckpt.format.codec import COUNT_LIMIT, time_now
from recckpt.format.near_seal import NearList
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, Manifests
from recckpt.output_dir.claims import (
    NO_TAKEOVER,
    Claim,
    Takeover,
    claimed_epochs,
    encode_claim,
    encode_takeover,
    last_takeover,
    read_claim,
)
from recckpt.output_dir.forget_requests import requests
from recckpt.output_dir.index_file import is_of_recis, warn_of_index, warn_of_recis
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints
from recckpt.output_dir.notes import make_own_dir, refuse_mirror
from recckpt.storage import Storage
from recckpt.text import plural

log = logging.getLogger("recckpt")
_made_at: dict[str, str] = {}  # nonce of a claim of this process -> where its writer was made


class NearAtTakeover:
    """The statement of a new owner about near saves. By default, all near saves made so far become invalid.

    Rule *forget_names_none*: writers that forget ids, and writers without near saves, use this default.
    """

    def look(self) -> None:
        """Read the near dirs: after the claim, before the output dir is listed (rule *claim_before_list*)."""

    def near_list(self, listing: Listing, before: Takeover, by: str) -> NearList:
        """Return the near saves for the list of this takeover; names of new near saves will begin with ``by``."""
        return replace(before.near, is_void=True)


class PassedOn(NearAtTakeover):
    """A takeover by a tool that does not train: valid near saves stay valid (rule *tools_pass_near_on*)."""

    def near_list(self, listing: Listing, before: Takeover, by: str) -> NearList:
        return before.near


class NamesNone(NearAtTakeover):
    """A takeover by a run that has forgotten ids: only near saves made from this takeover on are valid."""

    def near_list(self, listing: Listing, before: Takeover, by: str) -> NearList:
        return NearList(by)


VOIDED = NearAtTakeover()
PASSED_ON = PassedOn()
NAMES_NONE = NamesNone()


def claim_next(storage: Storage, known: Manifests, above: int, purpose: str) -> Claim:
    """Claim an output dir with the next epoch that no writer and no checkpoint has; RecckptError for a mirror."""
    refuse_mirror(storage)
    while True:
        listing = list_checkpoints(storage, known)
        for error in listing.damaged.values():
            if isinstance(error, FormatVersionError):  # before the claim, because a claim takes the output dir over
                raise error
        make_own_dir(storage, layout.OWNER_DIR)
        highest = max([above, *claimed_epochs(storage), listing.highest_epoch])
        if highest + 1 >= COUNT_LIMIT:
            found, expected = f"a file or checkpoint of epoch {highest}", "an epoch that can be increased"
            remedy = "remove files that recckpt did not write, or give this run another output dir"
            raise CorruptCheckpointError(storage.url, layout.OWNER_DIR, found=found, expected=expected, remedy=remedy)
        claim = _new_claim(highest + 1, purpose)
        try:
            put_claim(storage, claim)
        except FileExistsError:
            continue  # another writer was faster
        _sync_claims(storage)
        try:
            refuse_mirror(storage)  # again, because a mirror that did not see the claim may have started since
        except RecckptError:
            storage.remove(layout.claim(claim.epoch))
            raise
        return claim


def remove_older(storage: Storage, epoch: int, is_kind: Callable[[str], bool]) -> None:
    """Remove the claims, or the lists, of lower epochs, durably."""
    names = filter(is_kind, storage.list_files(layout.OWNER_DIR))
    older = [name for name in names if (layout.parse_owner_file(name) or epoch) < epoch]
    for name in older:
        storage.remove(layout.join(layout.OWNER_DIR, name))
    if older:
        storage.sync_dir(layout.OWNER_DIR)


def _new_claim(epoch: int, purpose: str) -> Claim:
    return Claim(epoch, secrets.token_hex(16), socket.gethostname(), os.getpid(), time_now(), purpose)


def put_claim(storage: Storage, claim: Claim) -> None:
    storage.put_if_absent(layout.claim(claim.epoch), encode_claim(claim))


def _sync_claims(storage: Storage) -> None:
    for directory in (layout.OWN_DIR, ""):  # the process that made them may have died before it synced them
        storage.sync_dir(directory)


def make_durable(storage: Storage, listing: Listing) -> None:
    """Sync all committed checkpoints: their writer may have died before the sync, and rotation will remove others."""
    for checkpoint in listing.committed:
        for subdirectory in layout.subdirectories(file.name for file in checkpoint.manifest.files):
            with suppress(FileNotFoundError, NotADirectoryError):  # the previous writer is still removing some
                storage.sync_dir(layout.join(checkpoint.directory, subdirectory))
    if listing.committed:
        storage.sync_dir("")


def publish(
    storage: Storage, claim: Claim, listing: Listing, near: NearAtTakeover, clean: frozenset[str] | None = None
) -> Takeover:
    """Publish the list of committed saves, or only ``clean``; other saves of older writers become invalid."""
    names = {directory for directory in listing.directories if not layout.is_offer_dir(directory)}
    adopted = (checkpoint for checkpoint in listing.committed if layout.is_offer_dir(checkpoint.directory))
    names |= {layout.encode_id(checkpoint.ckpt_id) for checkpoint in adopted}  # names that their deltas may have had
    steps = {directory: layout.parse_step(directory) for directory in names}
    before = NO_TAKEOVER
    with suppress(CorruptCheckpointError):  # then the directories listed by the previous list are lost
        before = last_takeover(storage)
    takeover = Takeover(
        claim.epoch,
        listing.save_ids if clean is None else clean,
        highest_step=max([before.highest_step, *(step for step in steps.values() if step is not None)]),
        directories=before.directories.union(directory for directory, step in steps.items() if step is None),
        run=before.run or claim.nonce,
        near=near.near_list(listing, before, f"{claim.epoch}.{claim.nonce}"),
    )
    storage.put_if_absent(layout.takeover(claim.epoch), encode_takeover(claim, takeover))
    if claim.epoch > 1:
        log.info("%s: taken over as epoch %d, with %d checkpoints", storage.url, claim.epoch, len(listing.committed))
    return takeover


class _UnclaimedError(FileNotFoundError):
    """The claim of this writer is gone, and no other writer has a claim."""


class Fence:
    """A writer's ownership of an output dir, claimed on first use. Not thread-safe, not collective.

    Args:
        storage: the output dir.
        made_at: source line that made the writer, for the error of a fenced writer of this process.
        purpose: the command that writes, for the error of a fenced writer; "" for training.
        near: what to declare about near saves at a takeover.
        seen_before: returns the requests to forget ids that count as seen until :meth:`note_requests` is called;
            None if this process has read nothing.

    Attributes:
        listing: the listing of the last :meth:`hold`, updated by this writer's commits and removals since.
        requests_seen: the requests to forget ids whose ids are not in the tables of this process: requests that
            existed when the process last read the output dir, or first took it over, and its own requests. None without
            tables.
        is_settled: whether this owner has carried out all requests to forget ids, including requests of earlier
            owners.
        newest_at_takeover: place of the newest checkpoint at the takeover, including damaged ones.
    """

    listing = Listing((), {}, {})
    requests_seen: frozenset[str] | None = None
    is_settled = False
    newest_at_takeover = (0, 0)

    def __init__(
        self,
        storage: Storage,
        made_at: str | None = None,
        purpose: str = "",
        near: NearAtTakeover = VOIDED,
        seen_before: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        self._storage, self._made_at, self._purpose, self._near = storage, made_at, purpose, near
        self._seen_before = seen_before
        self._known = Manifests()
        self._claim: Claim | None = None
        self._takeover = NO_TAKEOVER
        self._lost: WriterFencedError | None = None
        self._is_of_recis = False
        self._used = set[str]()  # directories seen or made by this writer, even if removed since
        self._passed_over: set[str] = set()  # directories with an unreadable INTENT

    @property
    def epoch(self) -> int:
        return self._claim.epoch if self._claim else 0

    @property
    def nonce(self) -> str:
        return self._claim.nonce if self._claim else ""

    def hold(self, *, is_resumed: bool = True) -> None:
        """Take the output dir over, or check that this writer still owns it; then list the committed checkpoints.

        Without ``is_resumed`` the run started from scratch: log a warning if it takes over checkpoints of another run.
        An output dir that was removed and made again is taken over again, if no other writer has claimed it. Raises
        WriterFencedError if another writer has taken the output dir over, FileNotFoundError while the dir is gone,
        RecckptError for a mirror.
        """
        self._storage.check_there()
        if self._claim is None:
            self._take_over(is_resumed=is_resumed)
            return
        try:
            self.check(is_thorough=True)
        except _UnclaimedError:
            log.warning(
                "%s was emptied or created again since the last save; it is taken over again", self._storage.url
            )
            self._known = Manifests()
            self._used.clear()
            self._take_over()
            return
        self.look_again()
        if self.listing.highest_epoch > self.epoch:  # copied: no later commit would be newer
            self._take_over()

    def hold_once(self, *, is_resumed: bool) -> None:
        """Take the output dir over, like :meth:`hold`, if this writer has not done so yet; otherwise do nothing."""
        if self._claim is None:
            self.hold(is_resumed=is_resumed)

    def note_requests(self, seen: Iterable[str]) -> None:
        """Note the requests to forget ids that existed when this process read the output dir."""
        self.requests_seen = frozenset(seen)

    def note_own_request(self, request: str) -> None:
        """Note a request to forget ids that the tables of this process no longer contain."""
        if self.requests_seen is not None:
            self.requests_seen |= {request}

    @contextmanager
    def settling(self) -> Iterator[None]:
        self.is_settled = False
        yield
        self.is_settled = True

    def note_commit(self, checkpoint: Checkpoint) -> None:
        self.listing = self.listing.plus(checkpoint)

    def look_again(self) -> None:
        self.listing = list_checkpoints(self._storage, self._known, self._takeover)
        self._used.update(self.listing.directories)

    def _take_over(self, *, is_resumed: bool = True) -> None:
        is_first = self._claim is None
        self.check_forgotten()  # before anything changes
        claim = claim_next(self._storage, self._known, self.epoch, self._purpose)
        try:
            check_epoch(self._storage, claim.epoch)  # a later owner may have removed a claim of this number
        except WriterFencedError as error:
            self._claim, self._lost = claim, error
            raise
        remove_older(self._storage, claim.epoch, layout.is_claim)  # first: writers that find their own continue
        self.check_forgotten()  # again, because until now an earlier owner may have accepted requests
        if self.requests_seen is None and not self._purpose:  # a new run has read nothing from here
            seen = self._seen_before()
            self.note_requests(requests(self._storage) if seen is None else seen)
        self._near.look()
        self.is_settled = False
        listing = self._publish(claim, self._near)
        self.newest_at_takeover = listing.newest_place
        if is_first and listing.current and not is_resumed:
            log.warning(
                "%s: found %s of an earlier run, the newest %r, which this run has not loaded; it does not "
                "continue from them, and max_keep removes them: restore() or load() first, or use another output dir",
                self._storage.url,
                plural(len(listing.current), "checkpoint"),
                listing.current[-1].ckpt_id,
            )
        self._is_of_recis = is_of_recis(self._storage)
        warn_of_index(self._storage, listing.ckpt_ids)
        self.listing = listing
        self._used.update(listing.directories)

    def _publish(self, claim: Claim, near: NearAtTakeover, clean: frozenset[str] | None = None) -> Listing:
        """Publish the list of committed saves, or only ``clean``; return it, and remove attempts of earlier writers."""
        listing = list_checkpoints(self._storage, self._known)
        left = self.leftovers(listing, claim.epoch - 1)
        # Attempts with the usual names, whose writers died before they wrote the first file.
        names = (directory for directory in listing.uncommitted if layout.parse_step(directory) is not None)
        empty = [directory for directory in names if not self._storage.list_files(directory)]
        make_durable(self._storage, listing)
        self._takeover = publish(self._storage, claim, listing, near, clean)
        if self._made_at is not None:
            _made_at[claim.nonce] = self._made_at
        self._claim = claim  # only now: a claim without a list is harmless, and the next try makes a new claim
        self.check(is_thorough=True)  # a later owner may have listed what was committed too late for this list
        try:
            remove_older(self._storage, self.epoch, layout.is_takeover)
        except OSError as error:
            log.warning("%s: could not remove the lists of earlier takeovers: %s", self._storage.url, error)
        for intent in left:
            rotation.remove_leftover(self._storage, intent.directory, rotation.THREADS)
        for directory in empty:
            with suppress(OSError):  # the writer of this attempt is still writing: the next takeover removes it
                self._storage.remove_empty_dirs(directory)
        return listing

    def close_list(self, clean: frozenset[str]) -> None:
        """Claim the next epoch, and list only these saves: all other saves made until now become invalid.

        Saves of earlier epochs that appear later are invalid too: late commits, offers, near saves, and copies that
        someone puts back (rule *forget_in_new_epoch*).

        Raises:
            WriterFencedError: another writer has taken the output dir over.
            OSError: the storage failed; this writer still owns the output dir.
        """
        self.check()
        claim = _new_claim(self.epoch + 1, self._purpose)
        try:
            put_claim(self._storage, claim)
        except FileExistsError:
            self.check(is_thorough=True)  # another writer's claim, if that writer is now the owner
            raise
        self._claim = claim
        _sync_claims(self._storage)
        self.check(is_thorough=True)
        remove_older(self._storage, claim.epoch, layout.is_claim)
        self._publish(claim, VOIDED if self._takeover.near.is_void else NAMES_NONE, clean)
        self.look_again()

    def check_forgotten(self) -> None:
        """Raise WriterFencedError if a request to forget ids was made after this process read rows from here."""
        seen = self._seen_before() if self.requests_seen is None else self.requests_seen
        if seen is not None and requests(self._storage).keys() - seen:
            raise WriterFencedError(
                f"{self._storage.url}: `recckpt forget` was called since this process restored from here, so its "
                "tables may contain the ids: nothing is saved; restart from the newest checkpoint, which lacks them"
            )

    def free_dirs(self, ckpt_id: str) -> Iterator[str]:
        """Yield names for the directory of an attempt, best first. No other attempt ever has one of these names."""
        for directory in layout.attempt_dirs(ckpt_id, self.epoch):
            # An earlier writer may still write to a directory that the takeover has seen, even if it was removed since.
            if directory not in self._used and not self._takeover.has_seen(directory):
                self._used.add(directory)
                yield directory

    def leftovers(self, listing: Listing, epoch: int) -> list[Intent]:
        """Return the attempts of writers up to an epoch that were never committed, or are partly removed.

        An attempt whose ``INTENT`` is unreadable stays, and is logged once.
        """
        return rotation.leftovers(self._storage, listing, epoch, self._passed_over)

    def remove(self, victims: Iterable[Checkpoint], concurrency: int) -> list[str]:
        """Remove checkpoints in this order, while this writer owns the output dir; return the removed directories.

        If a checkpoint cannot be removed, the links of its chain stay, too. Later checkpoints of the same id also stay;
        otherwise readers would read the old one in their place. Raises the same errors as :meth:`check`.
        """
        removed: list[str] = []
        needed, ids_left = set[str](), set[str]()  # links and ids of checkpoints that could not be removed
        for victim in victims:
            stays = victim.directory in needed or victim.ckpt_id in ids_left
            if not stays:
                self.check()
                stays = not rotation.remove(self._storage, victim, concurrency)
            if stays:
                needed.update(link.directory for link in victim.below)
                ids_left.add(victim.ckpt_id)
            else:
                self.listing = self.listing.minus([victim.directory])
                removed.append(victim.directory)
        return removed

    def write_index(self) -> None:
        """Write the index file from the listing, unless RecIS has an index file there; RecIS may start at any time."""
        if self._is_of_recis or self.listing.uncommitted:  # the RecIS checkpoint of the index file would be there
            was_of_recis, self._is_of_recis = self._is_of_recis, is_of_recis(self._storage)
            if self._is_of_recis and not was_of_recis:
                warn_of_recis(self._storage)
        if not self._is_of_recis:
            self._storage.replace(layout.INDEX_FILE, layout.encode_index(self.listing.ckpt_ids))

    def check(self, *, is_thorough: bool = False) -> None:
        """Raise if another writer has taken the output dir over.

        A new owner removes this writer's claim before reading anything else, so a look-up of the claim is sufficient.
        A thorough check also looks for new claims and lists of other writers, and for copied ones.

        Raises WriterFencedError after a takeover, FileNotFoundError if the output dir or all its claims are gone; in
        the latter case this save fails, but the next one may succeed.
        """
        if self._lost is None:
            self._lost = self._why_lost(is_thorough)
        if self._lost is not None:
            raise self._lost.with_traceback(None)

    def _why_lost(self, is_thorough: bool) -> WriterFencedError | None:
        if self._claim is None:
            return None
        is_there, own = False, layout.claim(self._claim.epoch)
        with suppress(FileNotFoundError):
            is_there = self._storage.read(own, 1 << 20) == encode_claim(self._claim)
        if is_there and not is_thorough:
            return None
        last = max(claimed_epochs(self._storage), default=0)  # listed last, right before the caller acts on the result
        if last > self._claim.epoch:
            return _fenced(self._storage, self._claim.epoch, last)
        if is_there:
            return None
        if not any(map(layout.is_claim, self._storage.list_files(layout.OWNER_DIR))):
            self._storage.check_there()
            problem = "the output dir was emptied or created again during this save; the next save takes it over again"
            raise _UnclaimedError(errno.ENOENT, problem, self._storage.url)
        what = f"the claim {own} of this writer is gone or replaced: the output dir was removed or created again"
        return WriterFencedError(f"{self._storage.url}: {what}; this process writes nothing more there")


def check_epoch(storage: Storage, epoch: int) -> None:
    """Raise WriterFencedError if another writer has taken over since an epoch. Any rank may call this."""
    last = max(claimed_epochs(storage), default=0)
    if last > epoch:
        raise _fenced(storage, epoch, last)


def _fenced(storage: Storage, own: int, epoch: int) -> WriterFencedError:
    by, since, writes = f"the writer of epoch {epoch}", None, "process"
    remedy = "stop one of the two, or give each its own output dir"
    with suppress(OSError, CorruptCheckpointError, FormatVersionError):  # the claim only identifies the writer
        claim = read_claim(storage, epoch)
        by, since = f"process {claim.pid} on {claim.host}", claim.time
        if claim.purpose:
            by = f"`{claim.purpose}`, {by},"
            remedy = f"restart it from the newest checkpoint, in which `{claim.purpose}` has done its work"
        if claim.nonce in _made_at:
            by, writes = f"another Saver of this process, made at {_made_at[claim.nonce]},", "Saver"
            remedy = "use one Saver per output dir, or give each Saver its own"
    return WriterFencedError(
        f"{storage.url}: taken over by {by}{f' since {since}' if since else ''} (epoch {epoch}, this {writes} has "
        f"epoch {own}); this {writes} writes nothing more there: {remedy}",
        epoch=epoch,
        by=by.rstrip(","),
        since=since,
    )
