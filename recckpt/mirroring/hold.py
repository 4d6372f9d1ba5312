"""A mirror's claim on the output dir that it writes: nobody but mirrors of the same run has claimed it, or it refuses.

A mirror publishes no list, so that all checkpoints of its run count there. Whoever goes on from a mirror takes it over
like any output dir: by a claim above that of the mirror, and a list, by which what the mirror commits late is ignored.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError, WriterFencedError
from recckpt.format import drafts, layout
from recckpt.output_dir.claims import Claim, MirrorOf, claimed_epochs, encode_claim, read_claim
from recckpt.output_dir.listing import Listing
from recckpt.output_dir.takeover import make_owner_dirs, new_claim, put_claim
from recckpt.storage import Storage

log = logging.getLogger("recckpt")

PURPOSE = "recckpt mirror"
_ELSEWHERE = "mirror to another output dir"
_CLAIM_BYTES = 1 << 20


def origin_of(storage: Storage, listing: Listing) -> MirrorOf:
    """Return by what the run in an output dir is known, as the mirror of a mirror too."""
    epochs = claimed_epochs(storage)
    run = ""
    for epoch in epochs:
        with suppress(FileNotFoundError):  # a list without its claim
            claim = read_claim(storage, epoch)
            if claim.mirror_of is None:
                run = claim.nonce
                break
            run = claim.mirror_of.run
    return MirrorOf(storage.url, run, max([listing.highest_epoch, *epochs]))


class MirrorTakenOverError(WriterFencedError):
    """Another mirror of the same run writes there; the one that gets this error may take it over once more."""


class MirrorHold:
    """A mirror's hold on the output dir that it writes. Not thread-safe.

    Args:
        storage: the output dir.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._claim: Claim | None = None

    def look(self, origin: MirrorOf, there: Listing) -> None:
        """Check, without writing, that the output dir is empty or a mirror of this run.

        Raises:
            WriterFencedError: somebody went on from the mirror, or another mirror of the run has taken it over.
            RecckptError: it is something else.
        """
        claims = self._claims()
        if not claims:
            found = self._first_found(there)
            if found:
                raise RecckptError(
                    f"{self._storage.url}: found {found}, which no mirror has written, expected an empty place or a "
                    f"mirror of {origin.url}; {_ELSEWHERE}, or move away what is there"
                )
            return
        of = claims[-1].mirror_of
        assert of is not None  # or it had been refused
        if of.run != origin.run and (of.run or of.url != origin.url):
            raise RecckptError(
                f"{self._storage.url} is a mirror of {of.url}, and not of the run that is in {origin.url} now (whose "
                f"first claim is another); {_ELSEWHERE}"
            )
        if self._claim is not None:
            self.check()

    def is_above(self, origin: MirrorOf) -> bool:
        """Say whether whoever goes on from the mirror has a higher epoch than the run."""
        return max(claimed_epochs(self._storage), default=0) > origin.epoch

    def take(self, origin: MirrorOf) -> None:
        """Claim the output dir with an epoch above that of the run, if it is not held like that; errors as of `look`.

        Numbers are claimed one after another: nobody can have claimed one in between without being seen.
        """
        if self._claim is not None and self._claim.epoch > origin.epoch:
            self.check()
            return
        make_owner_dirs(self._storage)
        claims = self._claims()
        epoch = claims[-1].epoch if claims else origin.epoch
        while self._claim is None or self._claim.epoch <= origin.epoch:
            epoch += 1
            claim = replace(new_claim(epoch, PURPOSE), mirror_of=origin)
            try:
                put_claim(self._storage, claim)
            except FileExistsError:
                self._claims()  # raises where it is not that of a mirror
                continue
            self._claim = claim
        for old in (old for old in self._claims() if old.epoch < self._claim.epoch):
            self._storage.remove(layout.claim(old.epoch))  # or a mirror that is called every hour fills the directory

    def check(self) -> None:
        """Do nothing while nobody has taken the mirror over; WriterFencedError where somebody has."""
        assert self._claim is not None
        is_there = False
        with suppress(FileNotFoundError):
            is_there = self._storage.read(layout.claim(self._claim.epoch), _CLAIM_BYTES) == encode_claim(self._claim)
        last = max(claimed_epochs(self._storage), default=0)  # asked last, right before the caller acts on the answer
        if last > self._claim.epoch or not is_there:
            self._claim = None
            raise self._taken_over(last)

    def _first_found(self, there: Listing) -> str:
        """Return what is in a place without claims; "" for nothing, and for what is left where no claim was made yet.

        Directories are known: only where there are none are files listed, of which there are few then.
        """
        if there.directories:
            return f"{there.directories[0]}/"
        names = (name for name in self._storage.list_files("") if not drafts.is_temporary(name))
        here = (name for name in names if "/" not in name or name.startswith(f"{layout.OWN_DIR}/"))
        return next((name for name in here if name and not name.startswith(f"{layout.OWNER_DIR}/")), "")

    def _claims(self) -> list[Claim]:
        """Return the claims of mirrors, oldest first; raises WriterFencedError where there is anybody else's."""
        epochs = {name: layout.parse_owner_file(name) for name in self._storage.list_files(layout.OWNER_DIR)}
        claims = []
        for epoch in sorted(epoch for name, epoch in epochs.items() if epoch is not None and layout.is_claim(name)):
            with suppress(FileNotFoundError):  # a later mirror has removed it
                claims.append(read_claim(self._storage, epoch))
        lists = [epoch for name, epoch in epochs.items() if epoch is not None and not layout.is_claim(name)]
        others = [*lists, *(claim.epoch for claim in claims if claim.mirror_of is None)]
        if others:
            raise self._taken_over(max(others))
        return claims

    def _taken_over(self, epoch: int) -> WriterFencedError:
        """Return the error that names who has claimed the output dir, as far as the claim can be read."""
        claim, url = None, self._storage.url
        with suppress(OSError, CorruptCheckpointError, FormatVersionError):  # it only says who
            claim = read_claim(self._storage, epoch)
        by = f"process {claim.pid} on {claim.host}" if claim else f"the writer of epoch {epoch}"
        since = claim.time if claim else None
        when = f" since {since}" if since else ""
        if claim is not None and claim.mirror_of is not None:
            what = f"{url}: another `{PURPOSE}`, {by}, writes to this mirror{when}; this pass writes nothing more there"
            return MirrorTakenOverError(what, epoch=epoch, by=by, since=since)
        who = f"`{claim.purpose}`, {by}," if claim and claim.purpose else f"{by}"
        state = "no mirror any more" if claim and claim.continues else "no mirror"
        what = f"{url}: {who} has written there{when}, so it is {state}; it stays as it is: {_ELSEWHERE}"
        return WriterFencedError(what, epoch=epoch, by=by, since=since)
