"""A form is read once more before what it replaces goes: its compactor read what it wrote from the page cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from recckpt.checkpoint.every_byte import problems
from recckpt.output_dir import rotation
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


def remove_checked(storage: Storage, fence: Fence, going: Sequence[Checkpoint], concurrency: int) -> list[str]:
    """Remove checkpoints, as :meth:`Fence.remove`, but what a damaged form stands for; that form goes in its place.

    A form is read whole, once: with it goes, or stays, the delta that it is a form of.
    """
    for form in _replacing(fence, going):
        problem = next(problems(storage, form, concurrency), None)
        if problem is None:
            continue
        log.error(
            "%s/%s is damaged and removed; what it was to replace stays: %s", storage.url, form.directory, problem
        )
        fence.remove([form], concurrency)
        fence.look_again()  # deltas on it are read through the delta by now
        kept = {link.directory for c in fence.listing.committed if _is_of(form, c) for link in c.links}
        going = [victim for victim in going if victim.directory not in kept]
    rotation.sync_forms(storage, fence.listing, going)
    return fence.remove(going, concurrency)


def _replacing(fence: Fence, going: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the forms that stay while the delta goes that each is a form of."""
    gone = {victim.directory for victim in going}
    deltas = [victim for victim in going if victim.manifest.kind == "delta"]
    forms = (c for c in fence.listing.committed if c.manifest.form_of and c.directory not in gone)
    return [form for form in forms if any(_is_of(form, delta) for delta in deltas)]


def _is_of(form: Checkpoint, delta: Checkpoint) -> bool:
    return form.manifest.form_of is not None and form.manifest.form_of.save_id == delta.manifest.save_id
