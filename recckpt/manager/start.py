"""What a run may start from, and what is left of that where something turns out to be damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recckpt.errors import CorruptCheckpointError
from recckpt.load.other_forms import KnownDamage, damaged_link
from recckpt.load.source import LocatedBank
from recckpt.near.candidates import merged
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage import Storage


@dataclass(frozen=True)
class Start:
    """What a run may start from: the checkpoints of a bank, and its own, the best first, near saves among them."""

    bank: LocatedBank
    own: Sequence[Checkpoint]
    otherwise: Start | None = None  # where the other forms in the bank are damaged too: without an own checkpoint


def without_damage(damage: KnownDamage, storage: Storage, start: Start, error: CorruptCheckpointError) -> Start | None:
    """Return what there is to start from without what an error is about, in the bank or the own output dir.

    Its near saves are yet to be looked at by all ranks.
    """
    link = damaged_link(start.own[0], error) if start.own else None
    bank = damage.instead(start.bank, error)
    if bank is None and link is None and (start.bank.sources or not start.own):
        return start.otherwise  # it is in the bank
    if bank is not None and link is None:
        return replace(start, bank=bank)
    known = damage if bank is None else KnownDamage()
    link = link or start.own[0].directory
    known.note(storage, link, error)
    without = _without_link(known.whole(storage).current, start, link)
    return without if bank is None else replace(start, bank=bank, otherwise=without)  # both may have such a directory


def _without_link(current: Sequence[Checkpoint], start: Start, link: str) -> Start | None:
    ckpt_ids = {checkpoint.ckpt_id for checkpoint in start.own}
    saves = [each for each in start.own if each.near_dir is not None]
    saves = [save for save in saves if link not in {part.directory for part in save.links}]
    own = merged([each for each in reversed(current) if each.ckpt_id in ckpt_ids], saves)
    return replace(start, own=own, otherwise=None) if own else None
