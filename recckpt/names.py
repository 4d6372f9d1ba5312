"""What can be selected of a checkpoint, by name: table slots, tensors, registered objects, groups of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from recckpt.types import is_optimizer_slot

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "io_state", "global_step")
ID = "id"
SPARSE_OPTIM = "sparse_optim"  # part of the format: the name in extra.pt of the sparse optimizer's scalars
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

    @property
    def table(self) -> str:
        """The table of a slot; "" where this is none."""
        return self.text.rpartition("@")[0] if self.is_slot else ""

    @property
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

    Without ``@`` it means tables as a whole, beside tensors and registered objects. A group's name means the group,
    whatever else may be called so.
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

    def matches(self, name: Name) -> bool:
        """Say whether a name is meant."""
        if self.is_group:
            return name.group == self.text
        if self._regex.fullmatch(name.text):
            return True
        return name.is_slot and "@" not in self.text and bool(self._regex.fullmatch(name.table))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return star_regex(self.text)


def star_regex(text: str) -> re.Pattern[str]:
    """Return a regular expression in which each ``*`` is a group that matches any run of characters."""
    return re.compile("(.*)".join(re.escape(piece) for piece in text.split("*")), re.DOTALL)
