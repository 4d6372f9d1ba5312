"""The beginning and the end of a save: make a new directory, and commit by a manifest.

Follows the commit protocol of docs/format.md, section 7.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from recckpt.errors import CheckpointExistsError, CommitNotDurableError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, manifest
from recckpt.format.codec import COUNT_LIMIT
from recckpt.format.manifest import Manifest
from recckpt.output_dir.checkpoint_dir import Intent, listed_files, read_intent, read_manifest, unlisted, write_intent
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.storage import Storage
from recckpt.storage.retry import Retries, RetryPolicy, TryAgainError

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


def begin(
    storage: Storage, fence: Fence, ckpt_id: str, *, step: int | None, overwrite: bool, base: str | None
) -> tuple[Intent, int]:
    """Make a new directory for an attempt at a checkpoint; return its intent and its sequence number.

    ``base`` is the save id of a delta's parent. Raises CheckpointExistsError if the id is committed and ``overwrite``
    is false, WriterFencedError if another writer owns the output dir, ValueError for an invalid id, FileNotFoundError
    if ``base`` has no complete chain.
    """
    layout.encode_id(ckpt_id)
    fence.hold()
    listing = fence.listing
    _check_base(storage, listing, base)
    if listing.next_seq >= COUNT_LIMIT:
        found = f"a manifest of number {listing.highest_seq}, the last there is"
        raise CorruptCheckpointError(storage.url, "seq", found=found, expected="one that a next commit can follow")
    present = listing.find(ckpt_id)
    if present and not overwrite:
        raise CheckpointExistsError(
            f"{storage.url}: checkpoint {ckpt_id!r} is committed already, in {present.directory}/; save under another "
            "id, or pass overwrite=True to supersede it"
        )
    for directory in fence.free_dirs(ckpt_id):
        intent = Intent(directory, fence.epoch, secrets.token_hex(16), step)
        try:
            storage.make_dir(directory)
            write_intent(storage, intent)
        except FileExistsError:
            continue  # another attempt was faster
        except BaseException:
            with suppress(OSError):  # the dir has its first file, or a later owner has removed it
                storage.remove_empty_dirs(directory)
            raise
        fence.check()  # either a later owner has seen this directory, or this writer stops here
        return intent, listing.next_seq
    raise AssertionError("the names of attempts have no end")


def commit(storage: Storage, fence: Fence, directory: str, record: Manifest, visible: RetryPolicy) -> Manifest:
    """Make a checkpoint visible and durable, as the owner of the output dir, and return its manifest.

    Raises:
        CorruptCheckpointError, ValueError: the manifest could not be read back; nothing is committed.
        OSError: a file does not have its written size, the parent of a delta is gone, or the manifest could not be
            stored; nothing is committed.
        CommitNotDurableError: the manifest exists or may exist, but may not be durable.
        WriterFencedError: another writer has taken over; this checkpoint is valid only if that writer saw the commit.
    """
    path, data = layout.join(directory, layout.MANIFEST), manifest.encode(record)
    record = manifest.decode(data, path)  # never commit a manifest that readers would not accept
    check_files(storage, fence, directory, record, visible)
    for subdirectory in layout.subdirectories(file.name for file in record.files):
        storage.sync_dir(layout.join(directory, subdirectory))
    if record.parent is not None:
        fence.look_again()
        _check_base(storage, fence.listing, record.parent.save_id)
    fence.check()
    try:
        storage.put_if_absent(path, data)
        storage.sync_dir("")
        fence.check(is_thorough=True)
    except FileExistsError:
        raise  # the existing manifest is from another call
    except OSError as error:
        is_there = _is_there(storage, directory, record)
        if is_there is False:
            fence.check()  # if a new owner removed this attempt, report that as the reason
            raise
        cause = f"{type(error).__name__}: {error}"
        raise CommitNotDurableError(record.ckpt_id, 0, cause, is_in_place=is_there is True) from error
    fence.note_commit(Checkpoint(directory, record))
    return record


def chain_of(listing: Listing, name: str) -> tuple[Checkpoint, ...]:
    """Return the links of the checkpoint of this name, newest first; () if its chain is incomplete."""
    checkpoint = listing.named(name)
    return checkpoint.links if checkpoint else ()


def _check_base(storage: Storage, listing: Listing, base: str | None) -> None:
    if base is None or chain_of(listing, base):
        return
    damage = [str(listing.damaged.get(c.directory)) for c in listing.lost if c.manifest.name == base]
    state = f"a damaged one: {damage[0]}" if damage else "no such checkpoint"
    problem = f"the base of a delta is the checkpoint of save {base}, found {state}; the next save is full"
    raise FileNotFoundError(errno.ENOENT, problem, storage.url)


def check_files(storage: Storage, fence: Fence, directory: str, record: Manifest, visible: RetryPolicy) -> None:
    """Check the size of each file in a manifest.

    Raises OSError if a file is missing or has another size, WriterFencedError if a later writer may have removed it.
    """
    late = unlisted(record.files, listed_files(storage, directory))
    if late:
        lookout = Lookout(storage, visible, fence.check, is_patient=len(record.shards) > 1)
        for file in late:
            lookout.check_size(layout.join(directory, file.name), file.n_bytes)


def _is_there(storage: Storage, directory: str, record: Manifest) -> bool | None:
    try:
        manifest_there = read_manifest(storage, directory)
    except (OSError, CorruptCheckpointError, FormatVersionError):
        return None
    return manifest_there is not None and manifest_there.save_id == record.save_id


class Lookout:
    """Waits for files that another host may have written, because a network file system may show them late.

    Retries by the policy, with one deadline for all files; without ``is_patient`` there are no retries. If a file is
    missing, calls ``check_owner``, which raises if a later writer owns the output dir, because that writer removes the
    files of earlier writers.
    """

    def __init__(
        self, storage: Storage, policy: RetryPolicy, check_owner: Callable[[], object], *, is_patient: bool = True
    ) -> None:
        self._storage, self._is_patient, self._retries = storage, is_patient, Retries(policy, storage.url)
        self._check_owner = check_owner
        self._operation = "looking for written files"
        if is_patient:
            self._operation = f"looking for up to {policy.deadline_sec:g} s for written files"

    def check_size(self, name: str, n_bytes: int) -> None:
        """Wait until a file has its size; OSError if that takes too long, or if the file is longer."""

        def look() -> None:
            try:
                size = self._storage.size(name)
            except OSError as error:
                is_outdated = self._is_patient and error.errno == errno.ESTALE
                if not (is_outdated or error.errno in _MISSING):
                    raise
                self._check_owner()
                problem = f"found no such file, {n_bytes} bytes were written"
                raise TryAgainError(errno.ENOENT, problem) from error
            if size != n_bytes:
                problem = f"found {size} bytes, {n_bytes} were written; check the storage"
                raise (TryAgainError if size < n_bytes else OSError)(errno.EIO, problem)

        self._retries.call(self._operation, look, again=self._is_patient, url=self._storage.url_of(name))

    def check_intent(self, intent: Intent) -> None:
        """Wait until the directory of an attempt is visible here; OSError if that takes too long."""
        name = layout.join(intent.directory, layout.INTENT)

        def look() -> None:
            present = None
            with suppress(CorruptCheckpointError):  # the file may be partly visible
                present = read_intent(self._storage, intent.directory)
            if present is None or present.save_id != intent.save_id:
                self._check_owner()
                what = "no such file" if present is None else f"the file of save {present.save_id}"
                problem = f"found {what}, rank 0 has written the file of save {intent.save_id}"
                raise TryAgainError(errno.ENOENT, f"{problem}; the output dir must be the same one on every host")

        self._retries.call(self._operation, look, again=self._is_patient, url=self._storage.url_of(name))


def _find_versions() -> dict[str, str]:
    versions = {}
    for package in ("recckpt", "torch", "numpy", "pyarrow"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


WRITER = _find_versions()  # once, at import: a save must not need the files of packages
