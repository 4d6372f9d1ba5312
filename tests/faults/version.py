"""What the dict of T10 knows of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from recckpt.format import layout


@dataclass
class Version:
    """A checkpoint that was committed.

    Attributes:
        ckpt_id: its id.
        value: what restores from it.
        is_sure: False where its writer died and may have removed it.
        damage: "" for none, "bytes" where only reading them shows it, "shape" where looking at the directory does.
        spoils: whether the damage is of what is read for deltas that stand on it, too.
        parent: what it stands on; None where it is full, or has a form.
        offered: whether an offer of it was made, which may be adopted.
    """

    ckpt_id: str
    value: float
    parent: Version | None = None
    is_sure: bool = True
    damage: str = ""
    spoils: bool = False
    offered: bool = False

    @property
    def step(self) -> int | None:
        return layout.parse_step(self.ckpt_id)

    @property
    def links(self) -> list[Version]:
        """It, and all that it stands on; the full one last."""
        return [self, *(self.parent.links if self.parent else [])]

    @property
    def is_whole(self) -> bool:
        """Whether it restores."""
        return not self.damage and not any(link.spoils for link in self.links)
