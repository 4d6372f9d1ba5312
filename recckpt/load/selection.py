"""What can be selected of a checkpoint, by name: table slots, tensors, registered objects, groups of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import is_optimizer_slot

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "io_state", "global_step")
ID = "id"
GLOBAL_STEP = "global_step"


@dataclass(frozen=True, order=True)
class Name:
    """One selectable thing.

    Attributes:
        group: one of :data:`GROUPS`.
        text: ``table@slot``, or the name of a tensor or registered object.
    """

    group: str
    text: str

    @cached_property
    def table(self) -> str:
        """The table of a slot; "" where this is none."""
        return self.text.rpartition("@")[0] if self.is_slot else ""

    @cached_property
    def slot(self) -> str:
        """The slot of a table; "" where this is none."""
        return self.text.rpartition("@")[2] if self.is_slot else ""

    @property
    def is_slot(self) -> bool:
        """Whether this is a slot of a table, its ids included."""
        return self.group == "sparse" or (self.group == "sparse_opt" and self.text != SPARSE_OPTIM)


def slot_name(table: str, slot: str) -> Name:
    """Return the name of a slot of a table; its group is ``sparse_opt`` where the sparse optimizer owns it."""
    return Name("sparse_opt" if is_optimizer_slot(slot) else "sparse", f"{table}@{slot}")


@dataclass(frozen=True)
class Pattern:
    """A group, a name, or a name in which ``*`` stands for any run of characters.

    The name of a table means all of its slots. A group's name means the group, whatever else may be called so.
    """

    text: str

    @property
    def is_group(self) -> bool:
        """Whether this names a group."""
        return self.text in GROUPS

    @property
    def is_explicit(self) -> bool:
        """Whether this names one thing, so that its absence is an error."""
        return "*" not in self.text and not self.is_group

    @property
    def is_everything(self) -> bool:
        """Whether there is no name that this does not match."""
        return not self.text.strip("*")

    def matches(self, name: Name) -> bool:
        """Say whether a name is meant."""
        if self.is_group:
            return name.group == self.text
        if self.is_explicit:
            return self.text in (name.text, name.table)
        if name.is_slot and self._regex.fullmatch(name.table):
            return True
        # The ids of all tables end in "id", which nobody means who writes "user_*id".
        return (name.slot != ID or "@" in self.text) and bool(self._regex.fullmatch(name.text))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return star_regex(self.text)


@lru_cache(maxsize=4096)
def star_regex(text: str, *, lazy: bool = False) -> re.Pattern[str]:
    """Return a regular expression in which each ``*`` is a group that matches any run of characters.

    Args:
        text: a name with stars.
        lazy: whether the first stars match as little as they can, in place of as much.
    """
    run = "(.*?)" if lazy else "(.*)"
    return re.compile(run.join(re.escape(piece) for piece in text.split("*")), re.DOTALL)
