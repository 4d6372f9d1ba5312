"""What a saver saves of its tables: which slots, which rows, in which dtypes; by patterns as in a ``load_conf``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recckpt.format.names import GROUPS, ID, Pattern
from recckpt.format.tables import FLOATS
from recckpt.policies.row_filter import RowFilter, parse_row_filter
from recckpt.text import nearest
from recckpt.types import EMBEDDING, is_list

_GROUPS = ("sparse", "sparse_opt")  # that slots of tables are in


@dataclass(frozen=True)
class Choose:
    """Which slots and rows of tables are saved, and how narrow; docs/save.md. By default all, as they are.

    Args:
        slots: patterns of the slots that are saved beside embeddings, such as ``"*@count"``; ``"!..."`` leaves out
            what matches; ``[]`` saves embeddings alone, None all slots.
        where: table or pattern -> conditions of the rows that are saved, as ``where`` of a ``load_conf``.
        store: slot or pattern -> a narrower dtype in which it is stored, such as ``{"*@*exp_avg*": "bfloat16"}``.

    Raises:
        TypeError, ValueError: an argument is not what it can be; says which.
    """

    slots: Sequence[str] | None = None
    where: Mapping[str, Any] | None = None
    store: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.patterns, self.row_filters, self.dtypes  # each refuses what it cannot parse

    @cached_property
    def patterns(self) -> tuple[tuple[Pattern, ...] | None, tuple[Pattern, ...]]:
        """The slots that are saved, None for all, and those that are left out of them."""
        if self.slots is None:
            return None, ()
        if not is_list(self.slots) or not all(isinstance(name, str) and name.removeprefix("!") for name in self.slots):
            raise TypeError(
                "Choose: slots must be a list of patterns such as ['*@count'] or ['!*@*exp_avg*'], [] for embeddings "
                f"alone, or None for all, found {self.slots!r:.200}"
            )
        kept = tuple(_pattern("slots", name) for name in self.slots if not name.startswith("!"))
        without = tuple(_pattern("slots", name[1:]) for name in self.slots if name.startswith("!"))
        for pattern in without:
            if pattern.text.rpartition("@")[2] in (ID, EMBEDDING) and "@" in pattern.text:
                raise ValueError(f"Choose: slots: found '!{pattern.text}', but ids and embeddings are always saved")
        return (None if without and not kept else kept), without

    @cached_property
    def row_filters(self) -> tuple[tuple[Pattern, RowFilter], ...]:
        """The conditions of rows, by tables."""
        named = _pairs("where", self.where)
        return tuple((_pattern("where", name), _row_filter(name, value)) for name, value in named)

    @cached_property
    def dtypes(self) -> tuple[tuple[Pattern, str], ...]:
        """The names of dtypes, by slots."""
        return tuple((_pattern("store", name), _dtype(name, value)) for name, value in _pairs("store", self.store))


def _pairs(what: str, value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise TypeError(f"Choose: {what} must be a dict, name or pattern -> what is said of it, found {value!r:.200}")
    return list(value.items())


def _pattern(what: str, text: str) -> Pattern:
    if text in GROUPS and text not in _GROUPS:
        raise ValueError(
            f"Choose: {what}: found the group {text!r}, expected {' or '.join(_GROUPS)}, or names of slots"
        )
    return Pattern(text)


def _row_filter(name: str, value: Any) -> RowFilter:
    try:
        return parse_row_filter(value)
    except ValueError as error:
        raise ValueError(f"Choose: where[{name!r}]: {error}") from error


def _dtype(name: str, dtype: Any) -> str:
    text = str(dtype).removeprefix("torch.")
    if text not in FLOATS:
        expected = f"one of {', '.join(FLOATS)}{nearest(text, FLOATS)}"
        raise ValueError(f"Choose: store[{name!r}]: found {dtype!r:.100}, expected {expected}")
    return text
