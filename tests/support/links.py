"""Manifests of full checkpoints, deltas and forms that no disk has seen."""

from dataclasses import replace
from typing import Any

import xxhash

from recckpt.format.links import FormOf, Link, Parent
from recckpt.format.manifest import Manifest
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (2,)),)


def full(ckpt_id: str, seq: int, **changes: Any) -> Manifest:
    """Return the manifest of a full checkpoint, whose save id is made of its id."""
    save_id = changes.pop("save_id", f"save of {ckpt_id}")
    tables = (TableEntry("item", 3, SLOTS),)
    record = Manifest(
        ckpt_id, save_id, seq, "", (), tables, (), epoch=1, xxh3=xxhash.xxh3_64_intdigest(save_id.encode())
    )
    return replace(record, **changes)


def delta(ckpt_id: str, seq: int, on: Manifest, *, replaced: bool = False, **changes: Any) -> Manifest:
    """Return the manifest of a delta on another."""
    below = Link(on.ckpt_id, on.origin, on.ckpt_id)
    parent = Parent(below.ckpt_id, below.save_id, below.directory, on.origin_xxh3)
    tables = (TableEntry("item", 3, SLOTS, DeltaRows(3 if replaced else 1, 0, replaced)),)
    chain = (below, *on.chain)
    return full(ckpt_id, seq, **{"parent": parent, "chain": chain, "tables": tables, **changes})


def form(of: Manifest, save_id: str, **changes: Any) -> Manifest:
    """Return the manifest of a form of a delta."""
    form_of = FormOf(of.save_id, of.xxh3, *of.place, offer=f"offer {save_id}")
    return full(
        of.ckpt_id, 90, **{"epoch": 9, "save_id": save_id, "form_of": form_of, "ephemeral": of.ephemeral, **changes}
    )
