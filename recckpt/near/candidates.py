"""Which near saves may be restored, and in which order beside checkpoints (docs/format.md, section 16)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import near_names
from recckpt.format.near_list import NearList
from recckpt.output_dir.claims import read_claim
from recckpt.output_dir.listing import Checkpoint, Listing, chained
from recckpt.storage import Storage


def counting(storage: Storage, saves: Iterable[Checkpoint], listing: Listing, near_list: NearList) -> list[Checkpoint]:
    """Return the near saves that count, each with what it stands on, newest first.

    Args:
        storage: the output dir.
        saves: those of which each file is on some host.
        listing: what is committed in the output dir.
        near_list: what the newest list there says.
    """
    # Rule *epoch_rule*: what an overtaken writer seals afterwards is not named, and its epoch is too low.
    named = [save for save in saves if near_list.counts(save.manifest.save_id)]
    ours = made_here(storage, {save.manifest.save_id for save in named})
    whole = [save for save in named if save.manifest.save_id in ours]
    # Rules *base_by_save_id* and *parent_is_origin*: what it stands on is found as that of a delta is.
    return _newest_first(c for c in chained([*listing.committed, *whole], listing.damaged)[0] if c.near_dir is not None)


def merged(checkpoints: Sequence[Checkpoint], saves: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints and near saves in one order, newest first (rules *one_order* and *order_by_cut*)."""
    together, rest = list[Checkpoint](), list(checkpoints)
    for save in _newest_first(saves):
        while rest and rest[0].manifest.order > save.manifest.order:
            together.append(rest.pop(0))
        together.append(save)
    return [*together, *rest]


def _newest_first(saves: Iterable[Checkpoint]) -> list[Checkpoint]:
    return sorted(saves, key=lambda save: save.manifest.order, reverse=True)


def made_here(storage: Storage, names: Iterable[str]) -> set[str]:
    """Return the names whose nonce is that of the claim which their epoch has in the output dir."""
    parsed = {name: key for name in names if (key := near_names.parse_near(name)) is not None}
    nonces: dict[int, str] = {}
    for epoch in {epoch for epoch, _, _ in parsed.values()}:
        with suppress(FileNotFoundError, CorruptCheckpointError, FormatVersionError):
            nonces[epoch] = read_claim(storage, epoch).nonce
    return {name for name, (epoch, nonce, _) in parsed.items() if nonces.get(epoch) == nonce}
