"""Offers of compactors: complete manifests that the owner of the output dir may commit (format.md, 12.6).

An offer belongs to the epoch in which its compactor started. Later owners remove it, like any unfinished attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from recckpt.errors import RecckptError, WriterFencedError
from recckpt.format import layout, manifest
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.output_dir.checkpoint_dir import file_problems
from recckpt.output_dir.commit import commit
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.storage import ABSENT, Storage
from recckpt.storage.retry import RetryPolicy, read_twice

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Offer:
    directory: str
    # the future manifest, except its number; None if the offer is unfinished or damaged
    record: Manifest | None
    problem: str = ""  # what is wrong with the offer; "" if it is whole


def offers_in(storage: Storage, listing: Listing) -> list[Offer]:
    return [_look_at(storage, name) for name in listing.uncommitted if layout.is_offer_dir(name)]


def _look_at(storage: Storage, directory: str) -> Offer:
    path = layout.join(directory, layout.OFFER_JSON)
    try:
        record = read_twice(storage, path, lambda: manifest.decode(storage.read(path, manifest.MAX_BYTES + 1), path))
        problem = next(file_problems(storage, directory, record.files), None)
    except ABSENT:
        return Offer(directory, None, f"it has no {layout.OFFER_JSON}: its compactor is at work, or died")
    except (RecckptError, OSError) as error:
        return Offer(directory, None, str(error))
    own = layout.offer_dir(record.ckpt_id, record.save_id)
    if own != directory or record.seq or not record.is_compacted:
        return Offer(directory, None, f"its files are those of {own}, or of a commit")
    return Offer(directory, record, "" if problem is None else str(problem))


def why_not(offer: Offer, epoch: int, listing: Listing) -> str | None:
    """Return why the owner of an epoch must not adopt an offer; None if the owner may adopt it. Pure."""
    if offer.record is None or offer.problem:
        return offer.problem
    return next(_reasons_against(offer.record, epoch, listing), None)


def _reasons_against(record: Manifest, epoch: int, listing: Listing) -> Iterator[str]:
    if record.epoch != epoch:
        yield f"it was begun under epoch {record.epoch}, and the owner has epoch {epoch}, which removes it"
    of, delta = record.supersedes, delta_of(record, listing)
    if of is None or delta is None:
        yield f"no valid delta {record.ckpt_id!r} here is the one that it supersedes"
        return
    if [c for c in listing.committed if c.manifest.place == record.place][-1].directory != delta.directory:
        yield f"{record.ckpt_id!r} was superseded already"
    own = delta.manifest
    if (record.step, record.ephemeral) != (own.step, own.ephemeral):
        yield f"it has step {record.step}, ephemeral {record.ephemeral}; the delta {own.step}, {own.ephemeral}"
    if _contents(record.tables) != _contents(own.tables):
        yield "its tables, with their rows, slots and live layouts, differ from those of the delta"


def delta_of(record: Manifest, listing: Listing) -> Checkpoint | None:
    of, counting = record.supersedes, (c for c in listing.committed if c.manifest.kind == "delta")
    identity = of and (of.save_id, of.manifest, record.place, record.ckpt_id)
    same = (c for c in counting if (c.manifest.save_id, c.manifest.xxh3, c.manifest.place, c.ckpt_id) == identity)
    return next(same, None)


def adopt_offers(storage: Storage, fence: Fence, visible: RetryPolicy) -> list[Checkpoint]:
    """Commit the offers that can be adopted, as the owner of the output dir; return their checkpoints.

    Errors are only logged, except WriterFencedError: then the caller no longer owns the output dir. After an error
    nothing is removed, because the manifest may have been written.
    """
    adopted = []
    for offer in offers_in(storage, fence.listing):
        reason = why_not(offer, fence.epoch, fence.listing)
        if offer.record is None or reason is not None:
            log.info("%s/%s is not adopted: %s", storage.url, offer.directory, reason)
            continue
        try:
            commit(storage, fence, offer.directory, replace(offer.record, seq=fence.listing.next_seq), visible)
        except WriterFencedError:
            raise
        except (RecckptError, OSError, ValueError) as error:
            log.warning("%s/%s could not be adopted: %s", storage.url, offer.directory, error)
            continue
        log.info(
            "%s/%s is adopted: %r is now read without older checkpoints",
            storage.url,
            offer.directory,
            offer.record.ckpt_id,
        )
        adopted.append(next(c for c in fence.listing.committed if c.directory == offer.directory))
    return adopted


def _contents(tables: Iterable[TableEntry]) -> dict[str, object]:
    return {table.name: (table.rows, table.slots, table.live) for table in tables}
