"""How a manifest names other checkpoints: a delta its parent and chain, a form its delta (docs/format.md, 12.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recckpt.format import layout
from recckpt.format.json_fields import Fields
from recckpt.format.safe_names import checked_name

MAX_LINKS = 1000  # part of the format: of a chain, the full one included


@dataclass(frozen=True)
class Link:
    """A checkpoint that a delta stands on, and the directory where it was: a hint."""

    ckpt_id: str
    save_id: str
    directory: str


@dataclass(frozen=True)
class Parent(Link):
    """The checkpoint that a delta was written against, with the checksum of its manifest: the truth."""

    manifest: int


@dataclass(frozen=True)
class FormOf:
    """The delta that a full checkpoint is a form of."""

    save_id: str  # of the delta
    manifest: int  # checksum of its manifest
    epoch: int  # of its writer
    seq: int  # its number; with the epoch, the place of the form in the order of commits
    offer: str  # the save id that catalogs and indexes of the form repeat


@dataclass(frozen=True)
class RevisionOf:
    """What a checkpoint without forgotten ids was committed in place of."""

    save_id: str  # of that one
    directory: str  # where that was
    epoch: int  # its place in the order of commits, and so that of the revision
    seq: int
    number: int  # how many times ids were forgotten in it; readers take the greatest of one place
    request: str  # because of which it was made
    rows: int  # how many rows that one has had more


def links_json(
    parent: Parent | None, chain: Sequence[Link], form_of: FormOf | None, revision_of: RevisionOf | None
) -> dict[str, Any]:
    """Return the fields of a manifest that name other checkpoints."""
    fields: dict[str, Any] = {"parent": None}
    if parent is not None:
        fields = {"parent": {**_link_json(parent), "manifest": f"{parent.manifest:016x}"}}
        fields["chain"] = [_link_json(link) for link in chain]
    if form_of is not None:
        checksum = f"{form_of.manifest:016x}"
        order = {"epoch": form_of.epoch, "seq": form_of.seq}
        fields["form_of"] = {"save_id": form_of.save_id, "manifest": checksum, **order, "offer": form_of.offer}
    if revision_of is not None:
        fields["revision_of"] = asdict(revision_of)
    return fields


def _link_json(link: Link) -> dict[str, Any]:
    return {"ckpt_id": link.ckpt_id, "save_id": link.save_id, "directory": link.directory}


def parse_parent(fields: Fields) -> Parent:
    """Return the parent in a JSON object."""
    link = _link(fields)
    return Parent(link.ckpt_id, link.save_id, link.directory, fields.checksum("manifest"))


_Links = tuple[Parent | None, tuple[Link, ...], FormOf | None, RevisionOf | None]


def parse_links(fields: Fields) -> _Links:
    """Return what a manifest says of other checkpoints; CorruptCheckpointError where it contradicts its kind."""
    if fields.text("kind") == "full":
        for key in ("parent", "chain"):
            if fields.has(key):
                raise fields.wrong(key, "one", "none of a full checkpoint")
        form_of = _form_of(fields.mapping("form_of")) if fields.has("form_of") else None
        return None, (), form_of, _revision_of(fields)
    parent, chain = parse_parent(fields.mapping("parent")), tuple(_link(entry) for entry in fields.objects("chain"))
    if not chain or chain[0] != Link(parent.ckpt_id, parent.save_id, parent.directory):
        raise fields.wrong("chain", f"{len(chain)} links, the first not the parent", "the parent first")
    if len(chain) >= MAX_LINKS:
        raise fields.wrong("chain", f"{len(chain)} links below", f"at most {MAX_LINKS - 1}")
    if fields.has("form_of"):
        raise fields.wrong("form_of", "one", "none of a delta")
    return parent, chain, None, _revision_of(fields)


def _link(fields: Fields) -> Link:
    ckpt_id = fields.text("ckpt_id")
    try:
        layout.encode_id(ckpt_id)
    except ValueError as error:
        raise fields.wrong("ckpt_id", str(error), "a checkpoint id") from error
    return Link(ckpt_id, fields.text("save_id"), checked_name(fields.text("directory"), fields.path))


def _form_of(fields: Fields) -> FormOf:
    return FormOf(
        fields.text("save_id"),
        fields.checksum("manifest"),
        fields.count("epoch"),
        fields.count("seq"),
        fields.text("offer"),
    )


def _revision_of(fields: Fields) -> RevisionOf | None:
    if not fields.has("revision_of"):
        return None
    of = fields.mapping("revision_of")
    directory = checked_name(of.text("directory"), fields.path)
    order = of.count("epoch"), of.count("seq"), of.count("number", low=1)
    return RevisionOf(of.text("save_id"), directory, *order, of.text("request"), of.count("rows"))
