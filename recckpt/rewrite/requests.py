"""Carries out requests to forget ids as the owner of an output dir, and completes those that a crash interrupted.

Every checkpoint that has one of the ids, or has a parent with one, is committed again in the same place without them.
Then the superseded checkpoints and all leftovers are removed, and a list is published that names only clean ones. At
any time every checkpoint is present and whole, with the ids or without (docs/format.md, section 14).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError, WriterFencedError
from recckpt.format import layout
from recckpt.format.codec import time_now
from recckpt.format.forgetting import Ids, Request
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.commit import WRITER
from recckpt.output_dir.fence import Fence, make_durable
from recckpt.output_dir.forget_requests import (
    Forgotten,
    audit,
    close_request,
    meant_in,
    pending,
    put_request,
    remove_drafts,
)
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.notes import noted_hosts
from recckpt.rewrite.without_ids import IdsInFiles, Rewrite, commit_without, files_with, ids_in_files
from recckpt.storage import Storage
from recckpt.text import Progress, instead_of, plural

log = logging.getLogger("recckpt")


def forget_as_owner(
    storage: Storage, fence: Fence, table: str, ids: Ids, by: str, *, has_bar: bool = False
) -> list[Forgotten]:
    """Make a request and carry it out, after those that are pending.

    The caller owns the output dir, and the tables of this process, if any, no longer contain the ids.

    Raises:
        CorruptCheckpointError: a checkpoint is damaged, so its contents are unknown; the request stays.
        OSError: the storage failed; the request stays, and the next owner continues it.
        WriterFencedError: another writer has taken over the output dir, and continues the request.
    """
    with fence.settling():
        done = finish_pending(storage, fence, has_bar=has_bar)
        request = Request(secrets.token_hex(16), table, ids, time_now(), by, WRITER.get("recckpt", "unknown"))
        fence.note_own_request(request.request)
        put_request(storage, request)
        return [*done, _carry_out(storage, fence, request, is_resumed=False, has_bar=has_bar)]


def settle(storage: Storage, fence: Fence) -> bool:
    """As :func:`finish_pending`, once per takeover; return whether all requests are done, and log why if not.

    Raises WriterFencedError if another writer has taken over the output dir.
    """
    if fence.is_settled:
        return True
    try:
        with fence.settling():
            finish_pending(storage, fence)
    except WriterFencedError:
        raise
    except (RecckptError, OSError) as error:
        log.error("%s: ids may still be there although forgetting them was requested: %s", storage.url, error)
        return False
    return True


def finish_pending(storage: Storage, fence: Fence, *, has_bar: bool = False) -> list[Forgotten]:
    """Carry out the requests that earlier owners left. Raises the errors of :func:`forget_as_owner`."""
    remove_drafts(storage)
    left, done = pending(storage), []
    fence.check_forgotten()  # otherwise requests would be closed while the next save still writes their ids
    for request in left:
        log.warning(
            "%s: continuing to forget %s of table %r, requested by %s at %s",
            storage.url,
            plural(len(request.ids), "id"),
            request.table,
            request.by,
            request.asked,
        )
        done.append(_carry_out(storage, fence, request, is_resumed=True, has_bar=has_bar))
    return done


def check(storage: Storage, listing: Listing, table: str, ids: Ids, *, is_live: bool = False) -> None:
    """Raise, before anything changes, if ids cannot be forgotten. ``is_live`` says that the model has the table.

    Raises ValueError if no checkpoint has the table, CorruptCheckpointError if a checkpoint or the audit is damaged.
    """
    check_readable(listing)
    if not is_live:
        check_table(listing, table, storage.url)
    scan(storage, listing, table, ids)
    audit(storage)


def check_table(listing: Listing, table: str, url: str) -> None:
    names: Collection[str] = {entry.name for c in listing.committed for entry in c.manifest.tables}
    if table not in names:
        raise ValueError(f"{url}: found no table {table!r} in any checkpoint{instead_of(table, sorted(names))}")


def check_readable(listing: Listing) -> None:
    """Raise if a checkpoint is damaged, because then it is unknown whether it has the ids."""
    for directory, error in listing.damaged.items():
        if isinstance(error, FormatVersionError):
            raise error
        remedy = "mend it, or remove its directory, and forget again: it is unknown whether it holds the ids"
        path = error.path or directory
        raise CorruptCheckpointError(path, error.where, found=error.found, expected=error.expected, remedy=remedy)


def scan(storage: Storage, listing: Listing, table: str, ids: Ids) -> dict[str, IdsInFiles]:
    """Return which ids each checkpoint's own files contain. Raises CorruptCheckpointError for a damaged checkpoint."""
    return {c.directory: ids_in_files(storage, c, table, ids) for c in listing.committed}


def touched(listing: Listing, contents: Mapping[str, IdsInFiles]) -> list[Checkpoint]:
    return [c for c in listing.committed if any(files_with(contents[link.directory]) for link in c.links)]


def needed(listing: Listing) -> set[str]:
    return {link.directory for c in listing.current for link in c.links}


def _carry_out(storage: Storage, fence: Fence, request: Request, *, is_resumed: bool, has_bar: bool) -> Forgotten:
    fence.check()
    fence.look_again()
    listing = fence.listing
    check_readable(listing)
    make_durable(storage, listing)  # checkpoints that stay may be commits of a dead owner that are not durable yet
    contents = scan(storage, listing, request.table, request.ids)
    with_ids, read_from = touched(listing, contents), needed(listing)
    # (superseded save, request) -> the checkpoint that supersedes it, which a dead owner may have committed.
    there = {(of.save_id, of.request): c for c in reversed(listing.committed) if (of := c.manifest.supersedes)}
    meant = {c.directory: (c.manifest.save_id, request.request) for c in with_ids}
    made = {directory: there[save] for directory, save in meant.items() if save in there}
    removed: list[str] = []
    n_bytes = sum(c.manifest.n_bytes for c in with_ids if c.directory in read_from - made.keys())
    with Progress(f"forgetting {plural(len(request.ids), 'id')}", n_bytes, has_bar=has_bar) as progress:
        for base in dict.fromkeys(c.links[-1].directory for c in with_ids):  # chain by chain, to need little space
            family = [c for c in with_ids if c.links[-1].directory == base]
            for checkpoint in (c for c in family if c.directory in read_from - made.keys()):  # oldest first
                below: Sequence[Checkpoint] = ()
                if checkpoint.below:
                    parent = made.get(checkpoint.below[0].directory)
                    below = checkpoint.below if parent is None else parent.links
                tables = meant_in(checkpoint.manifest, request.table)
                of_links = [contents[link.directory] for link in checkpoint.links]
                rewrite = Rewrite(checkpoint, of_links, below, tables, request.ids, request.request)
                made[checkpoint.directory] = commit_without(storage, fence, rewrite, rotation.THREADS, progress.advance)
            removed += fence.remove(rotation.in_order(family, fence.listing), rotation.THREADS)
    removed += _remove_leftovers(storage, fence)
    gone = {c.directory for c in with_ids}
    clean = [c for c in listing.committed if c.directory not in gone]
    fence.close_list(frozenset(c.manifest.save_id for c in (*clean, *made.values())))
    fence.write_index()
    by_request = [
        (c, of) for c in fence.listing.committed if (of := c.manifest.supersedes) and of.request == request.request
    ]
    names, n_rows = {of.directory: c.directory for c, of in by_request}, {c.ckpt_id: of.n_rows for c, of in by_request}
    removed = list(dict.fromkeys([*names, *removed]))
    _check_gone(storage, fence, list(dict.fromkeys([*removed, *(c.directory for c in with_ids)])), request)
    finished: dict[str, Any] = {"finished": time_now(), "rewritten": names, "removed": removed, "rows": n_rows}
    hosts = tuple(noted_hosts(storage))
    finished |= {"near_hosts": [host.as_data for host in hosts]} if hosts else {}
    fence.check()
    close_request(storage, request, finished)
    return Forgotten(request.table, len(request.ids), names, n_rows, tuple(removed), is_resumed, hosts)


def _remove_leftovers(storage: Storage, fence: Fence) -> list[str]:
    """Remove late commits, attempts and offers, because they may have the ids, and no reader needs them."""
    fence.look_again()
    removed = []
    for directory in fence.listing.fenced:
        record = read_manifest(storage, directory)
        if record is not None:
            fence.check()
            rotation.remove(storage, Checkpoint(directory, record), rotation.THREADS)
            removed.append(directory)
    for directory in leftovers(storage, fence.listing):
        fence.check()
        rotation.remove_leftover(storage, directory, rotation.THREADS)
        removed.append(directory)
    fence.look_again()
    return removed


def leftovers(storage: Storage, listing: Listing) -> Iterator[str]:
    """Yield the directories of attempts and offers, recognized by files that only recckpt makes."""
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if layout.MANIFEST not in names and any(
            name == layout.INTENT or (layout.is_ours(name) and layout.has_rows(name)) for name in names
        ):
            yield directory


def _check_gone(storage: Storage, fence: Fence, directories: Sequence[str], request: Request) -> None:
    """Make the removals durable; raise if a removed directory may still have rows of the ids."""
    storage.sync_dir("")
    fence.look_again()
    there = {c.directory: c for c in fence.listing.committed}  # for example a checkpoint that was copied in later
    for directory in directories:
        if directory in there and not files_with(ids_in_files(storage, there[directory], request.table, request.ids)):
            continue
        left = [name for name in storage.list_files(directory) if layout.is_part(name)]
        if left:
            raise RecckptError(
                f"{storage.url_of(directory)}: found {left[0]}, which could not be removed and may hold the ids; the "
                "log says why: mend that, and run `recckpt forget DIR` to continue"
            )
