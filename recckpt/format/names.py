"""Names of the contents of a checkpoint: table slots, tensors, registered objects; and patterns of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import NamedTuple

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import is_optimizer_slot

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "dense_opt", "io_state", "global_step")
ID = "id"
GLOBAL_STEP = "global_step"
_POSITIONS = ("train_window_io", "eval_window_io", "train_epoch")  # objects that RecIS treats as positions
_END = translate("")[-2:]  # end of the text, as this Python writes it in regular expressions
WILDCARD = re.compile(r"\*|\?|\[(?:!.|[^!])[^\]]*\]", re.DOTALL)


class Name(NamedTuple("Name", [("group", str), ("text", str)])):  # a tuple: loads look names up 50 times per table
    """The name of one thing that can be loaded.

    ``text`` is ``table@slot``, ``parameter@optimizer`` in the group ``dense_opt``, or the name of a tensor or
    registered object.
    """

    @cached_property
    def table(self) -> str:
        return self.text.rpartition("@")[0] if self.is_slot else ""

    @cached_property
    def slot(self) -> str:
        return self.text.rpartition("@")[2] if self.is_slot else ""

    @property
    def is_slot(self) -> bool:
        return self.group == "sparse" or (self.group == "sparse_opt" and self.text != SPARSE_OPTIM)

    @cached_property
    def parameter(self) -> str:
        """The parameter whose state in a dense optimizer this names; "" for everything else."""
        return self.text.rpartition("@")[0] if self.group == "dense_opt" else ""

    @property
    def optimizer(self) -> str:
        return self.text.rpartition("@")[2]

    @property
    def is_settings(self) -> bool:
        if self.group == "sparse_opt":
            return self.text == SPARSE_OPTIM
        return self.group == "dense_opt" and not self.parameter

    @property
    def is_object(self) -> bool:
        return self.group in ("extra", "io_state") or (self.group == "dense_opt" and not self.parameter)

    @property
    def is_position(self) -> bool:
        return self.group == "io_state" or (self.group == "extra" and self.text in _POSITIONS)

    @property
    def is_of_training(self) -> bool:
        """Whether only training needs this: optimizer state, a registered object, or a position in the data."""
        return self.group in ("sparse_opt", "dense_opt", "extra", "io_state")

    def is_in(self, group: str) -> bool:
        """Return whether a group has this name. Dense optimizers and some positions are also registered objects."""
        others = {"extra": self.group == "dense_opt", "io_state": self.is_position}
        return self.group == group or others.get(group, False)


def state_name(parameter: str, optimizer: str) -> Name:
    return Name("dense_opt", f"{parameter}@{optimizer}")


def slot_name(table: str, slot: str) -> Name:
    """Return the name of a slot of a table; its group is ``sparse_opt`` if the sparse optimizer owns it."""
    return Name("sparse_opt" if is_optimizer_slot(slot) else "sparse", f"{table}@{slot}")


@dataclass(frozen=True)
class Pattern:
    """A group, a name, or a pattern of names as in :mod:`fnmatch`, but case-sensitive.

    The name of a table matches all of its slots. A group's name always means the group. A pattern also matches the
    name that is spelled exactly like the pattern.
    """

    text: str

    @property
    def is_group(self) -> bool:
        return self.text in GROUPS

    @property
    def is_explicit(self) -> bool:
        """Whether this is a single name, so that its absence is an error."""
        return not WILDCARD.search(self.text) and not self.is_group

    @property
    def is_everything(self) -> bool:
        return not self.text.strip("*")

    def matches(self, name: Name) -> bool:
        if self.is_group:
            return name.is_in(self.text)
        if self.text in (name.text, name.table) or self.is_explicit:
            return self.text in (name.text, name.table)
        regex = wildcard_regex(self.text)
        if name.is_slot and regex.fullmatch(name.table):
            return True
        # All names of ids end in "id", but "user_*id" must not match them.
        return (name.slot != ID or "@" in self.text) and bool(regex.fullmatch(name.text))


@lru_cache(maxsize=4096)
def wildcard_regex(text: str, *, lazy: bool = False) -> re.Pattern[str]:
    """Return a regular expression that matches as :mod:`fnmatch` does, with a group for each wildcard.

    With ``lazy`` the first stars match as little as possible, otherwise as much.
    """
    run = "(.*?)" if lazy else "(.*)"
    simple = {"*": run, "?": "(.)"}  # fnmatch makes of a [...] whose end is before its begin a pattern without matches
    groups = [simple.get(sign) or f"({translate(sign).removesuffix(_END)})" for sign in WILDCARD.findall(text)]
    names = [re.escape(piece) for piece in WILDCARD.split(text)]
    return re.compile("".join(map("".join, zip_longest(names, groups, fillvalue=""))), re.DOTALL)
