"""The beginning and the end of a save: a directory nobody else writes, and the manifest that makes it count.

Follows docs/format.md, section 7.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from recckpt import layout, manifest
from recckpt.errors import CheckpointExistsError
from recckpt.listing import Listing, list_checkpoints
from recckpt.manifest import Manifest
from recckpt.storage import Storage


@dataclass(frozen=True)
class Attempt:
    """One try at a checkpoint, with a directory of its own."""

    ckpt_id: str
    save_id: str
    directory: str
    seq: int


def begin(storage: Storage, ckpt_id: str, *, overwrite: bool) -> Attempt:
    """Make a directory for a checkpoint that no other attempt has written.

    Raises:
        CheckpointExistsError: the id is committed already, and ``overwrite`` is false.
        ValueError: no checkpoint can have this id.
    """
    layout.encode_id(ckpt_id)
    listing = list_checkpoints(storage)
    present = listing.find(ckpt_id)
    if present and not overwrite:
        raise CheckpointExistsError(
            f"{storage.url}: checkpoint {ckpt_id!r} is committed already, in {present.directory}/; save under another "
            "id, or pass overwrite=True to supersede it"
        )
    save_id = secrets.token_hex(16)
    return Attempt(ckpt_id, save_id, _claim(storage, ckpt_id, save_id), listing.next_seq)


def _claim(storage: Storage, ckpt_id: str, save_id: str) -> str:
    taken = set(storage.list_dirs())
    attempt = 0
    while True:
        directory = layout.attempt_dir(ckpt_id, attempt)
        attempt += 1
        if directory not in taken:
            try:
                storage.make_dir(directory)
                intent = json.dumps({"epoch": 0, "save_id": save_id}).encode()
                storage.put_if_absent(layout.join(directory, layout.INTENT), intent)
            except FileExistsError:
                continue  # another attempt was faster
            return directory


def commit(storage: Storage, directory: str, record: Manifest) -> None:
    """Make a checkpoint visible; from here on it is the newest, even if this call then fails.

    Raises:
        CorruptCheckpointError, ValueError: the manifest could not be read back; nothing is committed.
        OSError: a file has not the size that was written, or the manifest could not be made durable.
    """
    path, data = layout.join(directory, layout.MANIFEST), manifest.encode(record)
    manifest.decode(data, path)  # what no reader would take must not count
    for file in record.files:
        name = layout.join(directory, file.name)
        size = storage.size(name)
        if size != file.n_bytes:
            raise OSError(f"{storage.url}/{name}: found {size} bytes, {file.n_bytes} were written; check the storage")
    for subdirectory in {"", *(file.name.rpartition("/")[0] for file in record.files)}:
        storage.sync_dir(layout.join(directory, subdirectory))
    storage.put_if_absent(path, data)
    storage.sync_dir("")


def write_index(storage: Storage, listing: Listing) -> None:
    """Replace the index file by the listing."""
    lines = "".join(f"{layout.encode_id(checkpoint.ckpt_id)}\n" for checkpoint in listing.current)
    storage.replace(layout.INDEX_FILE, lines.encode())
