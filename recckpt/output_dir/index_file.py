"""The index file: a hint for people and scripts, compared with the manifests and made anew, and never relied on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from recckpt.format import layout
from recckpt.output_dir.recis import NOTE, is_of_recis
from recckpt.storage import NotPlainError, Storage

log = logging.getLogger("recckpt")

_MISSING, _STALE = "missing", "stale"  # what a death between two steps of a save leaves, or a save that is under way


def encode_index(ckpt_ids: Sequence[str]) -> bytes:
    """Return the index file of committed checkpoints, oldest first."""
    return "".join(f"{layout.encode_id(ckpt_id)}\n" for ckpt_id in ckpt_ids).encode()


def index_problem(storage: Storage, ckpt_ids: Sequence[str]) -> str:
    """Say what is wrong with the index file of an output dir; "" where it is right.

    Args:
        storage: the output dir.
        ckpt_ids: what is committed, oldest first.

    Raises:
        OSError: the storage failed.
    """
    expected = encode_index(ckpt_ids)
    try:
        found = storage.read(layout.INDEX_FILE, 2 * len(expected) + layout.MAX_ID_BYTES)
    except FileNotFoundError:
        return _MISSING if expected else ""
    except NotPlainError as error:
        return error.found.removeprefix("unsafe path: ")
    if found == expected:
        return ""
    if not found.endswith(b"\n"):
        return "torn" if found else "empty"
    committed = expected.splitlines()
    strange = [line for line in found.splitlines() if line not in committed]
    return f"naming {strange[0][:99].decode(errors='replace')!r}, which is not committed" if strange else _STALE


def warn_of_index(
    storage: Storage, ckpt_ids: Sequence[str], look_again: Callable[[], Sequence[str]] | None = None
) -> None:
    """Log what is wrong with the index file; nothing depends on it, so neither does anything fail.

    Args:
        storage: the output dir.
        ckpt_ids: what is committed, oldest first.
        look_again: lists that anew, where another process may be saving: what comes of its saves is no problem.
    """
    try:
        problem = index_problem(storage, ckpt_ids)
        if problem not in ("", _MISSING, _STALE) and look_again:
            problem = index_problem(storage, look_again())
    except OSError as error:
        problem = f"not readable ({error})"
    if problem.startswith("naming") and is_of_recis(storage):
        log.warning("%s: %s; its file %r is left alone", storage.url, NOTE, layout.INDEX_FILE)
    elif problem and problem != _MISSING and not (look_again and problem == _STALE):
        log.warning(
            "%s/%s is %s; the manifests are what counts, and the next save, or `recckpt repair`, makes it anew",
            storage.url,
            layout.INDEX_FILE,
            problem,
        )
