"""Offers of compactors: what is there, what the owner adopts of it, and what goes (docs/format.md, section 12.6)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from recckpt.errors import RecckptError, WriterFencedError
from recckpt.format import layout, offer
from recckpt.format.manifest import FormOf, Manifest
from recckpt.format.offer import Offer
from recckpt.format.tables import TableEntry
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import file_problems
from recckpt.output_dir.commit import commit
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.storage import ABSENT, NOT_READABLE, Storage
from recckpt.storage.retry import RetryPolicy, read_twice

log = logging.getLogger("recckpt")

DAY_SEC = 86_400.0  # part of the format: at this age an offer is not adopted any more, at twice this age it may go


@dataclass(frozen=True)
class OfferDirectory:
    """A directory for an offer that is not committed."""

    directory: str  # where it lies
    age_sec: float | None  # how old its first file is, by the clock of the storage; None where that does not tell
    is_begun: bool  # whether it has its first file; one without is no offer
    offer: Offer | None  # what it says; None where it is not finished, or damaged
    problem: str = ""  # why it is not whole; "" where it is


def adopt_offers(storage: Storage, fence: Fence, visible: RetryPolicy, concurrency: int) -> list[Checkpoint]:
    """Adopt the offers that fit, remove those that are too old, and return the forms.

    A failure is logged, not raised, but for WriterFencedError: the caller no longer owns the output dir.
    """
    offers = find_offers(storage, fence.listing)
    adopted = []
    for each in offers:
        reason = adoptable(each, fence.listing)
        form = adopt(storage, fence, each, visible) if reason is None else None
        if form is not None:
            adopted.append(form)
        elif reason is not None:
            log.info("%s/%s is not adopted: %s", storage.url, each.directory, reason)
    sweep(
        storage,
        fence,
        [each for each in offers if each.directory not in {form.directory for form in adopted}],
        concurrency,
    )
    return adopted


def find_offers(storage: Storage, listing: Listing) -> list[OfferDirectory]:
    """Return the offers in the directories that a listing knows; the caller owns the output dir."""
    directories = [name for name in listing.uncommitted if layout.is_offer_dir(name)]
    now = clock(storage) if directories else None
    return [look_at(storage, name, now) for name in directories]


def look_at(storage: Storage, directory: str, now: float | None) -> OfferDirectory:
    """Return what is known of an offer; ``now`` is when a file was written that the caller has just written."""
    first = layout.join(directory, layout.OFFER)
    age_sec = None
    try:
        written = storage.modified(first)
        age_sec = None if now is None or written is None else now - written
        named = read_twice(storage, first, lambda: offer.decode_first(storage.read(first, offer.FIRST_BYTES), first))
    except NOT_READABLE:
        return OfferDirectory(directory, None, False, None, f"it has no file {layout.OFFER}")
    except (RecckptError, OSError) as error:
        return OfferDirectory(directory, age_sec, True, None, str(error))
    try:
        path = layout.join(directory, layout.OFFER_JSON)
        content = read_twice(storage, path, lambda: offer.decode(storage.read(path, offer.MAX_BYTES + 1), path))
        problem = next(file_problems(storage, directory, content), None)
    except ABSENT:
        return OfferDirectory(
            directory, age_sec, True, None, f"it has no {layout.OFFER_JSON}: its compactor is at work, or died"
        )
    except (RecckptError, OSError) as error:
        return OfferDirectory(directory, age_sec, True, None, str(error))
    if named != (content.of.ckpt_id, content.save_id) or content.directory != directory:
        return OfferDirectory(directory, age_sec, True, None, f"its files are those of {content.directory}")
    return OfferDirectory(directory, age_sec, True, content, "" if problem is None else str(problem))


def adoptable(candidate: OfferDirectory, listing: Listing) -> str | None:
    """Return why an offer is not to be adopted, None where it is; pure."""
    if candidate.offer is None or candidate.problem:
        return candidate.problem
    return next(_reasons_against(candidate.offer, candidate.age_sec, listing), None)


def _reasons_against(offer: Offer, age_sec: float | None, listing: Listing) -> Iterator[str]:
    if age_sec is None:
        yield "the storage does not tell how old it is"
    elif age_sec >= DAY_SEC:
        yield f"it is {age_sec / 3600:.0f} hours old, and an earlier owner may be about to remove it"
    of, delta = offer.of, delta_of(offer, listing)
    if delta is None:
        yield f"no delta {of.ckpt_id!r} of save {of.save_id} with the checksum {of.manifest:016x} counts here"
        return
    record = delta.manifest
    forms = (checkpoint.manifest.form_of for checkpoint in listing.committed)
    if any(of and (of.save_id, of.manifest) == (record.save_id, record.xxh3) for of in forms):
        yield f"{of.ckpt_id!r} has a form already"
    if (offer.step, offer.ephemeral) != (record.step, record.ephemeral):
        yield f"it is of step {offer.step}, ephemeral {offer.ephemeral}, the delta of {record.step}, {record.ephemeral}"
    if _contents(offer.tables) != _contents(record.tables):
        yield "its tables, with their rows, slots and live layouts, are not those of the delta"


def delta_of(offer: Offer, listing: Listing) -> Checkpoint | None:
    """Return the delta that an offer is of, None where it does not count."""
    identity = (offer.of.save_id, offer.of.ckpt_id, offer.of.manifest)
    counting = (c for c in listing.committed if c.manifest.kind == "delta")
    return next((c for c in counting if (c.manifest.save_id, c.ckpt_id, c.manifest.xxh3) == identity), None)


def adopt(storage: Storage, fence: Fence, candidate: OfferDirectory, visible: RetryPolicy) -> Checkpoint | None:
    """Commit the form that an adoptable offer is to be, and return it; None where that failed, which is logged.

    A failure removes nothing: the manifest of another owner may be there.
    """
    offer = candidate.offer
    delta = delta_of(offer, fence.listing) if offer is not None else None
    if offer is None or delta is None:
        raise ValueError(f"{candidate.directory} is not adoptable")
    try:
        commit(storage, fence, candidate.directory, _form(offer, delta.manifest, fence), visible)
    except WriterFencedError:
        raise
    except (RecckptError, OSError, ValueError) as error:
        log.warning("%s/%s could not be adopted: %s", storage.url, candidate.directory, error)
        return None
    log.info("%s/%s is adopted: %r needs no other checkpoint now", storage.url, candidate.directory, delta.ckpt_id)
    return next(c for c in fence.listing.committed if c.directory == candidate.directory)


def sweep(storage: Storage, fence: Fence, offers: Iterable[OfferDirectory], concurrency: int) -> None:
    """Remove what is no offer and offers that are too old, whole or not; the owner does, or WriterFencedError."""
    for each in offers:
        if may_go(each):
            fence.check()
            rotation.remove_leftover(storage, each.directory, concurrency)


def may_go(candidate: OfferDirectory) -> bool:
    """Say whether an offer is too old to be adopted, so that it may be removed, whole or not."""
    return not candidate.is_begun or (candidate.age_sec is not None and candidate.age_sec >= 2 * DAY_SEC)


def _form(offer: Offer, delta: Manifest, fence: Fence) -> Manifest:
    """Return the manifest of a form, with a save id of its own: of two owners that try, it says whose it is."""
    return Manifest(
        ckpt_id=delta.ckpt_id,
        save_id=secrets.token_hex(16),
        epoch=fence.epoch,
        seq=fence.listing.next_seq,
        cut=delta.cut,
        step=offer.step,
        time=delta.time,  # by which a policy says how old the checkpoint is
        **offer.content,
        form_of=FormOf(delta.save_id, delta.xxh3, *delta.place, offer.save_id),
        revision_of=delta.revision_of,
    )


def _contents(tables: Iterable[TableEntry]) -> dict[str, object]:
    return {table.name: (table.rows, table.slots, table.live) for table in tables}


def clock(storage: Storage) -> float | None:
    """Return the time by the clock of the storage: that of a file which is written for it."""
    probe = layout.probe()
    storage.put_if_absent(probe, b"")
    try:
        return storage.modified(probe)
    finally:
        storage.remove(probe)
