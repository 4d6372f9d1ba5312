"""Lists the committed checkpoints, by their manifests only, and the chain of each delta (docs/format.md, 12.3)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import MAX_LINKS, Manifest, Parent
from recckpt.format.tables import TableEntry
from recckpt.output_dir.checkpoint_dir import (
    Damage,
    Manifests,
    attempt_dirs,
    file_problems,
    read_manifest,
)
from recckpt.output_dir.claims import NO_TAKEOVER, Takeover, last_takeover
from recckpt.output_dir.index_file import why_nothing
from recckpt.parallel.threads import run_all
from recckpt.storage import Listed, Storage

log = logging.getLogger("recckpt")
# Contents of a directory: its manifest, or the manifest's error; and its files, None if they were not listed.
_Look = tuple[Manifest | Damage | None, Mapping[str, Listed] | None]
_GONE = FileNotFoundError()  # removed since its manifest was read
_LOOKS_AT_ONCE = 16  # directories of an object store that are read in parallel
_TRIES = 3  # attempts: rotation may remove a checkpoint while its directory is read


def age(directory: str, record: Manifest) -> tuple[object, ...]:
    """Return the sort key of a checkpoint: its place, then the order of its own commit.

    For an id, readers use the last intact checkpoint in this order. Among copies of a manifest, the copy in its own
    directory is last.
    """
    own = record.epoch, record.seq
    return record.place, own, record.save_id, layout.is_attempt(directory, record.ckpt_id)


class Chains:
    """The chains of checkpoints, by their directories; does no I/O.

    Args:
        manifests: directory -> its manifest; all valid ones.
        damaged: directory -> problem in this directory itself; also for directories with unreadable manifests.

    Attributes:
        broken: directory -> problem in this directory, or in a link that it needs and that has no replacement.
        is_incomplete: whether a parent is missing; a replacement may have been committed after the directories were
            listed.
    """

    def __init__(self, manifests: Mapping[str, Manifest], damaged: Mapping[str, Damage]) -> None:
        self.broken = dict(damaged)
        self.is_incomplete = False
        self._manifests = manifests
        self._below: dict[str, str] = {}  # directory of a delta -> directory of the link below it
        self._n_links: dict[str, int] = {}
        self._causes = dict(damaged)  # like ``broken``, with the error of the link itself
        self._named: dict[str, list[str]] = {}
        for directory in sorted(manifests, key=lambda each: age(each, manifests[each]), reverse=True):
            self._named.setdefault(manifests[directory].name, []).append(directory)
        for directory in sorted(manifests, key=lambda each: manifests[each].place):  # a parent comes before its deltas
            if directory not in self.broken:
                self._stand(directory)

    def named(self, name: str) -> list[str]:
        """Return the directories of this name that have a complete chain; readers use the first."""
        return [directory for directory in self._named.get(name, ()) if directory not in self.broken]

    def links(self, directory: str) -> tuple[str, ...]:
        """Return the directories of a chain, newest link first; ``directory`` is not broken."""
        links = [directory]
        while links[-1] in self._below:
            links.append(self._below[links[-1]])
        return tuple(links)

    def closure(self, names: Collection[str]) -> set[str]:
        best = (links[0] for name in names if (links := self.named(name)))
        return {link for directory in best for link in self.links(directory)}

    def _stand(self, directory: str) -> None:
        record = self._manifests[directory]
        if record.parent is None:
            self._n_links[directory] = 1
            return
        causes = []
        for below in self._named.get(record.parent.save_id, ()):
            cause = next(self._problems(directory, record, record.parent, below), None)
            if cause is None:
                self._below[directory], self._n_links[directory] = below, 1 + self._n_links[below]
                return
            causes.append(cause)
        if not causes:
            causes = [self._missing(directory, record, record.parent)]
        self._causes[directory] = causes[0]
        self.broken[directory] = _in_chain(causes[0], directory, record)

    def _problems(self, directory: str, record: Manifest, parent: Parent, below: str) -> Iterator[Damage]:
        link = self._manifests[below]

        def wrong(found: str, expected: str) -> CorruptCheckpointError:
            return _wrong_parent(directory, parent, f"{below}/ {found}", expected)

        if link.name_xxh3 != parent.manifest:
            yield wrong(f"with the checksum {link.name_xxh3:016x}", f"{parent.manifest:016x}")
        elif link.ckpt_id != parent.ckpt_id:
            yield wrong(f"with the id {link.ckpt_id!r}", repr(parent.ckpt_id))
        elif not link.place < record.place:
            yield wrong(f"committed as {link.place}", f"one before {record.place} (epoch, seq)")
        elif below in self._causes:
            yield self._causes[below]
        elif self._n_links[below] >= MAX_LINKS:
            yield wrong(f"with {self._n_links[below]} links", f"a chain of at most {MAX_LINKS} links")
        else:
            yield from (wrong(f"with {found}", expected) for found, expected in _misfits(record, link))

    def _missing(self, directory: str, record: Manifest, parent: Parent) -> Damage:
        if parent.directory in self._causes and parent.directory not in self._manifests:  # its manifest cannot be read
            return self._causes[parent.directory]
        self.is_incomplete = True
        expected = f"that of save {parent.save_id}, in {parent.directory}/ or compacted"
        remedy = f"if it was copied alone, {whole_one(record.ckpt_id)}; else restore an older checkpoint"
        return _wrong_parent(directory, parent, "no such checkpoint", expected, remedy)


def whole_one(ckpt_id: str) -> str:
    return f"copy its links too, or make it a full checkpoint beside them: `recckpt compact DIR {ckpt_id} --out OTHER`"


def _wrong_parent(
    directory: str, parent: Parent, found: str, expected: str, remedy: str = ""
) -> CorruptCheckpointError:
    path, where = layout.join(directory, layout.MANIFEST), f"parent {parent.ckpt_id!r}"
    return CorruptCheckpointError(path, where, found=found, expected=expected, remedy=remedy)


def _misfits(record: Manifest, link: Manifest) -> Iterator[tuple[str, str]]:
    for table in record.tables:
        below = link.table(table.name)
        if table.is_whole:
            continue
        if below is None:
            yield f"no table {table.name!r}", "this table, because the delta does not replace it"
        elif below.slots != table.slots:
            yield f"slots {_slots(below)} in table {table.name!r}", f"{_slots(table)}, as in the delta"
        elif below.live != table.live:
            yield f"table {table.name!r} {_live(below)}", f"{_live(table)}, as in the delta"


def _slots(table: TableEntry) -> str:
    return ", ".join(f"{slot.name} {slot.dtype}{list(slot.shape)}" for slot in table.slots)


def _live(table: TableEntry) -> str:
    if table.live is None:
        return "not live"
    return f"live, of {table.live.n_rows} rows and columns {list(map(list, table.live.columns))}"


def _in_chain(cause: Damage, directory: str, record: Manifest) -> Damage:
    is_own = isinstance(cause, CorruptCheckpointError) and cause.path == layout.join(directory, layout.MANIFEST)
    if not isinstance(cause, CorruptCheckpointError) or is_own:
        return cause
    link = f"a link of {record.ckpt_id!r}"
    where = f"{cause.where}, in {link}" if cause.where else link
    return CorruptCheckpointError(cause.path, where, found=cause.found, expected=cause.expected, remedy=cause.remedy)


@dataclass(frozen=True)
class Checkpoint:
    directory: str
    manifest: Manifest
    # replacements of the parent first, the full checkpoint last; the link of a link is ()
    below: tuple[Checkpoint, ...] = field(default=(), compare=False, repr=False)
    # where a near save lies that is based on checkpoints of the output dir; None for a checkpoint
    near_dir: Storage | None = field(default=None, compare=False, repr=False)

    @property
    def ckpt_id(self) -> str:
        return self.manifest.ckpt_id

    @property
    def links(self) -> tuple[Checkpoint, ...]:
        """The checkpoints from which the rows are read, newest first: this one and its parents."""
        return (self, *self.below)


@dataclass(frozen=True)
class Listing:
    """The checkpoints of an output dir, oldest first.

    Checkpoints are ordered by place: a superseding checkpoint comes right after the superseded one. ``damaged``
    includes deltas without a complete chain, and a damaged claim or list, under its own file name. Only
    :func:`look_around` sets ``unreadable``.
    """

    committed: tuple[Checkpoint, ...]  # including overwritten and superseded ones
    damaged: dict[str, CorruptCheckpointError | FormatVersionError]  # directory -> error
    fenced: dict[str, str]  # directory -> why a late commit is ignored
    highest_seq: int = 0  # in any manifest, also in that of a damaged checkpoint
    highest_epoch: int = 0
    save_ids: frozenset[str] = frozenset()  # ids of all valid manifests, even if files are damaged
    directories: tuple[str, ...] = ()  # committed or not, without recckpt's own directory
    unreadable: dict[str, OSError] = field(default_factory=dict)
    lost: tuple[Checkpoint, ...] = ()  # damaged checkpoints with valid manifests

    @property
    def uncommitted(self) -> list[str]:
        """The directories without a known manifest: dead or running attempts, and directories of other programs."""
        known = {checkpoint.directory for checkpoint in self.committed}
        known |= self.damaged.keys() | self.fenced.keys() | self.unreadable.keys()
        return sorted(set(self.directories) - known)

    @cached_property
    def chains(self) -> Chains:
        manifests = {c.directory: c.manifest for c in (*self.committed, *self.lost)}
        return Chains(manifests, {**self.damaged, **self.unreadable})

    @property
    def newest_place(self) -> tuple[int, int]:
        """The place of the newest valid checkpoint, damaged or not; (0, 0) without one."""
        return max((checkpoint.manifest.place for checkpoint in (*self.committed, *self.lost)), default=(0, 0))

    def plus(self, checkpoint: Checkpoint) -> Listing:
        return replace(
            self,
            committed=chained([*self.committed, checkpoint], self.damaged)[0],
            highest_seq=max(self.highest_seq, checkpoint.manifest.seq),
            highest_epoch=max(self.highest_epoch, checkpoint.manifest.epoch),
            save_ids=self.save_ids | {checkpoint.manifest.save_id},
            directories=(*self.directories, *{checkpoint.directory}.difference(self.directories)),
        )

    def minus(self, directories: Collection[str]) -> Listing:
        return replace(
            self,
            committed=tuple(c for c in self.committed if c.directory not in directories),
            damaged={name: error for name, error in self.damaged.items() if name not in directories},
            directories=tuple(directory for directory in self.directories if directory not in directories),
            lost=tuple(c for c in self.lost if c.directory not in directories),
        )

    @property
    def current(self) -> list[Checkpoint]:
        """The newest checkpoint of each id; readers use this one."""
        newest = {checkpoint.ckpt_id: checkpoint for checkpoint in self.committed}
        return [checkpoint for checkpoint in self.committed if newest[checkpoint.ckpt_id] is checkpoint]

    @property
    def ckpt_ids(self) -> list[str]:
        return [checkpoint.ckpt_id for checkpoint in self.current]

    @property
    def is_empty(self) -> bool:
        return not self.committed and not self.damaged

    @property
    def next_seq(self) -> int:
        return 1 + self.highest_seq

    def find(self, ckpt_id: str) -> Checkpoint | None:
        return next((c for c in reversed(self.committed) if c.ckpt_id == ckpt_id), None)

    def named(self, name: str) -> Checkpoint | None:
        """Return the checkpoint that readers use for this name."""
        best = self.chains.named(name)[:1]
        return next((c for c in self.committed if [c.directory] == best), None)


def chained(counted: Sequence[Checkpoint], damaged: Mapping[str, Damage]) -> tuple[tuple[Checkpoint, ...], Chains]:
    links = {checkpoint.directory: replace(checkpoint, below=()) for checkpoint in counted}
    chains = Chains({name: link.manifest for name, link in links.items()}, damaged)
    whole = [name for name in links if name not in chains.broken]
    whole.sort(key=lambda name: age(name, links[name].manifest))
    below = {name: tuple(links[other] for other in chains.links(name)[1:]) for name in whole}
    return tuple(replace(links[name], below=below[name]) if below[name] else links[name] for name in whole), chains


def list_checkpoints(storage: Storage, known: Manifests | None = None, own: Takeover | None = None) -> Listing:
    """Read the manifests of an output dir, and check that their files are there.

    Args:
        storage: the output dir.
        known: manifests that a writer has already read; they are not read again, and new ones are added.
        own: the takeover of the calling writer, which checks afterwards that there is no newer one; None to read the
            newest.

    Raises OSError if the storage failed, or denies reading a checkpoint.
    """
    listing = look_around(storage, known, own)
    for error in listing.unreadable.values():
        raise error
    return listing


def look_around(storage: Storage, known: Manifests | None = None, own: Takeover | None = None) -> Listing:
    """Like :func:`list_checkpoints`, but lists unreadable checkpoints instead of raising."""

    def look(directory: str) -> _Look:
        try:
            if known is None:
                return read_manifest(storage, directory), None
            return known.read(storage, directory)
        except (CorruptCheckpointError, FormatVersionError, OSError) as error:
            return error, None

    threads = 1 if storage.asking_is_free else storage.threads(_LOOKS_AT_ONCE)
    for _ in range(_TRIES):
        directories = attempt_dirs(storage) if known is None else known.directories(storage)
        looks = dict(zip(directories, run_all(look, directories, threads), strict=True))
        listing, is_complete = _list(storage, looks, own, threads)
        if is_complete and (listing.committed or not directories):
            break
    return listing


def _list(storage: Storage, looks: Mapping[str, _Look], own: Takeover | None, threads: int) -> tuple[Listing, bool]:
    damaged: dict[str, Damage] = {name: error for name, (error, _) in looks.items() if isinstance(error, Exception)}
    with_manifest = [Checkpoint(name, record) for name, (record, _) in looks.items() if isinstance(record, Manifest)]
    # Read after the manifests: a commit in between may be missed, but is never judged wrongly.
    takeover = _takeover(storage, damaged) if own is None else own
    fenced = {c.directory: reason for c in with_manifest if (reason := takeover.excludes(c.manifest))}
    counted = [c for c in with_manifest if c.directory not in fenced]

    def problem_of(checkpoint: Checkpoint) -> Damage | None:
        directory, record = checkpoint.directory, checkpoint.manifest
        try:
            problem = next(file_problems(storage, directory, record.files, looks[directory][1]), None)
            is_gone = problem is not None and read_manifest(storage, directory) is None
        except OSError as error:
            return error
        return _GONE if is_gone else problem

    problems = zip(counted, run_all(problem_of, counted, threads), strict=True)
    looked_at = [(each, problem) for each, problem in problems if problem is not _GONE]
    damaged |= {each.directory: problem for each, problem in looked_at if problem is not None}
    there = [each for each, _ in looked_at]
    committed, chains = chained(there, damaged)
    listing = Listing(
        committed=committed,
        damaged={name: error for name, error in chains.broken.items() if not isinstance(error, OSError)},
        fenced=fenced,
        highest_seq=max((c.manifest.seq for c in with_manifest), default=0),
        highest_epoch=max((c.manifest.epoch for c in with_manifest), default=0),
        save_ids=frozenset(c.manifest.save_id for c in counted),
        directories=tuple(looks),
        unreadable={name: error for name, error in chains.broken.items() if isinstance(error, OSError)},
        lost=tuple(checkpoint for checkpoint in there if checkpoint.directory in chains.broken),
    )
    return listing, not chains.is_incomplete


def _takeover(storage: Storage, damaged: dict[str, Damage]) -> Takeover:
    """Return the last takeover. If its list is damaged, late commits count as valid, so that no good one is lost."""
    try:
        return last_takeover(storage)
    except (CorruptCheckpointError, FormatVersionError) as error:
        damaged[error.path] = error
        return NO_TAKEOVER


def locate(storage: Storage, ckpt_id: str) -> Checkpoint:
    """Return the committed checkpoint of an id.

    Raises CheckpointNotFoundError, with a list of the existing ids; CorruptCheckpointError if the checkpoint is
    damaged.
    """
    listing = list_checkpoints(storage)
    for path, error in listing.damaged.items():
        if isinstance(error, FormatVersionError) and path not in listing.directories:  # the file of the last writer
            raise error
    checkpoint = listing.find(ckpt_id)
    if checkpoint is None:
        first = layout.encode_id(ckpt_id)
        for directory, error in listing.damaged.items():
            if directory == first or layout.is_later_attempt(directory, first):
                raise error
        raise CheckpointNotFoundError(
            f"{storage.url}: {storage.why_empty()}"
            if storage.why_empty()
            else f"{storage.url}: found no committed checkpoint {ckpt_id!r}; {describe(listing.current)}"
        )
    return checkpoint


def newest_first(storage: Storage) -> list[Checkpoint]:
    """Return the usable committed checkpoints, newest first; [] if nothing was ever saved. Logs damaged ones.

    Raises FormatVersionError if a newer recckpt wrote a checkpoint, because it may be the newest;
    CorruptCheckpointError if all are damaged.
    """
    return usable(storage, list_checkpoints(storage))


def usable(storage: Storage, listing: Listing) -> list[Checkpoint]:
    for directory, error in listing.damaged.items():
        if isinstance(error, FormatVersionError):
            raise error
        log.error("%s/%s is damaged and skipped: %s", storage.url, directory, error)
    for directory, reason in listing.fenced.items():
        log.warning("%s/%s: %s", storage.url, directory, reason)
    if not listing.committed and listing.damaged:
        raise next(iter(listing.damaged.values()))
    return listing.current[::-1]


def newest(storage: Storage) -> Checkpoint:
    """Return the newest usable checkpoint; CheckpointNotFoundError without one."""
    checkpoints = newest_first(storage)
    if not checkpoints:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    return checkpoints[0]


def describe(checkpoints: Sequence[Checkpoint]) -> str:
    if not checkpoints:
        return "there are no checkpoints in this output dir"
    return "there are " + ", ".join(repr(checkpoint.ckpt_id) for checkpoint in checkpoints[-8:])
