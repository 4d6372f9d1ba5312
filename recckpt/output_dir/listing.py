"""What is committed: found by looking at the manifests, the only truth there is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, manifest
from recckpt.format.manifest import Manifest
from recckpt.output_dir.claims import NO_TAKEOVER, Takeover, last_takeover
from recckpt.storage import Storage, UnsafeLinkError, missing, open_parent, open_storage

log = logging.getLogger("recckpt")

_TRIES = 3  # looks at a directory that seems empty: rotation may have removed what a commit has replaced meanwhile


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
        damaged: directory -> error, of those with a manifest that cannot be trusted; a damaged file that says who
            owns the output dir is here too, under its own name.
        fenced: directory -> reason, of those that a writer committed after it had lost the output dir.
        highest_seq: the highest sequence number that was seen, of a damaged one, it may be; 0 where there is none.
        highest_epoch: the same.
        save_ids: of all whose manifest counts, whether their files are whole or not.
    """

    committed: tuple[Checkpoint, ...]
    damaged: dict[str, CorruptCheckpointError | FormatVersionError]
    fenced: dict[str, str]
    highest_seq: int = 0
    highest_epoch: int = 0
    save_ids: frozenset[str] = frozenset()

    @property
    def current(self) -> list[Checkpoint]:
        """The newest checkpoint of each id."""
        newest = {checkpoint.ckpt_id: checkpoint for checkpoint in self.committed}
        return [checkpoint for checkpoint in self.committed if newest[checkpoint.ckpt_id] is checkpoint]

    @property
    def is_empty(self) -> bool:
        """Whether there is none, not even a damaged one."""
        return not self.committed and not self.damaged

    @property
    def next_seq(self) -> int:
        """The sequence number of the next commit."""
        return 1 + self.highest_seq

    def find(self, ckpt_id: str) -> Checkpoint | None:
        """Return the newest committed checkpoint of an id."""
        return next((c for c in reversed(self.committed) if c.ckpt_id == ckpt_id), None)


def list_checkpoints(storage: Storage) -> Listing:
    """Read all manifests of an output dir and check that their files are there."""
    for _ in range(_TRIES):
        directories = attempt_dirs(storage)
        listing = _list(storage, directories)
        if listing.committed or not directories:
            break
    return listing


def attempt_dirs(storage: Storage) -> list[str]:
    """Return the directories of an output dir, committed or not, but for recckpt's own."""
    return [name for name in storage.list_dirs() if not layout.is_own(name)]


def _list(storage: Storage, directories: Sequence[str]) -> Listing:
    damaged: dict[str, CorruptCheckpointError | FormatVersionError] = {}
    found: list[Checkpoint] = []
    for directory in directories:
        try:
            record = read_manifest(storage, directory)
        except (CorruptCheckpointError, FormatVersionError) as error:
            damaged[directory] = error
            continue
        if record is not None:
            found.append(Checkpoint(directory, record))
    takeover = _takeover(storage, damaged)  # after the manifests: what is committed meanwhile is only not seen yet
    fenced = {c.directory: reason for c in found if (reason := takeover.excludes(c.manifest))}
    counted, committed = [c for c in found if c.directory not in fenced], []
    for checkpoint in counted:
        problem = next(file_problems(storage, checkpoint.directory, checkpoint.manifest), None)
        if problem is None:
            committed.append(checkpoint)
        elif read_manifest(storage, checkpoint.directory) is not None:  # or it has just been removed
            damaged[checkpoint.directory] = problem
    return Listing(
        committed=tuple(sorted(committed, key=lambda c: (c.manifest.order, layout.is_attempt(c.directory, c.ckpt_id)))),
        damaged=damaged,
        fenced=fenced,
        highest_seq=max((c.manifest.seq for c in found), default=0),
        highest_epoch=max((c.manifest.epoch for c in found), default=0),
        save_ids=frozenset(c.manifest.save_id for c in counted),
    )


def _takeover(storage: Storage, damaged: dict[str, CorruptCheckpointError | FormatVersionError]) -> Takeover:
    """Return the last takeover; where its list is damaged, a late commit counts rather than a good one is lost."""
    try:
        return last_takeover(storage)
    except (CorruptCheckpointError, FormatVersionError) as error:
        damaged[error.path] = error
        return NO_TAKEOVER


def read_checkpoint(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the committed checkpoint in a directory, None where there is no manifest.

    Raises:
        CheckpointNotFoundError: a writer committed it after it had lost the output dir.
        CorruptCheckpointError: the manifest is damaged, or a file that it lists is not there with its size.
        FormatVersionError: written by a newer format.
    """
    found = read_manifest(storage, directory)
    if found is None:
        return None
    reason = last_takeover(storage).excludes(found)
    if reason is not None:
        raise CheckpointNotFoundError(f"{storage.url}/{directory}: {reason}")
    for problem in file_problems(storage, directory, found):
        if read_manifest(storage, directory) is None:  # its writer has just removed it
            return None
        raise problem
    return Checkpoint(directory, found)


def read_manifest(storage: Storage, directory: str) -> Manifest | None:
    """Return the manifest in a directory, None where there is none; its files are not looked at.

    Raises:
        CorruptCheckpointError: the manifest is damaged.
        FormatVersionError: written by a newer format.
    """
    path = layout.join(directory, layout.MANIFEST)
    try:
        data = storage.read(path, manifest.MAX_BYTES + 1)
    except UnsafeLinkError as error:
        raise missing(path, error, "a manifest") from error
    except (FileNotFoundError, NotADirectoryError):
        return None
    return manifest.decode(data, path)


def file_problems(storage: Storage, directory: str, record: Manifest) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each listed file that is not there with its size."""
    listed = listed_sizes(storage, directory)
    for file in record.files:
        if listed.get(file.name) == file.n_bytes:
            continue
        name = layout.join(directory, file.name)
        try:
            size = storage.size(name)
        except (FileNotFoundError, NotADirectoryError) as error:
            yield missing(name, error, f"{file.n_bytes} bytes")
            continue
        if size != file.n_bytes:
            yield CorruptCheckpointError(name, "its size", found=f"{size} bytes", expected=f"{file.n_bytes} bytes")


def listed_sizes(storage: Storage, directory: str) -> dict[str, int]:
    """Return the sizes of files that one listing tells, {} where there is none: each has to be asked for then."""
    try:
        return storage.sizes(directory)
    except OSError:  # of a bucket or directory that may be entered but not listed
        return {}


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


def newest_first(storage: Storage) -> list[Checkpoint]:
    """Return the committed checkpoints that can be used, [] where nothing was ever saved; damaged ones are logged.

    Raises:
        FormatVersionError: a newer recckpt wrote one, and it may be the newest of all.
        CorruptCheckpointError: there are only damaged ones.
    """
    listing = list_checkpoints(storage)
    for directory, error in listing.damaged.items():
        if isinstance(error, FormatVersionError):
            raise error
        log.error("%s/%s is damaged and passed over: %s", storage.url, directory, error)
    for directory, reason in listing.fenced.items():
        log.warning("%s/%s: %s", storage.url, directory, reason)
    if not listing.committed and listing.damaged:
        raise next(iter(listing.damaged.values()))
    return listing.current[::-1]


def newest(storage: Storage) -> Checkpoint:
    """Return the newest checkpoint that can be used.

    Raises:
        CheckpointNotFoundError: there is none.
        FormatVersionError, CorruptCheckpointError: as :func:`newest_first`.
    """
    found = newest_first(storage)
    if not found:
        raise CheckpointNotFoundError(f"{storage.url}: found no committed checkpoint")
    return found[0]


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
    """Return the checkpoint at ``path``, or the newest one where ``path`` is an output dir.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: there are only damaged ones.
        FormatVersionError: there are only such as a newer recckpt wrote.
    """
    storage, directory = open_parent(path)
    checkpoint = read_checkpoint(storage, directory)
    if checkpoint is not None:
        return storage, checkpoint
    inside = open_storage(path)
    try:
        return inside, newest(inside)
    except CheckpointNotFoundError:
        checkpoint = _later_attempt(storage, directory)
        if checkpoint is None:
            raise
    return storage, checkpoint


def _later_attempt(storage: Storage, directory: str) -> Checkpoint | None:
    """Return the newest checkpoint in ``<directory>.<epoch>``, where the id of a crashed attempt lives on."""
    attempt = re.compile(re.escape(directory) + r"(\.[1-9]\d*){1,2}")
    try:
        names = [name for name in attempt_dirs(storage) if attempt.fullmatch(name)]
    except OSError:  # of a bucket or directory that may be entered but not listed
        return None
    found = [checkpoint for name in names if (checkpoint := read_checkpoint(storage, name))]
    return max(found, key=lambda checkpoint: checkpoint.manifest.order, default=None)


def describe(checkpoints: Sequence[Checkpoint]) -> str:
    """Say in a message which checkpoints there are."""
    if not checkpoints:
        return "there are none in this output dir"
    return "there are " + ", ".join(repr(checkpoint.ckpt_id) for checkpoint in checkpoints[-8:])
