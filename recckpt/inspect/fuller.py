"""An older checkpoint that has more rows of a table than could be saved of a damaged one (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recckpt.inspect.salvage_link import Lost
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.storage import Storage


@dataclass(frozen=True)
class Fuller:
    """An older checkpoint with more rows; that its files are there with their sizes is all that was looked at.

    Attributes:
        ckpt_id: its id.
        step: its global step, None where the saver did not count.
        kind: ``"full"`` or ``"delta"``.
        rows: of the table, by its manifest.
    """

    ckpt_id: str
    step: int | None
    kind: str
    rows: int


def fuller_one(storage: Storage, damaged: Checkpoint, table: str, n_rows: int, lost: Iterable[Lost]) -> Fuller | None:
    """Return the newest older checkpoint with more rows of a table, which reads no directory where rows were lost."""
    bad = {each.file.partition("/")[0] for each in lost} | {damaged.directory}
    for checkpoint in reversed(look_around(storage).current):
        entry = checkpoint.manifest.table(table)
        is_older = checkpoint.manifest.place < damaged.manifest.place
        is_apart = bad.isdisjoint(link.directory for link in checkpoint.links)
        if is_older and is_apart and entry is not None and entry.rows > n_rows:
            manifest = checkpoint.manifest
            return Fuller(manifest.ckpt_id, manifest.step, manifest.kind, entry.rows)
    return None
