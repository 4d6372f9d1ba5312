"""What lies beside the checkpoints of a run, brought into its mirror: pins, timeline, audit and index file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from recckpt.format import layout
from recckpt.output_dir.rotation import pinned_ids
from recckpt.storage import ABSENT, Storage

_MOST_BYTES = 1 << 30
_PINNED = b'{"by": "recckpt mirror"}\n'  # a pin of the run; others in the mirror are of whoever uses it


def copy_informative(run: Storage, to: Storage) -> None:
    """Bring the timeline, the audit of what was forgotten, and its key, as they are in the run by now."""
    for name in (layout.TIMELINE, layout.FORGOTTEN, layout.FORGET_KEY):
        data = _content(run, name)
        if data is not None:
            replace_other(to, name, data)
        elif name == layout.FORGET_KEY and _content(to, name) is not None:
            to.remove(name)  # so that nobody can test ids any more


def copy_pins(run: Storage, to: Storage, ckpt_ids: Collection[str]) -> None:
    """Pin what is pinned in the run, and unpin what is not any more, of the checkpoints that are in the mirror."""
    pinned, there = pinned_ids(run).intersection(ckpt_ids), pinned_ids(to)
    if pinned - there:
        _make_dirs(to, layout.PINS_DIR)
    for ckpt_id in pinned - there:
        with suppress(FileExistsError):
            to.put_if_absent(layout.pin(ckpt_id), _PINNED)
    for ckpt_id in there - pinned:
        if _content(to, layout.pin(ckpt_id)) == _PINNED:
            to.remove(layout.pin(ckpt_id))


def mark_forgotten(to: Storage, requests: Iterable[str]) -> None:
    """Note that what the run was asked to forget is forgotten in the mirror, so that who restored from it is known."""
    requests = list(requests)
    if requests:
        _make_dirs(to, layout.FORGET_DIR)
    for request in requests:
        with suppress(FileExistsError):
            to.put_if_absent(layout.forget_request(request, is_done=True), b"{}\n")


def replace_other(to: Storage, name: str, data: bytes) -> None:
    """Replace a file, unless it has this content."""
    if _content(to, name) != data:
        directory = name.rpartition("/")[0]
        if directory:
            _make_dirs(to, directory)
        to.replace(name, data)


def _make_dirs(to: Storage, directory: str) -> None:
    for name in (layout.OWN_DIR, directory):
        with suppress(FileExistsError):
            to.make_dir(name)


def _content(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name, _MOST_BYTES)
    except ABSENT:
        return None
