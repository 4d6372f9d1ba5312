"""Which near saves count, as the list of a takeover says (docs/format.md, section 16)."""

from __future__ import annotations

from dataclasses import dataclass

from recckpt.format import near_names


@dataclass(frozen=True)
class NearList:
    """What a list says of near saves.

    Attributes:
        epoch: near saves of this epoch and of later ones count, whether they are named or not.
        names: of those before that count, too.
    """

    epoch: int
    names: frozenset[str] = frozenset()

    def counts(self, name: str) -> bool:
        """Say whether a near save counts. Rule *epoch_rule*: what an overtaken writer seals is not named here."""
        parsed = near_names.parse_near(name)
        return parsed is not None and (parsed[0] >= self.epoch or name in self.names)
