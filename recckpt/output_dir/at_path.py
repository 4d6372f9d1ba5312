"""Finds the checkpoint at a path or URL, and the readable rest of a damaged one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import Link, Manifest, Parent
from recckpt.output_dir.checkpoint_dir import Damage, attempt_dirs, file_problems, has_manifest, read_manifest
from recckpt.output_dir.claims import Takeover, last_takeover
from recckpt.output_dir.listing import (
    Checkpoint,
    Listing,
    age,
    chained,
    describe,
    locate,
    look_around,
    newest,
    newest_first,
    whole_one,
)
from recckpt.parallel.threads import run_all
from recckpt.storage import Storage, lost_is_damage, open_parent, open_storage

_LATEST = re.compile(r"latest(?:~(\d{1,9}))?", re.ASCII)  # no checkpoint's directory has a tilde in its name
_THREADS = 8  # threads that read manifests of links
log = logging.getLogger("recckpt")


def read_checkpoint(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the committed checkpoint in a directory, with its links; None without a manifest.

    If the checkpoint is damaged and another one of the same name is intact, return the other one. Raises
    CheckpointNotFoundError if a writer committed the checkpoint after losing the output dir, CorruptCheckpointError if
    the checkpoint or a link is damaged or lacks a file, FormatVersionError if a newer format wrote it.
    """
    record = read_manifest(storage, directory)
    if record is None:
        return None
    takeover = last_takeover(storage)
    reason = takeover.excludes(record)
    if reason is not None:
        raise CheckpointNotFoundError(f"{storage.url_of(directory)}: {reason}")
    problem = next(file_problems(storage, directory, record.files), None)
    if problem is None and record.parent is None:
        return Checkpoint(directory, record)
    checkpoint = _by_hints(storage, directory, record, takeover) if problem is None else None
    if checkpoint is None and (record.parent or record.is_compacted):
        checkpoint = _by_listing(storage, directory, record)
    if checkpoint is not None or problem is None:
        return checkpoint
    if read_manifest(storage, directory) is None:  # the writer has just removed the checkpoint
        return None
    raise problem


def _by_hints(storage: Storage, directory: str, record: Manifest, takeover: Takeover) -> Checkpoint | None:
    hints = [link.directory for link in record.chain]
    try:
        read = run_all(partial(read_manifest, storage), hints, storage.threads(_THREADS))
        links = {name: link for name, link in zip(hints, read, strict=True) if link is not None}
        if len(links) < len(set(hints)) or any(map(takeover.excludes, links.values())):
            return None
        if any(next(file_problems(storage, name, link.files), None) for name, link in links.items()):
            return None
    except (CorruptCheckpointError, FormatVersionError, OSError):
        return None  # the listing reports the problem of the link
    whole, _ = chained([Checkpoint(directory, record), *(Checkpoint(name, link) for name, link in links.items())], {})
    return next((c for c in whole if c.directory == directory), None)


def _by_listing(storage: Storage, directory: str, record: Manifest) -> Checkpoint | None:
    """Return the checkpoint that readers use for this checkpoint's name; None if it was just removed.

    Raises CorruptCheckpointError or FormatVersionError if the checkpoint or a link is damaged or missing.
    """
    try:
        listing = look_around(storage)
    except OSError:  # the bucket or directory may be entered but not listed
        listing = Listing((), {}, {})
    checkpoint = listing.named(record.name)
    wrong = listing.damaged | listing.unreadable
    if checkpoint is None and (directory in wrong or not listing.directories):
        error = _alone(storage, listing, directory, record) or wrong.get(directory)
        if error is not None:
            raise error
    return checkpoint


def _alone(storage: Storage, listing: Listing, directory: str, record: Manifest) -> CorruptCheckpointError | None:
    """Return the error for a delta whose links are missing beside it, for example because only the delta was copied."""
    there = {checkpoint.manifest.name for checkpoint in (*listing.committed, *listing.lost)}
    links = [link.directory for link in record.chain if link.save_id not in there]
    missing = [name for name in links if not has_manifest(storage, name)]
    if not missing:
        return None
    found = f"no {', '.join(f'{name}/' for name in missing)} beside it"
    path, remedy = layout.join(directory, layout.MANIFEST), whole_one(record.ckpt_id)
    return CorruptCheckpointError(path, "chain", found=found, expected="the base of this delta", remedy=remedy)


def open_checkpoint(path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint at its own path or URL, and the storage around it; same errors as ``read_checkpoint``."""
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory) or counted_back(storage, directory)
    if checkpoint is None:
        what = open_storage(path).why_empty() or f"found no {layout.MANIFEST}"
        raise CheckpointNotFoundError(
            f"{path}: {what}, expected a committed checkpoint; name the checkpoint's own directory"
        )
    return storage, checkpoint


def locate_path(path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint at ``path``, or the newest one if ``path`` is an output dir.

    As the name of a checkpoint, ``latest`` means the newest of the output dir, and ``latest~1`` the one before, unless
    a checkpoint has that name.

    Raises CheckpointNotFoundError if there is no checkpoint, CorruptCheckpointError if all are damaged,
    FormatVersionError if a newer recckpt wrote all.
    """
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is not None:
        return storage, checkpoint
    inside = open_storage(path)
    try:
        return inside, newest(inside)
    except CheckpointNotFoundError as error:
        checkpoint = _later_attempt(storage, directory) or counted_back(storage, directory)
        beside = look_around(storage).current if checkpoint is None and layout.step_of_id(directory) is not None else []
        if beside:
            raise CheckpointNotFoundError(f"{error}; {describe(beside)}") from error
        if checkpoint is None:
            raise
    return storage, checkpoint


def locate_id(storage: Storage, ckpt_id: str) -> Checkpoint:
    """Like :func:`recckpt.output_dir.listing.locate`; also accepts ``latest`` and ``latest~N`` if these are not ids."""
    try:
        return locate(storage, ckpt_id)
    except CheckpointNotFoundError:
        checkpoint = counted_back(storage, ckpt_id)
        if checkpoint is None:
            raise
    return checkpoint


def counted_back(storage: Storage, name: str) -> Checkpoint | None:
    """Return the checkpoint that ``latest`` or ``latest~N`` means, None for any other name.

    Raises CheckpointNotFoundError if there are too few checkpoints.
    """
    match = _LATEST.fullmatch(name)
    if match is None:
        return None
    checkpoints, back = newest_first(storage), int(match[1] or 0)
    if not checkpoints:
        return newest(storage)  # raises an error with the reason
    if back >= len(checkpoints):
        what = f"found no {name!r}: there are only {len(checkpoints)} checkpoints; {describe(checkpoints[::-1])}"
        raise CheckpointNotFoundError(f"{storage.url}: {what}")
    return checkpoints[back]


def _later_attempt(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the newest of ``<directory>.<epoch>``, the names of later attempts after a crash or a compaction."""
    try:
        names = [name for name in attempt_dirs(storage) if layout.is_later_attempt(name, directory)]
    except OSError:  # the bucket or directory may be entered but not listed
        return None
    checkpoints = [checkpoint for name in names if (checkpoint := read_checkpoint(storage, name))]
    return max(checkpoints, key=lambda c: age(c.directory, c.manifest), default=None)


def locate_damaged(path: str) -> tuple[Storage, Checkpoint, list[CorruptCheckpointError]]:
    """Return the checkpoint at a path, or an intact one of the same name; for an output dir the newest, damaged or not.

    Returns:
        Its storage, the checkpoint, and for an output dir the errors of other manifests, which may be newer.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the manifest is damaged, so its contents are unknown.
        FormatVersionError: a newer format wrote this checkpoint, or another one in the output dir.
    """
    storage, directory = open_parent(path)
    with suppress(CorruptCheckpointError), lost_is_damage(directory):
        if (checkpoint := read_checkpoint(storage, directory)) is not None:
            return storage, checkpoint, []
    if (record := read_manifest(storage, directory)) is not None:
        return storage, Checkpoint(directory, record), []
    inside = open_storage(path)
    newest, passed_over = _newest(inside)
    if newest is not None:
        return inside, newest, passed_over
    if passed_over:
        raise passed_over[0]
    if (counted := counted_back(storage, directory)) is not None:
        return storage, counted, []
    what = inside.why_empty() or f"found no {layout.MANIFEST}"
    raise CheckpointNotFoundError(f"{path}: {what}; name the checkpoint's own directory")


def _newest(storage: Storage) -> tuple[Checkpoint | None, list[CorruptCheckpointError]]:
    listing = look_around(storage)
    for error in listing.damaged.values():
        if isinstance(error, FormatVersionError):  # this checkpoint may be the newest, or decide which ones are valid
            raise error
    there = (*listing.committed, *listing.lost)
    newest = max(there, key=lambda c: age(c.directory, c.manifest), default=None)
    newest = newest and (listing.named(newest.manifest.name) or newest)
    own = {newest.directory, *(link.directory for link in newest.manifest.chain)} if newest else set()
    known, passed_over = {lost.directory for lost in listing.lost}, list[CorruptCheckpointError]()
    for directory, problem in (listing.damaged | listing.unreadable).items():
        if directory not in own:
            log.error("%s/%s is damaged and skipped: %s", storage.url, directory, problem)
            if directory in listing.directories and directory not in known:
                passed_over.append(_damage_of(directory, problem))
    for directory, reason in listing.fenced.items():
        log.warning("%s/%s: %s", storage.url, directory, reason)
    return newest, passed_over


def _damage_of(directory: str, error: Damage) -> CorruptCheckpointError:
    try:
        with lost_is_damage(layout.join(directory, layout.MANIFEST)):
            raise error
    except CorruptCheckpointError as damage:
        return damage


def links_there(storage: Storage, newest: Checkpoint) -> Iterator[Checkpoint | CorruptCheckpointError]:
    """Yield the links of a checkpoint, newest first. If a link is missing or damaged, yield its error and stop."""
    above = newest.manifest
    yield replace(newest, below=())
    yield from newest.below
    for hint in () if newest.below else newest.manifest.chain:
        link = _found(storage, hint, above.parent)
        if isinstance(link, CorruptCheckpointError):
            yield link
            return
        yield replace(link, below=())
        if link.below:
            yield from link.below
            return
        above = link.manifest


def _found(storage: Storage, hint: Link, parent: Parent | None) -> Checkpoint | CorruptCheckpointError:
    """Return a link, or another checkpoint of the same name, preferably one without missing files; else the error."""
    path, found = layout.join(hint.directory, layout.MANIFEST), "no such file"
    there: Checkpoint | None = None
    try:
        with lost_is_damage(path):
            record = read_manifest(storage, hint.directory)
            if record is not None and _is_meant(record, hint, parent):
                there = Checkpoint(hint.directory, record)
                if next(file_problems(storage, hint.directory, record.files), None) is None:
                    return there
            found = "the manifest of another save" if record else found
    except (CorruptCheckpointError, FormatVersionError) as error:
        found = str(error.found)
    try:
        listing = look_around(storage)
    except OSError:  # the bucket or directory may be entered but not listed
        if there is None:
            raise
        return there
    for other in (listing.named(hint.save_id), there, *listing.lost):
        if other is not None and _is_meant(other.manifest, hint, parent):
            return other
    return CorruptCheckpointError(path, "", found=found, expected="a checkpoint that newer links are based on")


def _is_meant(record: Manifest, hint: Link, parent: Parent | None) -> bool:
    checksum = parent.manifest if parent is not None and parent.save_id == hint.save_id else None
    return record.name == hint.save_id and checksum in (None, record.name_xxh3)
