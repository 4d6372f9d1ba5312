"""The manifest: the commit record of a checkpoint (docs/format.md, sections 3 and 12.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from functools import cached_property
from itertools import pairwise
from typing import Any

from recckpt.format import layout
from recckpt.format.codec import (
    CHECKSUM,
    Buckets,
    Checksum,
    CkptId,
    Count,
    Document,
    FileKind,
    FileName,
    IdRange,
    JsonRecord,
    Scalar,
    first_repeat,
    plain,
)
from recckpt.format.tables import TableEntry, table_problems
from recckpt.text import first_few, instead_of

MAX_BYTES = 64 << 20  # part of the format
KIND = FileKind("recckpt", 1, "manifest_xxh3", MAX_BYTES)  # part of the format
MAX_NESTED = 8  # part of the format: how deep lists and objects in the state are nested
MAX_LINKS = 1000  # part of the format: links in a chain, including the full checkpoint
_MAX_RANGES = 1 << 16  # ids ranges of all shards: listings read manifests, and tables times shards may be a million

Lineage = tuple[str, ...]  # names of a class and its base classes
StateValue = str | int | float | bool | Sequence["StateValue"] | Mapping[str, "StateValue"] | None
NOT_FINITE = ("nan", "inf", "-inf")  # part of the format: numbers that JSON does not have

_GONE_FIELDS = frozenset({"form_of", "revision_of"})  # fields of unreleased versions, replaced by ``supersedes``
_GAPS = {
    "parameters": "the state of the optimizer that trained {}",
    "optimizers": "the state of the optimizer that trained in place of {}",
    "tables": "the steps and hyper-parameters of the optimizer that trained {}",
    "gradients": "changes by gradients in {}: no optimizer used them",
    "schedules": "the position in the learning-rate schedule of {}",
    "weights": "parameters that {} trained, but the model does not have",
}


class FileEntry(JsonRecord, frozen=True, rename={"n_bytes": "bytes"}):
    """A file of a checkpoint. Parts have no checksum here, because their catalog has checksums per batch."""

    name: FileName
    n_bytes: Count
    xxh3: Checksum | None = None


class ShardEntry(JsonRecord, frozen=True):
    catalog: FileName
    buckets: Buckets
    ids: Mapping[str, IdRange] | None = None  # by table; None if only the catalog has the ranges


class Names(JsonRecord, frozen=True):
    dense: tuple[str, ...]  # tensors of the model, and plain values in model.pt
    extra: tuple[str, ...]  # registered objects
    io_state: tuple[str, ...]  # datasets of any rank
    extra_of_ranks: tuple[str, ...] = ()  # registered objects with one state per rank
    dense_opt: tuple[str, ...] = ()  # parameter@name for registered dense optimizers


class Unsaved(JsonRecord, frozen=True):
    parameters: tuple[str, ...] = ()  # dense parameters that train without a registered optimizer
    optimizers: tuple[str, ...] = ()  # registered optimizers that did not step while others trained their parameters
    tables: tuple[str, ...] = ()  # tables that a sparse optimizer trains
    gradients: tuple[str, ...] = ()  # tables whose gradients no optimizer uses
    schedules: tuple[str, ...] = ()  # saved optimizers with an unsaved scheduler
    weights: tuple[str, ...] = ()  # registered optimizers of parameters that are not saved

    @property
    def descriptions(self) -> list[str]:
        return [text.format(first_few(names)) for kind, text in _GAPS.items() if (names := getattr(self, kind))]


class Training(JsonRecord, frozen=True):
    optimizers: Mapping[str, Lineage] = {}  # registered name -> class
    unsaved: Unsaved = Unsaved()


class Link(JsonRecord, frozen=True):
    ckpt_id: CkptId
    save_id: str
    directory: FileName


class Parent(Link, frozen=True):
    """The checkpoint that a delta was written against, identified by the checksum of its manifest."""

    manifest: Checksum


class Supersedes(JsonRecord, frozen=True):
    """The save that a checkpoint replaces in the order of commits."""

    save_id: str  # id of the superseded save; with the same rows, deltas name both by this and ``manifest``
    manifest: Checksum
    directory: FileName  # directory of the superseded save
    epoch: Count  # place of the superseded save in the order of commits
    seq: Count
    rows: str  # "same" or "fewer"
    why: str  # for people
    request: str = ""  # the request that asked for fewer rows
    n_rows: Count = 0  # number of rows left out


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint, without the data of its commit."""

    shards: tuple[ShardEntry, ...] = field(repr=False)  # not in ``repr``, because it grows with the checkpoint
    tables: tuple[TableEntry, ...] = field(repr=False)
    files: tuple[FileEntry, ...] = field(repr=False)
    names: Names = field(default=Names((), (), ()), repr=False)
    training: Training = field(default=Training(), repr=False)
    state: Mapping[str, StateValue] = field(default_factory=dict)
    writer: Mapping[str, str] = field(default_factory=dict, repr=False)
    ephemeral: bool = False

    @property
    def content(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields_of(Content)}

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class Manifest(Content):
    """All that is known of a checkpoint without opening its other files."""

    ckpt_id: str
    save_id: str
    seq: int
    time: str
    epoch: int = 0
    cut: int | None = None  # number of the staging in its epoch, if near saves are made
    step: int | None = None
    parent: Parent | None = None  # only of a delta
    chain: tuple[Link, ...] = field(default=(), repr=False)  # hints at all parents' directories, nearest first
    supersedes: Supersedes | None = None  # only of a checkpoint that is compacted, or lacks forgotten ids
    xxh3: int = field(default=0, compare=False)  # checksum of the manifest, by which deltas refer to it; if read

    @property
    def kind(self) -> str:
        return "full" if self.parent is None else "delta"

    @property
    def place(self) -> tuple[int, int]:
        """The place in the order of commits. A superseding checkpoint has the place of the superseded save."""
        of = self.supersedes or self
        return of.epoch, of.seq

    @property
    def order(self) -> tuple[int, int]:
        """The place in the order of checkpoints and near saves: (epoch, cut)."""
        return self.place[0], self.cut or 0

    @property
    def is_compacted(self) -> bool:
        """Whether this checkpoint has the same rows as the delta that it supersedes."""
        return self.supersedes is not None and self.supersedes.rows == "same"

    @property
    def name(self) -> str:
        """The save id by which deltas refer to these rows; of a compacted checkpoint, the original delta's."""
        return self.supersedes.save_id if self.supersedes and self.is_compacted else self.save_id

    @property
    def name_xxh3(self) -> int:
        """The checksum by which deltas refer to these rows; of a compacted checkpoint, the original delta's."""
        return self.supersedes.manifest if self.supersedes and self.is_compacted else self.xxh3

    def file(self, name: str) -> FileEntry | None:
        return self._files_by_name.get(name)

    def table(self, name: str) -> TableEntry | None:
        return self._tables_by_name.get(name)

    def named_table(self, name: str) -> TableEntry:
        entry = self.table(name)
        if entry is None:
            raise KeyError(f"no table {name!r} in {self.ckpt_id!r}{instead_of(name, self._tables_by_name)}")
        return entry

    @cached_property
    def _files_by_name(self) -> dict[str, FileEntry]:
        return {file.name: file for file in self.files}

    @cached_property
    def _tables_by_name(self) -> dict[str, TableEntry]:
        return {table.name: table for table in self.tables}


class _Flags(JsonRecord, frozen=True):
    ephemeral: bool


class _ContentFields(JsonRecord, frozen=True, kw_only=True):
    shards: tuple[ShardEntry, ...]
    tables: tuple[TableEntry, ...]
    files: tuple[FileEntry, ...]
    names: Names
    training: Training = Training()
    state: dict[str, Any]
    flags: _Flags
    writer: dict[str, Scalar]


class _RecordFields(JsonRecord, frozen=True, kw_only=True):
    """The fields of a manifest outside of its head; the seal of a near save also has them."""

    ckpt_id: CkptId
    save_id: str
    kind: str
    parent: Parent | None = None
    chain: tuple[Link, ...] | None = None
    supersedes: Supersedes | None = None
    epoch: Count
    seq: Count
    cut: Count | None = None
    step: Count | None = None
    time: str


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, sealed with their checksum; ValueError if they are too large to read."""
    data = KIND.encode({"checksum": CHECKSUM, **record_json(manifest)})
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the manifest would have {len(data)} bytes, of {len(manifest.files)} files and {len(manifest.tables)} "
            f"tables; expected at most {MAX_BYTES}: save with fewer ranks or a lower concurrency"
        )
    return data


def decode(data: bytes, path: str) -> Manifest:
    """Return the manifest in ``data``, the bytes of the file ``path``.

    Raises CorruptCheckpointError if the manifest is incomplete or inconsistent, FormatVersionError for a newer format.
    """
    document = KIND.open(data, path)
    if (kind := document.text("kind")) not in ("full", "delta"):
        raise document.newer(f"a {kind} checkpoint", KIND.version)
    document.text("checksum")
    return manifest_of(document)


def record_json(manifest: Manifest) -> dict[str, Any]:
    training = {key: value for key, value in plain(manifest.training).items() if value}
    return {
        "ckpt_id": manifest.ckpt_id,
        "save_id": manifest.save_id,
        "kind": manifest.kind,
        "parent": manifest.parent and plain(manifest.parent),
        **({} if manifest.parent is None else {"chain": plain(manifest.chain)}),
        **({} if manifest.supersedes is None else {"supersedes": plain(manifest.supersedes)}),
        "epoch": manifest.epoch,
        "seq": manifest.seq,
        **({} if manifest.cut is None else {"cut": manifest.cut}),
        "step": manifest.step,
        "time": manifest.time,
        "shards": plain(manifest.shards),
        "tables": plain(manifest.tables),
        "files": plain(manifest.files),
        "names": {**plain(manifest.names), "dense_opt": list(manifest.names.dense_opt)},
        **({"training": training} if training else {}),
        "state": dict(manifest.state),
        "flags": {"ephemeral": manifest.ephemeral},
        "writer": dict(manifest.writer),
    }


def manifest_of(document: Document) -> Manifest:
    """Return the manifest that :func:`record_json` wrote; CorruptCheckpointError if it contradicts itself."""
    fields = document.read(_RecordFields)
    if not _GONE_FIELDS.isdisjoint(document.values):  # the checkpoint would get another place
        raise document.absent("supersedes")
    if fields.supersedes is not None and fields.supersedes.rows not in ("same", "fewer"):
        found = f"a checkpoint with rows that are {fields.supersedes.rows!r} beside the rows of another"
        raise document.newer(found, KIND.version)
    if fields.kind == "delta" and (fields.parent is None or fields.chain is None):
        key = "parent" if fields.parent is None else "chain"
        raise document.wrong(key, "null", "one") if key in document.values else document.absent(key)
    for where, found, expected in _link_problems(fields):
        raise document.wrong(where, found, expected)
    return Manifest(
        ckpt_id=fields.ckpt_id,
        save_id=fields.save_id,
        epoch=fields.epoch,
        seq=fields.seq,
        cut=fields.cut,
        step=fields.step,
        time=fields.time,
        **content_of(document, of_delta=fields.kind == "delta"),
        parent=fields.parent,
        chain=fields.chain or (),
        supersedes=fields.supersedes,
        xxh3=document.xxh3,
    )


def _link_problems(fields: _RecordFields) -> Iterator[tuple[str, str, str]]:
    """Yield (field, found, expected) for links to other checkpoints that contradict the kind."""
    parent, chain = fields.parent, fields.chain
    if fields.kind != "delta":
        present = (key for key in ("parent", "chain") if getattr(fields, key) is not None)
        yield from ((key, "one", "no such field in a full checkpoint") for key in present)
    elif not chain or parent is None or chain[0] != Link(parent.ckpt_id, parent.save_id, parent.directory):
        yield "chain", f"{len(chain or ())} links, the first is not the parent", "the parent first"
    elif len(chain) >= MAX_LINKS:
        yield "chain", f"{len(chain)} links below it", f"at most {MAX_LINKS - 1}"
    elif fields.supersedes is not None and fields.supersedes.rows == "same":
        yield "supersedes.rows", "same", "fewer, in a delta"


def content_of(document: Document, *, of_delta: bool) -> dict[str, Any]:
    fields = document.read(_ContentFields)
    for where, found, expected in _content_problems(fields, of_delta=of_delta):
        raise document.wrong(where, found, expected)
    lineages = {name: lineage for name, lineage in fields.training.optimizers.items() if lineage}
    return {
        "shards": fields.shards,
        "tables": fields.tables,
        "files": fields.files,
        "names": fields.names,
        "training": fields.training.but(optimizers=lineages),
        "state": fields.state,
        "writer": {name: str(version) for name, version in fields.writer.items()},
        "ephemeral": fields.flags.ephemeral,
    }


def _content_problems(fields: _ContentFields, *, of_delta: bool) -> Iterator[tuple[str, object, object]]:
    for number, shard in enumerate(fields.shards):
        if not shard.buckets[0] <= shard.buckets[1]:
            yield f"shards[{number}].buckets", shard.buckets, "[begin, end) within 0 to 65536"
        for table, (least, greatest) in (shard.ids or {}).items():
            if least > greatest:
                yield f"shards[{number}].ids.{table}", [least, greatest], "[least, greatest], both int64"
    for number, entry in enumerate(fields.tables):
        for key, found, expected in table_problems(entry, of_delta=of_delta):
            yield f"tables[{number}].{key}", found, expected
    for number, file in enumerate(fields.files):
        if file.xxh3 is None and not layout.is_part(file.name):
            yield f"files[{number}].xxh3", "no such field", "16 hex digits"
    names = fields.names
    groups = {"dense": names.dense, "extra": names.extra, "io_state": names.io_state}
    groups |= {"extra_of_ranks": names.extra_of_ranks, "dense_opt": names.dense_opt}
    lists = {f"names.{group}": listed for group, listed in groups.items()}
    lists |= {key: tuple(each.name for each in getattr(fields, key)) for key in ("tables", "files")}
    for key, listed in lists.items():
        if (twice := first_repeat(listed)) is not None:
            yield key, f"{twice!r} twice", "different names"
    for name in names.dense_opt:
        parameter, _, optimizer = name.rpartition("@")
        if not parameter or optimizer not in {*names.extra, *names.extra_of_ranks}:
            yield "names.dense_opt", repr(name), "parameter@optimizer, of a registered object"
    yield from _shard_problems(fields.shards, set(lists["files"]), set(lists["tables"]))


def _shard_problems(
    shards: Sequence[ShardEntry], files: Collection[str], tables: Collection[str]
) -> Iterator[tuple[str, object, object]]:
    if not shards:
        yield "shards", "none", "at least one"
    for number, shard in enumerate(shards):
        name = layout.catalog(number, len(shards))
        if shard.catalog != name or name not in files:
            yield f"shards[{number}].catalog", shard.catalog, f"{name}, listed in files"
        for table in (shard.ids or {}).keys() - tables:
            yield f"shards[{number}].ids", f"a range of {table!r}", "tables that the manifest lists"


def are_disjoint(ranges: Iterable[IdRange]) -> bool:
    return all(before[1] < following[0] for before, following in pairwise(sorted(ranges)))


def overlap(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether any two ranges of buckets [begin, end) overlap; empty ranges do not."""
    ordered = sorted(span for span in spans if span[0] < span[1])
    return any(following[0] < before[1] for before, following in pairwise(ordered))


def in_manifest(shards: Sequence[ShardEntry]) -> tuple[ShardEntry, ...]:
    """Return shards for the manifest: with ids only if the buckets do not determine which shard has an id."""
    n_ranges = sum(len(shard.ids or ()) for shard in shards)
    if n_ranges <= _MAX_RANGES and overlap([shard.buckets for shard in shards]):
        return tuple(shards)
    return tuple(shard.but(ids=None) for shard in shards)


def misfit(saved: Lineage, live: Lineage) -> str:
    """Return which class saved a state that the live optimizer cannot take; "" if one class inherits from the other."""
    is_akin = not saved or not live or saved[0] in live or live[0] in saved
    return "" if is_akin else f"{saved[0]}, this one is {live[0]}"


def other_decay(saved: Lineage, live: Lineage) -> str:
    """Return which class saved a weight decay with another meaning: Adam adds it to the gradient, AdamW does not."""
    is_other = saved and live and ("AdamW" in saved) != ("AdamW" in live)
    return f"{saved[0]}, this one is {live[0]}" if is_other else ""
