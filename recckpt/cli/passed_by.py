"""A line about a checkpoint that is the newest of an output dir, but not of the latest step."""

from __future__ import annotations

from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage
from recckpt.text import escaped


def passed_by(output_dir: str, ckpt_id: str, planned_step: int | None) -> list[str]:
    """Say which of a later step ``restore()`` does not take once this one is committed, which it may be already."""
    listing = list_checkpoints(open_storage(output_dir))
    own = listing.find(ckpt_id)
    step = own.manifest.step if own is not None else planned_step
    others = {c.manifest.step: c.ckpt_id for c in listing.current if c.manifest.step is not None}
    latest = max(others, default=0)
    if step is None or latest <= step:
        return []
    newer = f"{escaped(others[latest])} is of a later step, which restore({latest}) takes"
    return [f"restore() takes {escaped(ckpt_id)}, the newest there once it is written, though {newer}"]
