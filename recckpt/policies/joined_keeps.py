"""What a policy of what to keep is, and several of them as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeGuard, runtime_checkable

from recckpt.format.manifest import Manifest


@runtime_checkable
class Keep(Protocol):
    """Says which checkpoints to keep; a class of your own needs nothing but this.

    Rotation keeps the newest checkpoint of all and pinned ones whatever it says, and shows it no ephemeral ones.
    """

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of those to keep; pure.

        Args:
            checkpoints: the current one of each id, in order of commit, oldest first; may be empty.
            now: the time, with its zone.
        """


class KeepOperators(Keep, Protocol):
    """Joins by ``|``."""

    def __or__(self, other: Keep) -> KeptByAny:
        return KeptByAny(self, other)

    def __ror__(self, other: Keep) -> KeptByAny:
        return KeptByAny(other, self)


@dataclass(frozen=True, init=False, repr=False)
class KeptByAny(KeepOperators):
    """Those that any of these keeps, each asked about all; ``a | b`` is the same.

    Raises:
        ValueError: none is given, or one of them is not a :class:`Keep`.
    """

    keeps: tuple[Keep, ...]

    def __init__(self, *keeps: Keep) -> None:
        if not keeps or not all(map(is_keep, keeps)):
            raise ValueError(f"KeptByAny: expected one Keep or more, such as Newest(3), found {keeps!r}")
        flat = [part for keep in keeps for part in (keep.keeps if isinstance(keep, KeptByAny) else (keep,))]
        object.__setattr__(self, "keeps", tuple(flat))

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return all that they keep."""
        return {ckpt_id for keep in self.keeps for ckpt_id in keep.kept(checkpoints, now)}

    def __repr__(self) -> str:
        return f"KeptByAny({', '.join(map(repr, self.keeps))})"


def is_keep(value: Any) -> TypeGuard[Keep]:
    """Say whether this is a policy of what to keep."""
    return isinstance(value, Keep) and not isinstance(value, type)
