"""Cleans up an output dir after crashes: rewrites the index file, classifies leftovers, and removes dead leftovers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import read_intent, read_manifest
from recckpt.output_dir.claims import NO_TAKEOVER, Takeover, last_takeover, read_claim
from recckpt.output_dir.forget_requests import pending
from recckpt.output_dir.index_file import index_problem, is_of_recis, why_nothing
from recckpt.output_dir.listing import Checkpoint, Listing, list_checkpoints
from recckpt.storage import Storage, open_storage
from recckpt.text import Progress, plural

_LOOKS_APART = 1.0  # seconds that a temporary file must exist: a running save keeps one only for an instant


@dataclass(frozen=True)
class Leftover:
    path: str  # path of the directory or file, in the output dir
    what: str  # what the leftover is, and whose
    is_dead: bool  # whether no process can still be writing the leftover, so that it may be removed


@dataclass(frozen=True)
class Repaired:
    url: str  # the output dir
    checkpoints: tuple[str, ...]  # ids in the new index file, newest last
    index_problem: str  # what was wrong with the old index file; "" if nothing was
    leftovers: tuple[Leftover, ...]  # files and directories that crashes left behind
    damaged: dict[str, str]  # directory of a damaged checkpoint -> what is wrong; these are never removed
    removed: tuple[str, ...]  # paths of the removed leftovers; with dry_run, of those that would be removed

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(left.path for left in self.leftovers if left.is_dead and left.path not in self.removed)


def repair(url: str, *, clean: bool = False, dry_run: bool = False) -> Repaired:
    """Rewrite the index file of an output dir, and list what crashes left; ``clean`` removes dead leftovers.

    Never removes damaged checkpoints, files that recckpt did not make, or files of the last writer, which may be alive.
    Raises CheckpointNotFoundError for a directory that is not an output dir, FormatVersionError if a newer recckpt
    wrote there. After an OSError a leftover may be half removed; no reader looks at it.
    """
    storage = open_storage(url)
    listing = list_checkpoints(storage)
    for error in listing.damaged.values():
        if isinstance(error, FormatVersionError):
            raise error
    leftovers = list(_leftovers(storage, listing))
    is_output_dir = listing.committed or listing.damaged or layout.OWN_DIR in storage.list_dirs()
    if not is_output_dir and not any(left.is_dead for left, _ in leftovers):
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}, expected an output dir")
    problem = index_problem(storage, listing.ckpt_ids)
    if problem and not dry_run and not is_of_recis(storage):
        storage.replace(layout.INDEX_FILE, layout.encode_index(listing.ckpt_ids))
    dead = [left.path for left, _ in leftovers if left.is_dead]
    return Repaired(
        url=storage.url,
        checkpoints=tuple(listing.ckpt_ids),
        index_problem=problem,
        leftovers=tuple(left for left, _ in leftovers),
        damaged={name: str(error) for name, error in listing.damaged.items()},
        removed=tuple(dead if dry_run else _clean(storage, leftovers)) if clean else (),
    )


_Removal = Callable[[], object]


def _leftovers(storage: Storage, listing: Listing) -> Iterator[tuple[Leftover, _Removal]]:
    """Yield the leftovers, each with the call that removes it."""
    last = known_takeover(storage)
    for directory, reason in listing.fenced.items():
        yield Leftover(directory, f"a late commit, {reason}", True), partial(_remove_fenced, storage, directory)
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if layout.MANIFEST in names or (names and not any(map(layout.is_ours, names))):
            continue  # committed meanwhile, or not made by recckpt
        what, is_dead = unfinished(storage, directory, last, names)
        removal = partial(rotation.remove_leftover, storage, directory, rotation.THREADS)
        yield Leftover(directory, what, is_dead), removal
    try:
        requests = pending(storage)
    except (CorruptCheckpointError, OSError) as error:
        requests, path = [], error.path if isinstance(error, CorruptCheckpointError) else layout.FORGET_DIR
        yield Leftover(path, f"a damaged request to forget ids: {error}", False), lambda: None
    for request in requests:
        what = f"a request to forget {plural(len(request.ids), 'id')}, unfinished: `recckpt forget DIR` continues it"
        yield Leftover(layout.forget_request(request.request), what, False), lambda: None
    for name in filter(layout.is_temporary, storage.list_files("")):
        yield Leftover(name, "a temporary file", True), partial(storage.remove, name)


def known_takeover(storage: Storage) -> Takeover:
    """Return the newest takeover; if it is damaged, return a takeover that marks no writer as dead."""
    try:
        return last_takeover(storage)
    except CorruptCheckpointError:
        return NO_TAKEOVER


def unfinished(storage: Storage, directory: str, last: Takeover, names: Sequence[str]) -> tuple[str, bool]:
    """Describe a directory without a manifest, and whether its writer is dead because a later writer took over."""
    died_at_once = bool(names) and all(layout.is_draft(name, layout.INTENT) for name in names)
    try:
        intent = read_intent(storage, directory, names[0] if died_at_once else layout.INTENT)
    except (OSError, CorruptCheckpointError) as error:
        return f"an unfinished save, whose {layout.INTENT} cannot be read: {error}", last.has_seen(directory)
    if intent is not None:
        whose = f"epoch {intent.epoch}"
        with suppress(OSError, CorruptCheckpointError, FormatVersionError):
            claim = read_claim(storage, intent.epoch)
            whose += f": process {claim.pid} on {claim.host} since {claim.time}"
        kind = "an offer that is not adopted" if intent.is_offer else "an unfinished save"
        return f"{kind}, {whose}", intent.epoch < last.epoch
    if not names:
        return "an empty directory, perhaps of a save that has just begun", last.has_seen(directory)
    return f"files without {layout.INTENT}: their writer is unknown", False


def _clean(storage: Storage, leftovers: list[tuple[Leftover, _Removal]]) -> list[str]:
    dead = [(left.path, removal) for left, removal in leftovers if left.is_dead]
    directories = [path for path, _ in dead if not layout.is_temporary(path)]
    sizes = {path: sum(file.n_bytes for file in storage.listed(path).values()) for path in directories}
    if len(directories) < len(dead):
        time.sleep(_LOOKS_APART)
    present = set(storage.list_files(""))
    with Progress("removing what crashes left", sum(sizes.values())) as progress:
        for path, removal in dead:
            if not layout.is_temporary(path) or path in present:
                removal()
            progress.advance(sizes.get(path, 0))
    left = {leftover.path for leftover, _ in _leftovers(storage, list_checkpoints(storage))}
    return [path for path, _ in dead if path not in left]


def _remove_fenced(storage: Storage, directory: str) -> None:
    record = read_manifest(storage, directory)
    if record is not None and last_takeover(storage).excludes(record):
        rotation.remove(storage, Checkpoint(directory, record), rotation.THREADS)
