"""Which files of a near save are whole on this host: every byte compared with its checksum (no torch here)."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from recckpt.checkpoint.link import OpenLink
from recckpt.dense.file_check import check_file
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, RecckptError
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.catalogs import read_catalog
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Storage

_DAMAGED = "it is taken from another host that has it whole, else an older near save or checkpoint is restored"
_REMOVED = "the process that makes near saves there is probably alive: end it before another one restores"


@dataclass(frozen=True)
class WholeFiles:
    """What a host has of a near save.

    Attributes:
        rank: the first rank there.
        names: the files that are whole.
        errors: what is wrong with others.
    """

    rank: int
    names: frozenset[str]
    errors: tuple[Exception, ...] = ()


def whole_files(save: Checkpoint, names: Collection[str], concurrency: int, rank: int) -> WholeFiles:
    """Read those files of a near save that this host has, and return which are whole.

    A file with rows is only whole beside its catalog, which has its checksums.
    """
    assert save.near_dir is not None
    link, whole, errors = OpenLink.of(save.near_dir, save), set[str](), list[Exception]()

    def note(name: str, problems: Sequence[Exception]) -> None:
        errors.extend(problems)
        if not problems:
            whole.add(name)

    parts = list[Part]()
    for number, shard in enumerate(save.manifest.shards):
        if shard.catalog not in names:
            continue
        try:
            parts += (part for part in read_catalog(save, link.files, number).parts if part.file in names)
        except (RecckptError, OSError) as error:
            errors.append(error)
        else:
            whole.add(shard.catalog)
    threads, tables = save.near_dir.threads(concurrency), save.manifest.tables
    checks = run_all(lambda part: check_part(link.files, save.directory, tables, part, _unseen), parts, threads)
    for part, check in zip(parts, checks, strict=True):
        note(part.file, check.errors)
    catalogs = {shard.catalog for shard in save.manifest.shards}
    for file in save.manifest.files:
        if file.name in names and file.name not in catalogs and not layout.is_part(file.name):
            note(file.name, list(_problems(link, file)))
    return WholeFiles(rank, frozenset(whole), tuple(_of_near_save(save, save.near_dir, error) for error in errors))


def _of_near_save(save: Checkpoint, near_dir: Storage, error: Exception) -> Exception:
    """Return an error that says what it means of a near save, and on which host, where that is not as elsewhere."""
    host = socket.gethostname()
    if isinstance(error, CorruptCheckpointError):
        path = f"{host}:{near_dir.url_of(error.path)}"
        return CorruptCheckpointError(path, error.where, found=error.found, expected=error.expected, remedy=_DAMAGED)
    if isinstance(error, CheckpointRemovedError):
        return CheckpointRemovedError(f"{host}:{near_dir.url_of(save.directory)}", remedy=_REMOVED)
    return error


def _problems(link: OpenLink, file: FileEntry) -> Iterator[Exception]:
    try:
        yield from check_file(link.files, link.directory, file, index=None, advance=_unseen)
    except (RecckptError, OSError) as error:
        yield error


def lacking(save: Checkpoint, of_hosts: Iterable[WholeFiles]) -> Exception | None:
    """Return why a near save cannot be restored from what hosts have; None where each file is whole on one.

    Rules *all_pieces* and *verify_before_choice*.
    """
    whole, errors = set[str](), list[Exception]()
    for host in of_hosts:
        whole |= host.names
        errors += host.errors
    missing = next((file for file in save.manifest.files if file.name not in whole), None)
    if missing is None:
        return None
    if errors:
        return errors[0]
    path, expected = layout.join(save.directory, missing.name), f"{missing.n_bytes} bytes"
    return CorruptCheckpointError(path, "", found="on no host that is here", expected=expected, remedy=_DAMAGED)


def _unseen(*_: object) -> None:
    """Do nothing with what is read: its checksums are all that matters here."""
