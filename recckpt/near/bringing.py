"""Copies files of a near save to hosts that lack them. Imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from recckpt.checkpoint.chain import OpenLink
from recckpt.dense.tensors import check_file
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, RecckptError
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.near.moving import Move
from recckpt.near.near_dir import HostSeen, NearDir
from recckpt.near.views import host_of
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.catalogs import read_catalog
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Storage
from recckpt.text import size

_DAMAGED = "it is taken from another host with an intact copy, else an older near save or checkpoint is restored"
_REMOVED = "the process that makes near saves there is probably still running: end it before another one restores"


@dataclass(frozen=True)
class WholeFiles:
    rank: int  # the first rank on the host
    names: frozenset[str]  # intact files
    errors: tuple[Exception, ...] = ()  # errors of the other files


def whole_files(save: Checkpoint, names: Collection[str], concurrency: int, rank: int) -> WholeFiles:
    """Read this host's files of a near save; return the intact ones.

    A file with rows can be checked only with its catalog, which has its checksums.
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
    checks = run_all(lambda part: check_part(link.files, save.directory, tables, part), parts, threads)
    for part, check in zip(parts, checks, strict=True):
        note(part.file, check.errors)
    catalogs = {shard.catalog for shard in save.manifest.shards}
    for file in save.manifest.files:
        if file.name in names and file.name not in catalogs and not layout.is_part(file.name):
            problems = list[Exception]()
            try:  # reads the file only to compare checksums
                problems += check_file(link.files, save.directory, file, index=None, advance=lambda _: None)
            except (RecckptError, OSError) as error:
                problems.append(error)
            note(file.name, problems)
    return WholeFiles(rank, frozenset(whole), tuple(_of_near_save(save, save.near_dir, error) for error in errors))


def _of_near_save(save: Checkpoint, near_dir: Storage, error: Exception) -> Exception:
    host = socket.gethostname()
    if isinstance(error, CorruptCheckpointError):
        path = f"{host}:{near_dir.url_of(error.path)}"
        return CorruptCheckpointError(path, error.where, found=error.found, expected=error.expected, remedy=_DAMAGED)
    if isinstance(error, CheckpointRemovedError):
        return CheckpointRemovedError(f"{host}:{near_dir.url_of(save.directory)}", remedy=_REMOVED)
    return error


def lacking(save: Checkpoint, of_hosts: Iterable[WholeFiles]) -> Exception | None:
    """Return why a near save cannot be restored from the hosts' files; None if each file is intact on some host.

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
    return CorruptCheckpointError(path, "", found="on no host that takes part", expected=expected, remedy=_DAMAGED)


@dataclass(frozen=True)
class Place:
    """What a rank reports about its host before files are copied to the host."""

    host: HostSeen | None  # identity of the host; None if its near dir cannot be used
    name: str  # for messages
    needed: frozenset[str]  # files of the near save that this rank reads
    free_bytes: int | None  # free space of its file system; None if unknown

    @classmethod
    def of(cls, near_dir: NearDir, needed: frozenset[str]) -> Place:
        free_bytes = None
        host = host_of(near_dir)  # first, because it makes the directory
        with suppress(OSError):
            free_bytes = near_dir.storage.free_on_disk()
        return cls(host, f"{socket.gethostname()}:{near_dir.path}", needed, free_bytes)


@dataclass(frozen=True)
class Bringing:
    """The copies of a near save's files to hosts that need and lack them; the same on all ranks."""

    places: Sequence[Place]  # of all ranks
    moves: Sequence[Move]  # one per file and receiving host; its first rank receives

    @classmethod
    def of(cls, save: Checkpoint, places: Sequence[Place], of_hosts: Sequence[WholeFiles]) -> Bringing:
        """Decide which files to copy. Pure."""
        # first rank of a host -> files that the host lacks and its ranks read
        first, lacks = dict[HostSeen | None, int](), dict[int, frozenset[str]]()
        whole = {host.rank: host.names for host in of_hosts}
        for rank, place in enumerate(places):
            receiver = first.setdefault(place.host, rank)
            lacks[receiver] = lacks.get(receiver, frozenset()) | place.needed - whole.get(receiver, frozenset())
        moves = [
            Move(file.name, file.n_bytes, file.xxh3, holders[number % len(holders)], to)
            for number, file in enumerate(save.manifest.files)
            for holders in [[host.rank for host in of_hosts if file.name in host.names]]
            for to, names in lacks.items()
            if file.name in names
        ]
        return cls(places, moves)

    def shortage(self) -> OSError | None:
        for rank, place in enumerate(self.places):
            if place.free_bytes is not None and place.free_bytes < self._n_bytes(rank):
                return self.failure(rank, f"found {size(place.free_bytes)} free there: make room")
        return None

    def failure(self, rank: int, reason: str) -> OSError:
        needs = f"which needs {size(self._n_bytes(rank))} of it"
        return OSError(f"it cannot be copied to {self.places[rank].name}, {needs}: {reason}")

    def in_words(self) -> Iterator[str]:
        for rank in sorted({each.receiver for each in self.moves}):
            senders = sorted({self.places[each.sender].name for each in self.moves if each.receiver == rank})
            yield f"{size(self._n_bytes(rank))} to {self.places[rank].name} from {', '.join(senders)}"

    def _n_bytes(self, rank: int) -> int:
        return sum(each.n_bytes for each in self.moves if each.receiver == rank)
