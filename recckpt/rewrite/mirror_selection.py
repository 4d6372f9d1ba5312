"""Decides, by the listings alone, what belongs in a mirror: what to copy, in which order, and what to remove."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import Damage
from recckpt.output_dir.listing import Checkpoint, Listing, chained
from recckpt.output_dir.rotation import chosen, in_order
from recckpt.policies.keep import Keep


def damaged_below(directory: str, broken: Mapping[str, Damage]) -> str:
    """Return the directory of the damaged parent of a broken checkpoint; "" if the checkpoint itself is damaged.

    ``broken``: directory -> damage in it or its parents, as in :class:`recckpt.output_dir.listing.Chains`.
    """
    error = broken[directory]
    if isinstance(error, CorruptCheckpointError):
        link = error.path.partition("/")[0]  # the damaged file is named by its path in the output dir
    else:
        link = next(name for name, other in broken.items() if other is error)  # all deltas on a link share its error
    return link if link in broken and link != directory else ""


@dataclass(frozen=True)
class Selection:
    # checkpoints to copy: the newest with its parents first; each checkpoint after its parents
    missing: tuple[Checkpoint, ...]
    stay: frozenset[str]  # directories that belong in the mirror
    newest: Checkpoint | None  # None if nothing can be copied
    # directory of a checkpoint of the run that the mirror lacks -> directory of its damaged parent
    left_out: Mapping[str, str]


def select(
    run: Listing,
    there: Listing,
    *,
    keep: Keep | None,
    pinned: Collection[str],
    damaged: Mapping[str, Damage],
    is_forgotten: bool,
    now: datetime,
) -> Selection:
    """Return what belongs in a mirror: the run's and the mirror's checkpoints that ``keep`` selects, and pinned ones.

    Without ``keep``, the checkpoints of the run belong there. ``damaged`` directories of the run, and deltas on them,
    are not copied. If ids were forgotten since the last pass, no checkpoint stays that the run lacks.
    """
    whole, chains = chained([*run.committed, *run.lost], {**run.damaged, **run.unreadable, **damaged})
    own = {c.directory: c for c in whole}
    counting = {c.directory for c in run.lost} | damaged.keys()
    broken = run.damaged.keys() | run.unreadable.keys()

    def may_stay(directory: str) -> bool:
        if directory in own or directory in run.fenced:
            return False
        return directory in counting or (not is_forgotten and (keep is not None or directory in broken))

    old = {c.directory: c for c in there.committed if may_stay(c.directory)}
    union, _ = chained([*old.values(), *own.values()], {})
    listing = Listing(union, {}, {}, directories=tuple(c.directory for c in union))
    kept = listing.current if keep is None else chosen(listing, keep, pinned, now, layout.STEP_PREFIX)
    kept = sorted(kept, key=listing.committed.index)
    stay = listing.chains.closure([c.manifest.name for c in kept])
    present = {c.directory for c in there.committed}
    in_order = (link for c in reversed(kept) for link in reversed(c.links))
    missing = {link.directory: link for link in in_order if link.directory in stay - present}
    left_out = {
        c.directory: link
        for c in (*run.committed, *run.lost)
        if c.directory in chains.broken.keys() - stay and not chains.named(c.manifest.name)
        if (link := damaged_below(c.directory, chains.broken))
    }
    return Selection(tuple(missing.values()), frozenset(stay), kept[-1] if kept else None, left_out)


def going(there: Listing, stay: Collection[str], *, has_all: bool) -> list[Checkpoint]:
    """Return the checkpoints of a mirror that are not in ``stay``, deltas before their parents.

    ``has_all`` includes damaged ones, and copies that a user made under another name.
    """
    ours = (c for c in there.committed if layout.is_attempt(c.directory, c.ckpt_id))
    gone = [c for c in ((*there.committed, *there.lost) if has_all else ours) if c.directory not in stay]
    return in_order(gone, there)


def check_same(run: Listing, there: Listing, url: str) -> None:
    """Raise RecckptError if a directory of the mirror holds another save than the same directory of the run."""
    own = {c.directory: c.manifest for c in (*run.committed, *run.lost)}
    for checkpoint in (*there.committed, *there.lost):
        record = own.get(checkpoint.directory)
        if record is not None and record.xxh3 != checkpoint.manifest.xxh3:
            found, expected = f"save {checkpoint.manifest.save_id}", f"{record.save_id}, as in the run"
            raise RecckptError(
                f"{url}/{checkpoint.directory}: found {found}, expected {expected}: it is a mirror of another run; "
                "mirror to another output dir"
            )
