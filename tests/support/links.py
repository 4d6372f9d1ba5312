"""Manifests of full checkpoints, deltas and compacted ones that no disk has seen."""

from dataclasses import replace
from typing import Any

import xxhash
from faults import delta_states as model
from hypothesis import strategies as st

from recckpt.format import layout
from recckpt.format.manifest import Link, Manifest, Parent, Supersedes
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (2,)),)


def full(ckpt_id: str, seq: int, **changes: Any) -> Manifest:
    """Return the manifest of a full checkpoint, whose save id is made of its id."""
    save_id = changes.pop("save_id", f"save of {ckpt_id}")
    tables = (TableEntry("item", 3, SLOTS),)
    record = Manifest(
        (),
        tables,
        (),
        ckpt_id=ckpt_id,
        save_id=save_id,
        seq=seq,
        time="",
        epoch=1,
        xxh3=xxhash.xxh3_64_intdigest(save_id.encode()),
    )
    return replace(record, **changes)


def delta(ckpt_id: str, seq: int, on: Manifest, *, replaced: bool = False, **changes: Any) -> Manifest:
    """Return the manifest of a delta on another."""
    below = Link(on.ckpt_id, on.name, on.ckpt_id)
    parent = Parent(below.ckpt_id, below.save_id, below.directory, on.name_xxh3)
    tables = (TableEntry("item", 3, SLOTS, DeltaRows(3 if replaced else 1, 0, replaced)),)
    chain = (below, *on.chain)
    return full(ckpt_id, seq, **{"parent": parent, "chain": chain, "tables": tables, **changes})


def compacted(of: Manifest, save_id: str, **changes: Any) -> Manifest:
    """Return the manifest that supersedes a delta with the same rows."""
    supersedes = Supersedes(of.save_id, of.xxh3, of.ckpt_id, *of.place, "same", "compacted")
    own = {"epoch": 9, "save_id": save_id, "supersedes": supersedes, "ephemeral": of.ephemeral}
    return full(of.ckpt_id, 90, **{**own, **changes})


def attempt_of(record: Manifest) -> str:
    """Return where a checkpoint lies, among others of its id."""
    return (
        layout.offer_dir(record.ckpt_id, record.save_id)
        if record.is_compacted
        else f"{record.ckpt_id}.{record.seq + 1}"
    )


@st.composite
def output_dirs(draw, ids: str = ""):
    """Directories with their manifests, some gone, and which compacted are damaged; ids may occur several times."""
    made: list[Manifest] = []
    for n in range(draw(st.integers(1, 6))):
        deltas = [record for record in made if record.supersedes is None]
        on = draw(st.none() | st.sampled_from(deltas)) if deltas else None
        names = {"save_id": f"s{n}", "ephemeral": bool(ids) and draw(st.integers(0, 4)) == 0}
        ckpt_id = draw(st.sampled_from(ids)) if ids else f"c{n}"
        made.append(full(ckpt_id, n, **names) if on is None else delta(ckpt_id, n, on, **names))
    found = {attempt_of(record): record for record in made}
    of_deltas = [record for record in made if record.parent]
    for n, of in enumerate(draw(st.lists(st.sampled_from(of_deltas), max_size=4)) if of_deltas else []):
        made.append(compacted(of, f"{draw(st.integers(0, 9))}{n}".zfill(32)))
        found[attempt_of(made[-1])] = made[-1]
    gone = draw(st.sets(st.sampled_from(sorted(found)), max_size=3))
    there = {name: record for name, record in found.items() if name not in gone}
    full_ones = sorted(name for name, record in there.items() if record.is_compacted)
    damaged = draw(st.sets(st.sampled_from(full_ones))) if full_ones else set()
    return there, damaged


def as_in_the_model(
    there: dict[str, Manifest], damaged: set[str]
) -> tuple[frozenset[model.Checkpoint], frozenset[model.Offer]]:
    """Return the checkpoints and the files of compacted ones in the words of the model."""
    found, offers = [], []
    for name, record in there.items():
        parent = record.parent.save_id if record.parent else ""
        of = record.name if record.is_compacted else ""
        one = model.Checkpoint(
            name,
            record.save_id,
            (record.epoch, record.seq),
            record.place,
            parent,
            frozenset(),
            frozenset(),
            record.ephemeral,
            of,
            ckpt_id=record.ckpt_id,
        )
        found.append(one)
        if of and name not in damaged:
            offers.append(model.Offer(name, of, frozenset(), record.save_id, record.save_id))
    return frozenset(found), frozenset(offers)
