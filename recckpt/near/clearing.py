"""All near saves of an output dir go from this host, and the output dir knows of that where it can be reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recckpt.errors import RecckptError
from recckpt.near.near_dir import NearDir
from recckpt.output_dir.forget_requests import done_requests
from recckpt.output_dir.near_hosts import NearHost, note_near_host, noted_host
from recckpt.storage import Storage, open_storage


@dataclass(frozen=True)
class Cleared:
    """What went from a host.

    Attributes:
        removed: directories of near saves.
        url: the output dir; None where it is not known.
        is_noted: whether that knows now that this host has nothing of what was forgotten.
        problem: why it does not; None where it does, or need not.
    """

    removed: tuple[str, ...]
    url: str | None
    is_noted: bool = False
    problem: Exception | None = None


def clear(near_dir: NearDir) -> Cleared:
    """Remove all near saves of an output dir from this host, sealed or not.

    Raises:
        OSError: some of it is left.
    """
    url = near_dir.url()
    try:
        storage = None if url is None else open_storage(url)
        note = None if storage is None else _note(storage, near_dir)  # before: what is forgotten later is not meant
    except (OSError, ValueError, RecckptError) as error:
        return Cleared(tuple(near_dir.clear()), url, problem=error)
    removed = tuple(near_dir.clear())
    if storage is None or note is None:
        return Cleared(removed, url)
    try:
        note_near_host(storage, note)
    except OSError as error:
        return Cleared(removed, url, problem=error)
    return Cleared(removed, url, is_noted=True)


def _note(storage: Storage, near_dir: NearDir) -> NearHost | None:
    """Return what is to be noted of this host; None where nothing was forgotten that it has not noted."""
    before, forgotten = noted_host(storage, near_dir.host()), done_requests(storage)
    if before is None or forgotten <= before.forgotten:
        return None
    return replace(before, forgotten=before.forgotten | forgotten)
