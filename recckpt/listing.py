"""What is committed: found by looking at the manifests, the only truth there is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from recckpt import layout, manifest
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.manifest import Manifest
from recckpt.storage import Storage, open_parent, open_storage

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint and the directory it lies in."""

    directory: str
    manifest: Manifest

    @property
    def ckpt_id(self) -> str:
        """Its id."""
        return self.manifest.ckpt_id


@dataclass(frozen=True)
class Listing:
    """The checkpoints of an output dir, oldest first.

    Attributes:
        committed: all committed ones, superseded ones included.
        damaged: directory -> error, of those with a manifest that cannot be trusted.
    """

    committed: tuple[Checkpoint, ...]
    damaged: dict[str, CorruptCheckpointError | FormatVersionError]

    @property
    def current(self) -> list[Checkpoint]:
        """The newest checkpoint of each id."""
        newest = {checkpoint.ckpt_id: checkpoint for checkpoint in self.committed}
        return [checkpoint for checkpoint in self.committed if newest[checkpoint.ckpt_id] is checkpoint]

    @property
    def next_seq(self) -> int:
        """The sequence number of the next commit."""
        return 1 + max((checkpoint.manifest.seq for checkpoint in self.committed), default=0)

    def find(self, ckpt_id: str) -> Checkpoint | None:
        """Return the newest committed checkpoint of an id."""
        return next((c for c in reversed(self.committed) if c.ckpt_id == ckpt_id), None)


def list_checkpoints(storage: Storage) -> Listing:
    """Read all manifests of an output dir and check that their files are there."""
    committed, damaged = [], {}
    for directory in storage.list_dirs():
        try:
            checkpoint = read_checkpoint(storage, directory)
        except (CorruptCheckpointError, FormatVersionError) as error:
            damaged[directory] = error
        else:
            committed += [checkpoint] if checkpoint else []
    return Listing(tuple(sorted(committed, key=lambda c: c.manifest.order)), damaged)


def read_checkpoint(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the committed checkpoint in a directory, None where there is no manifest.

    Raises:
        CorruptCheckpointError: the manifest is damaged, or a file that it lists is not there with its size.
        FormatVersionError: written by a newer format.
    """
    path = layout.join(directory, layout.MANIFEST)
    try:
        data = storage.read(path, manifest.MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = manifest.decode(data, path)
    for file in found.files:
        name = layout.join(directory, file.name)
        try:
            size = storage.size(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpointError(name, "", found="no such file", expected=f"{file.n_bytes} bytes") from error
        if size != file.n_bytes:
            raise CorruptCheckpointError(name, "its size", found=f"{size} bytes", expected=f"{file.n_bytes} bytes")
    return Checkpoint(directory, found)


def locate(storage: Storage, ckpt_id: str) -> Checkpoint:
    """Return the committed checkpoint of an id.

    Raises:
        CheckpointNotFoundError: there is none; says which there are.
        CorruptCheckpointError: there is one, and it is damaged.
    """
    listing = list_checkpoints(storage)
    found = listing.find(ckpt_id)
    if found is None:
        encoded = layout.encode_id(ckpt_id)
        for directory, error in listing.damaged.items():
            if directory == encoded or directory.startswith(f"{encoded}."):
                raise error
        raise CheckpointNotFoundError(
            f"{storage.url}: found no committed checkpoint {ckpt_id!r}; {describe(listing.current)}"
        )
    return found


def newest(storage: Storage) -> Checkpoint:
    """Return the newest committed checkpoint, passing over damaged ones with an error in the log.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: there are only damaged ones.
        FormatVersionError: there are only such as a newer recckpt wrote.
    """
    listing = list_checkpoints(storage)
    for directory, error in listing.damaged.items():
        log.error("%s/%s cannot be used: %s", storage.url, directory, error)
    if not listing.committed and listing.damaged:
        raise next(iter(listing.damaged.values()))
    if not listing.committed:
        raise CheckpointNotFoundError(f"{storage.url}: found no committed checkpoint")
    return listing.current[-1]


def open_checkpoint(path: str) -> tuple[Storage, Checkpoint]:
    """Return the storage around one checkpoint's directory or URL, and the checkpoint.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CorruptCheckpointError: there is one, and it is damaged.
    """
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is None:
        raise CheckpointNotFoundError(
            f"{path}: found no {layout.MANIFEST}, expected a committed checkpoint; name the checkpoint's own directory"
        )
    return storage, checkpoint


def locate_path(path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint at ``path``, or the newest one where ``path`` is an output dir."""
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is None:
        storage = open_storage(path)
        checkpoint = newest(storage)
    return storage, checkpoint


def describe(checkpoints: Sequence[Checkpoint]) -> str:
    """Say in a message which checkpoints there are."""
    if not checkpoints:
        return "there are none in this output dir"
    return "there are " + ", ".join(repr(checkpoint.ckpt_id) for checkpoint in checkpoints[-8:])
