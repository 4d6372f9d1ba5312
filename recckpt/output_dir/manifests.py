"""The manifests of an output dir, read and compared with what lies beside them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout, manifest
from recckpt.format.manifest import Manifest
from recckpt.storage import ABSENT, NOT_READABLE, Listed, NotPlainError, Storage, missing

log = logging.getLogger("recckpt")

_HEAD_BYTES = 4096  # of a manifest of ours, in which its format is named


def read_manifest(storage: Storage, directory: str) -> Manifest | None:
    """Return the manifest in a directory, None where there is none of ours; its files are not looked at.

    Raises:
        CorruptCheckpointError: the manifest is damaged, or something else than a file.
        FormatVersionError: written by a newer format.
    """
    path = layout.join(directory, layout.MANIFEST)
    try:
        data = storage.read(path, manifest.MAX_BYTES + 1)
    except NotPlainError as error:
        raise missing(path, error, "a manifest") from error
    except ABSENT:
        return None
    try:
        return manifest.decode(data, path)
    except CorruptCheckpointError:
        if _is_foreign(storage, directory, data):
            log.debug("%s/%s is not a manifest of recckpt, and ignored", storage.url, path)
            return None
        raise


def has_manifest(storage: Storage, directory: str) -> bool:
    """Say whether a directory has a manifest of ours, damaged or not."""
    path = layout.join(directory, layout.MANIFEST)
    try:
        return not _is_foreign(storage, directory, storage.read(path, _HEAD_BYTES))
    except NotPlainError:
        return True
    except ABSENT:
        return False


def _is_foreign(storage: Storage, directory: str, data: bytes) -> bool:
    """Say whether a file is another program's: it does not name our format, and no save has made its directory."""
    if not data or f'"{manifest.FORMAT}"'.encode() in data[:_HEAD_BYTES]:
        return False
    try:
        storage.size(layout.join(directory, layout.INTENT))
    except ABSENT:
        return True
    except NotPlainError:
        return False
    return False


def file_problems(
    storage: Storage, directory: str, record: Manifest, listed: Mapping[str, Listed] | None = None
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each file of a manifest that is not there with its size.

    Args:
        storage: the output dir.
        directory: of the checkpoint.
        record: its manifest.
        listed: the files that a listing has just shown; None for one to be made now.
    """
    listed = listed_files(storage, directory) if listed is None else listed
    for file in record.files:
        if file.name in listed and listed[file.name].n_bytes == file.n_bytes:
            continue
        name = layout.join(directory, file.name)
        try:
            size = storage.size(name)
        except NOT_READABLE as error:
            yield missing(name, error, f"{file.n_bytes} bytes")
            continue
        if size != file.n_bytes:
            yield CorruptCheckpointError(name, "its size", found=f"{size} bytes", expected=f"{file.n_bytes} bytes")


def listed_files(storage: Storage, directory: str) -> dict[str, Listed]:
    """Return the files that one listing shows, {} where it cannot be made: each has to be asked for then."""
    try:
        return storage.listed(directory)
    except OSError:  # of a bucket or directory that may be entered but not listed
        return {}


class Manifests:
    """The manifests that a writer has read: each is read once, since none is ever changed. Not thread-safe.

    What was put in the place of one by hand has another size or stamp in the listing, and is read. Damage that changes
    neither is not seen here; readers keep nothing, so they see it.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Listed, Manifest]] = {}

    def read(self, storage: Storage, directory: str) -> tuple[Manifest | None, dict[str, Listed]]:
        """Return what :func:`read_manifest` does, and the files of the directory as far as a listing shows them."""
        listed = listed_files(storage, directory)
        found = listed.get(layout.MANIFEST)
        known = self._known.pop(directory, None)
        record = known[1] if known and found == known[0] else read_manifest(storage, directory)
        if record is not None and found is not None and found.stamp:
            self._known[directory] = found, record
        return record, listed

    def forget_others(self, directories: Collection[str]) -> None:
        """Drop what is known of other directories than these."""
        self._known = {name: known for name, known in self._known.items() if name in directories}
