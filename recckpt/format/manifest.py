"""The manifest: the commit record of a checkpoint (docs/format.md, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from functools import cached_property
from typing import Any

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.json_fields import Fields, check_seal, first_repeat, parse, seal
from recckpt.format.links import FormOf, Link, Parent, RevisionOf, links_json, parse_links
from recckpt.format.safe_names import checked_name
from recckpt.format.shards import ShardEntry, check_shards, parse_shard, shard_json
from recckpt.format.tables import TableEntry, parse_table, table_json
from recckpt.format.training import Training, parse_training, training_json
from recckpt.text import instead_of

FORMAT = "recckpt"  # part of the format
VERSION = 1  # part of the format
CHECKSUM = "xxh3_64"  # part of the format
MAX_BYTES = 64 << 20  # part of the format
_SEAL = "manifest_xxh3"  # part of the format

MAX_NESTED = 8  # part of the format: how deep lists and objects in the state are nested
StateValue = str | int | float | bool | Sequence["StateValue"] | Mapping[str, "StateValue"] | None


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint; parts have no checksum here, their catalog has several."""

    name: str
    n_bytes: int
    xxh3: int | None = None


@dataclass(frozen=True)
class Names:
    """What a checkpoint has state of, beside its tables."""

    dense: tuple[str, ...] = ()  # the model's tensors, and its plain values in model.pt
    extra: tuple[str, ...] = ()  # registered objects
    io_state: tuple[str, ...] = ()  # datasets, on any rank
    extra_of_ranks: tuple[str, ...] = ()  # registered objects of which each rank has a state of its own
    dense_opt: tuple[str, ...] = ()  # parameter@name of the dense optimizers among the registered objects


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds: what its manifest, and the offer of a form, say alike."""

    shards: tuple[ShardEntry, ...] = field(repr=False)  # as all that grows with the checkpoint
    tables: tuple[TableEntry, ...] = field(repr=False)
    files: tuple[FileEntry, ...] = field(repr=False)
    names: Names = field(default_factory=Names, repr=False)
    training: Training = field(default_factory=Training, repr=False)
    state: Mapping[str, StateValue] = field(default_factory=dict)
    writer: Mapping[str, str] = field(default_factory=dict, repr=False)
    ephemeral: bool = False

    @property
    def content(self) -> dict[str, Any]:
        """Its fields, to make another of the same content."""
        return {each.name: getattr(self, each.name) for each in fields_of(Content)}

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.n_bytes for file in self.files)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True, kw_only=True)
class Manifest(Content):
    """What is known of a checkpoint without opening its other files."""

    ckpt_id: str
    save_id: str
    seq: int
    time: str
    epoch: int = 0
    cut: int | None = None  # number of the staging in its epoch, where near saves are made, too
    step: int | None = None
    parent: Parent | None = None  # of a delta
    chain: tuple[Link, ...] = field(default=(), repr=False)  # hints where the links below are, the parent first
    form_of: FormOf | None = None  # of a form
    revision_of: RevisionOf | None = None  # of one without forgotten ids, and of its forms
    xxh3: int = field(default=0, compare=False)  # its checksum, by which a delta names it; of what was read only

    @property
    def kind(self) -> str:
        """Whether it is ``"full"`` or a ``"delta"``."""
        return "full" if self.parent is None else "delta"

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the order of commits; a form, or a revision, stands where that does which it is of."""
        of = self.form_of or self.revision_of or self
        return of.epoch, of.seq

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands among all that can be restored, near saves included: by epoch and cut."""
        return self.place[0], self.cut or 0

    @property
    def origin(self) -> str:
        """The save id by which deltas name the checkpoint, of which this may be a form."""
        return self.save_id if self.form_of is None else self.form_of.save_id

    @property
    def origin_xxh3(self) -> int:
        """The checksum by which deltas name the checkpoint, of which this may be a form."""
        return self.xxh3 if self.form_of is None else self.form_of.manifest

    @property
    def files_id(self) -> str:
        """The save id that its catalogs and indexes repeat."""
        return self.save_id if self.form_of is None else self.form_of.offer

    def file(self, name: str) -> FileEntry | None:
        """Return the entry of a file, None if the checkpoint does not have it."""
        return self._files_by_name.get(name)

    def table(self, name: str) -> TableEntry | None:
        """Return the entry of a table, None if the checkpoint does not have it."""
        return self._tables_by_name.get(name)

    def named_table(self, name: str) -> TableEntry:
        """Return the entry of a table; KeyError, with the names that there are, if the checkpoint does not have it."""
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


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, sealed with their own checksum; ValueError if it is too large to read."""
    head = {"format": FORMAT, "version": VERSION, "checksum": CHECKSUM}
    data = seal({**head, **record_json(manifest)}, _SEAL)
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"the manifest would have {len(data)} bytes, of {len(manifest.files)} files and {len(manifest.tables)} "
            f"tables; at most {MAX_BYTES} are read back: save with fewer ranks or a lower concurrency"
        )
    return data


def decode(data: bytes, path: str) -> Manifest:
    """Return the manifest in ``data``, the bytes of the file ``path``.

    Raises:
        CorruptCheckpointError: it is not a whole, sealed and consistent manifest.
        FormatVersionError: written by a newer format.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpointError(path, "its size", found=f"over {MAX_BYTES} bytes", expected="less")
    fields = parse(data, path)
    _check_header(fields)  # before the seal: another version, or another checksum, may be sealed otherwise
    xxh3 = check_seal(data, _SEAL, path)
    if fields.text("kind") not in ("full", "delta"):
        raise FormatVersionError(path, found=f"a {fields.text('kind')} checkpoint", supported=VERSION)
    return parse_record(fields, xxh3)


def record_json(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON fields of a manifest but for its head, which the seal of a near save has, too."""
    return {
        "ckpt_id": manifest.ckpt_id,
        "save_id": manifest.save_id,
        "kind": manifest.kind,
        **links_json(manifest.parent, manifest.chain, manifest.form_of, manifest.revision_of),
        "epoch": manifest.epoch,
        "seq": manifest.seq,
        **({} if manifest.cut is None else {"cut": manifest.cut}),
        "step": manifest.step,
        "time": manifest.time,
        **content_json(manifest),
    }


def content_json(of: Content) -> dict[str, Any]:
    """Return the JSON fields that say what a checkpoint holds."""
    return {
        "shards": [shard_json(shard) for shard in of.shards],
        "tables": [table_json(table) for table in of.tables],
        "files": [_file_json(file) for file in of.files],
        "names": {
            group: list(names) for group, names in asdict(of.names).items() if names or group != "extra_of_ranks"
        },
        **training_json(of.training),
        "state": dict(of.state),
        "flags": {"ephemeral": of.ephemeral},
        "writer": dict(of.writer),
    }


def _file_json(file: FileEntry) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": file.name, "bytes": file.n_bytes}
    return entry if file.xxh3 is None else {**entry, "xxh3": f"{file.xxh3:016x}"}


def _check_header(fields: Fields) -> None:
    fields.check_format(FORMAT, VERSION)
    if fields.text("checksum") != CHECKSUM:
        raise fields.wrong("checksum", f"unknown algorithm {fields.text('checksum')!r}", CHECKSUM)


def parse_record(fields: Fields, xxh3: int) -> Manifest:
    """Return what :func:`record_json` wrote; CorruptCheckpointError where it contradicts itself."""
    parent, chain, form_of, revision_of = parse_links(fields)
    manifest = Manifest(
        ckpt_id=fields.text("ckpt_id"),
        save_id=fields.text("save_id"),
        epoch=fields.count("epoch"),
        seq=fields.count("seq"),
        cut=fields.maybe_count("cut"),
        step=fields.maybe_count("step"),
        time=fields.text("time"),
        **parse_content(fields, of_delta=parent is not None).content,
        parent=parent,
        chain=chain,
        form_of=form_of,
        revision_of=revision_of,
        xxh3=xxh3,
    )
    try:
        layout.encode_id(manifest.ckpt_id)
    except ValueError as error:
        raise fields.wrong("ckpt_id", str(error), "a checkpoint id") from error
    return manifest


def parse_content(fields: Fields, *, of_delta: bool) -> Content:
    """Return what :func:`content_json` wrote; CorruptCheckpointError where it contradicts itself."""
    content = Content(
        shards=tuple(parse_shard(entry) for entry in fields.objects("shards")),
        tables=tuple(parse_table(entry, of_delta=of_delta) for entry in fields.objects("tables")),
        files=tuple(_file(entry) for entry in fields.objects("files")),
        names=_names(fields.mapping("names")),
        training=parse_training(fields),
        state=fields.scalars("state", is_nested=True),
        writer={name: str(version) for name, version in fields.scalars("writer").items()},
        ephemeral=fields.mapping("flags").flag("ephemeral"),
    )
    _check_consistent(content, fields)
    return content


def _names(fields: Fields) -> Names:
    groups = ["dense", "extra", "io_state", *(group for group in ("extra_of_ranks", "dense_opt") if fields.has(group))]
    names = {group: tuple(fields.texts(group)) for group in groups}
    for group, listed in names.items():
        if (twice := first_repeat(listed)) is not None:
            raise fields.wrong(group, f"{twice!r} twice", "different names")
    objects = {*names["extra"], *names.get("extra_of_ranks", ())}
    for name in names.get("dense_opt", ()):
        parameter, _, optimizer = name.rpartition("@")
        if not parameter or optimizer not in objects:
            raise fields.wrong("dense_opt", repr(name), "parameter@optimizer, of a registered object")
    return Names(**names)


def _file(fields: Fields) -> FileEntry:
    name = checked_name(fields.text("name"), fields.path)
    xxh3 = None if layout.is_part(name) else fields.checksum("xxh3")
    return FileEntry(name, fields.count("bytes"), xxh3)


def _check_consistent(content: Content, fields: Fields) -> None:
    names = {"tables": [table.name for table in content.tables], "files": [file.name for file in content.files]}
    for key, listed in names.items():
        twice = first_repeat(listed)
        if twice is not None:
            raise fields.wrong(key, f"{twice!r} twice", "different names")
    check_shards(content.shards, set(names["files"]), set(names["tables"]), fields)
