"""The contents of a checkpoint's directory: its INTENT, its manifest, and the files that the manifest lists."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, manifest
from recckpt.format.codec import parse
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.storage import ABSENT, NOT_READABLE, Listed, NotPlainError, Storage, missing
from recckpt.storage.base import Files
from recckpt.storage.local_files import drop_pages
from recckpt.storage.retry import read_twice

log = logging.getLogger("recckpt")
_INTENT_BYTES = 1 << 16
_HEAD_BYTES = 4096  # first bytes of a manifest, which contain the name of the format
Damage = CorruptCheckpointError | FormatVersionError | OSError


def state_of(error: Damage) -> str:
    return error.state if isinstance(error, FormatVersionError) else "damaged"


@dataclass(frozen=True)
class Intent:
    directory: str  # only this attempt writes there
    epoch: int  # epoch of the writer
    save_id: str  # 32 hex digits, fresh for each attempt
    step: int | None  # None if the writer does not count
    is_offer: bool = False  # whether a compactor made it, to be committed by the owner


def write_intent(storage: Storage, intent: Intent) -> None:
    """Mark a directory as belonging to this attempt; FileExistsError if it belongs to another attempt."""
    storage.put_if_absent(layout.join(intent.directory, layout.INTENT), encode_intent(intent))


def encode_intent(intent: Intent) -> bytes:
    of_offer = {"offer": True} if intent.is_offer else {}
    return json.dumps({"epoch": intent.epoch, "save_id": intent.save_id, "step": intent.step, **of_offer}).encode()


def intent_of(manifest: Manifest) -> bytes:
    return encode_intent(Intent("", manifest.epoch, manifest.save_id, manifest.step, manifest.is_compacted))


def read_intent(storage: Storage, directory: str, file: str = layout.INTENT) -> Intent | None:
    """Return the intent in a directory, which names the save that made the directory; None without the file.

    Raises OSError if the file cannot be read, CorruptCheckpointError if it is damaged.
    """
    name = layout.join(directory, file)

    def read() -> Intent:
        fields = parse(storage.read(name, _INTENT_BYTES), name)
        step = None if fields.values.get("step") is None else fields.count("step")
        is_offer = fields.values.get("offer") is True
        return Intent(directory, fields.count("epoch"), fields.text("save_id"), step, is_offer)

    try:
        return read_twice(storage, name, read)
    except ABSENT:
        return None


def read_manifest(storage: Storage, directory: str) -> Manifest | None:
    """Return the manifest in a directory; None if there is no manifest of recckpt. Does not check the files.

    Raises CorruptCheckpointError if the manifest is damaged or not a file, FormatVersionError if a newer format wrote
    it.
    """
    return read_twice(storage, layout.join(directory, layout.MANIFEST), partial(_read_manifest, storage, directory))


def _read_manifest(storage: Storage, directory: str) -> Manifest | None:
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
    path = layout.join(directory, layout.MANIFEST)
    try:
        return not _is_foreign(storage, directory, storage.read(path, _HEAD_BYTES))
    except NotPlainError:
        return True
    except ABSENT:
        return False


def refuse_checkpoint(storage: Storage) -> None:
    """Raise ValueError if the intended output dir is the directory of a checkpoint or of an unfinished save."""
    is_attempt = False
    with suppress(OSError):
        is_attempt = storage.size(layout.INTENT) >= 0
    if is_attempt or has_manifest(storage, ""):
        parent, _, _ = storage.url.rpartition("/")
        raise ValueError(
            f"output_dir: {storage.url} is a checkpoint of {parent}; give {parent}, or another directory for a new run"
        )


def _is_foreign(storage: Storage, directory: str, data: bytes) -> bool:
    """Return whether another program wrote a manifest: it does not name our format, and there is no INTENT."""
    if not data or f'"{manifest.KIND.format}"'.encode() in data[:_HEAD_BYTES]:
        return False
    try:
        storage.size(layout.join(directory, layout.INTENT))
    except ABSENT:
        return True
    except NotPlainError:
        return False
    return False


class Manifests:
    """The manifests that a writer has read. Each is read once, because manifests never change.

    A replaced file has another size or stamp in the listing, and is read again. Damage that changes neither size nor
    stamp is not seen here; readers see it, because they keep nothing. Several threads may read in parallel, from
    different directories.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Listed, Manifest]] = {}
        self._files: Mapping[str, Mapping[str, Listed]] | None = None

    def directories(self, storage: Storage) -> list[str]:
        """Like :func:`attempt_dirs`; lists all files at once if the storage can."""
        files = self._files = storage.listed_by_dir()
        names = attempt_dirs(storage) if files is None else sorted(set(files).difference([layout.OWN_DIR]))
        self._known = {name: self._known[name] for name in names if name in self._known}
        return names

    def read(self, storage: Storage, directory: str) -> tuple[Manifest | None, Mapping[str, Listed]]:
        """Like :func:`read_manifest`; also returns the files that a listing of the directory shows."""
        listed = listed_files(storage, directory) if self._files is None else self._files.get(directory, {})
        entry = listed.get(layout.MANIFEST)
        known = self._known.pop(directory, None)
        record = known[1] if known and entry == known[0] else read_manifest(storage, directory)
        if record is not None and entry is not None and entry.stamp:
            self._known[directory] = entry, record
        return record, listed


def attempt_dirs(storage: Storage) -> list[str]:
    return [name for name in storage.list_dirs() if name != layout.OWN_DIR]


def listed_files(storage: Storage, directory: str) -> dict[str, Listed]:
    """Return the files that one listing shows; {} if listing is not permitted, so each file has to be looked up."""
    try:
        return storage.listed(directory)
    except OSError:  # the bucket or directory may be read but not listed
        return {}


def unlisted(files: Iterable[FileEntry], listed: Mapping[str, Listed]) -> list[FileEntry]:
    """Return the files of a manifest that a listing lacks or shows with another size; listings may lag behind."""
    return [file for file in files if file.name not in listed or listed[file.name].n_bytes != file.n_bytes]


def file_problems(
    storage: Storage, directory: str, files: Iterable[FileEntry], listed: Mapping[str, Listed] | None = None
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each file of a manifest that is missing or has another size."""
    for file in unlisted(files, listed_files(storage, directory) if listed is None else listed):
        name = layout.join(directory, file.name)
        try:
            size = storage.size(name)
        except NOT_READABLE as error:
            yield missing(name, error, f"{file.n_bytes} bytes")
            continue
        if size != file.n_bytes:
            yield CorruptCheckpointError(name, "its size", found=f"{size} bytes", expected=f"{file.n_bytes} bytes")


def read_checked(storage: Files, directory: str, entry: FileEntry, most: int | None = None) -> bytes:
    """Return the bytes of a file after checking its checksum and its size, at most ``most``.

    Raises CorruptCheckpointError if the file is missing, too large, or has another size or checksum.
    """
    path = layout.join(directory, entry.name)
    if most is not None and entry.n_bytes > most:  # before reading the file
        raise CorruptCheckpointError(path, "its size", found=f"{entry.n_bytes} bytes", expected=f"at most {most}")
    return bytes(read_twice(storage, path, partial(_read_checked, storage, path, entry)))  # no copy: these are bytes


def map_checked(storage: Files, directory: str, entry: FileEntry) -> bytes | memoryview:
    """Like :func:`read_checked`, but return a memory map, which uses no memory yet, if the storage supports maps."""
    path = layout.join(directory, entry.name)
    return read_twice(storage, path, partial(_read_checked, storage, path, entry, storage.map))


def _read_checked(
    storage: Files, path: str, entry: FileEntry, map_file: Callable[[str], memoryview | None] = lambda path: None
) -> bytes | memoryview:
    try:
        mapped = map_file(path)
        data: bytes | memoryview = storage.read(path, entry.n_bytes + 1) if mapped is None else mapped
    except NOT_READABLE as error:
        raise missing(path, error, f"{entry.n_bytes} bytes") from error
    n_bytes = len(data)
    found = xxhash.xxh3_64_intdigest(data) if n_bytes == entry.n_bytes else 0
    if n_bytes == entry.n_bytes and found == entry.xxh3:
        if mapped is not None:
            drop_pages(mapped)
        return data
    del data, mapped  # so that a kept error does not keep the map open
    if n_bytes != entry.n_bytes:
        raise CorruptCheckpointError(path, "its size", found=n_bytes, expected=f"{entry.n_bytes} bytes")
    raise CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{entry.xxh3:016x}")
