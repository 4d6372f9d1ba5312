"""Conditions of rows and tensors as people type them: parsed here, and nothing in them is run as code."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

SYNTAX = (
    "what has to hold of one row or tensor: 'not finite', 'norm>100', 'max>1e4', 'count<2'; table=, tensor=, slot= and "
    "id= say which; all parts have to hold"
)
NOT_FINITE, NORM, MAX = "not finite", "norm", "max"
OF_TENSORS = (NOT_FINITE, NORM, MAX)  # what a tensor has too; all else is a slot of a table

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_PART = re.compile(
    r"(?P<negated>not\s+)?(?P<finite>finite)(?![\w.=<>!])"
    r"|(?P<name>[\w.@-]+)\s*(?P<compare>>=|<=|!=|==|=|>|<)\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s,]+)"
)
_BETWEEN = re.compile(r"(?:\s|,|\band\b)*")
_PLACES = ("table", "tensor", "slot", "id")


@dataclass(frozen=True)
class Compared:
    """A number of a row or tensor, compared with another.

    Attributes:
        name: ``"norm"``; ``"max"``: the largest absolute value; ``"not finite"``: how many values are NaN or infinite;
            or a slot of one number.
        sign: such as ``">"``.
        number: the other side.
    """

    name: str
    sign: str
    number: float

    def holds(self, values: Any) -> Any:
        """Compare a number, or an array of them; NaN meets nothing but ``!=``."""
        return _COMPARE[self.sign](values, self.number)


@dataclass(frozen=True)
class Condition:
    """What has to hold of one row or tensor.

    Attributes:
        text: as it was typed.
        comparisons: all of these; () where it is enough that the row or tensor is there.
        table: name of the tables that are meant, as a pattern with ``*`` and ``?``; None for all.
        tensor: the same of dense tensors.
        slot: the same of slots: their values count as one vector. None for the embedding, and for all slots where
            values are not finite.
        id: the only row that is meant; None for all.
    """

    text: str
    comparisons: tuple[Compared, ...] = field(default=())
    table: str | None = None
    tensor: str | None = None
    slot: str | None = None
    id: int | None = None

    @property
    def is_of_rows(self) -> bool:
        """Whether rows may meet it."""
        return self.tensor is None

    @property
    def is_of_tensors(self) -> bool:
        """Whether dense tensors may meet it."""
        is_of_rows = self.table is not None or self.slot is not None or self.id is not None
        return not is_of_rows and all(each.name in OF_TENSORS for each in self.comparisons)

    @property
    def slots(self) -> list[str]:
        """The slots of one number that are compared."""
        return list(dict.fromkeys(each.name for each in self.comparisons if each.name not in OF_TENSORS))

    def means(self, kind: str, name: str) -> bool:
        """Say whether a ``"table"``, ``"tensor"`` or ``"slot"`` of this name is meant."""
        pattern: str | None = getattr(self, kind)
        return pattern is None or pattern == name or fnmatchcase(name, pattern)


def parse_condition(text: str) -> Condition:
    """Return a condition, such as ``"not finite"`` or ``"table=item norm>100 count>=5"``.

    Raises:
        ValueError: it is not one; says where.
    """
    comparisons: list[Compared] = []
    places: dict[str, str] = {}
    at = _end(_BETWEEN, text, 0)
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise ValueError(f"found {text[at : at + 40]!r} in the condition {text!r}, expected {SYNTAX}")
        if match["finite"]:
            comparisons.append(Compared(NOT_FINITE, ">" if match["negated"] else "=", 0.0))
        elif match["name"] in _PLACES:
            _add_place(places, match, text)
        else:
            comparisons.append(Compared(match["name"], match["compare"], _number(match["value"], text)))
        at = _end(_BETWEEN, text, match.end())
    if not comparisons and not places:
        raise ValueError(f"found an empty condition, expected {SYNTAX}")
    return _checked(Condition(text, tuple(comparisons), **_typed(places, text)))


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    match = pattern.match(text, begin)
    return begin if match is None else match.end()


def _add_place(places: dict[str, str], match: re.Match[str], text: str) -> None:
    name, value = match["name"], match["value"].strip("'\"")
    if match["compare"] not in ("=", "=="):
        raise ValueError(f"found {match[0]!r} in the condition {text!r}, expected {name}=NAME")
    if name in places:
        raise ValueError(f"found {name}= twice in the condition {text!r}, expected it once: use a pattern such as 'a*'")
    places[name] = value


def _typed(places: Mapping[str, str], text: str) -> dict[str, Any]:
    if "id" not in places:
        return dict(places)
    try:
        id_ = int(places["id"])
        if not -(2**63) <= id_ < 2**63:
            raise ValueError
    except ValueError:
        raise ValueError(f"found id={places['id']} in the condition {text!r}, expected an int64") from None
    return {**places, "id": id_}


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(
            f"found {value!r} in the condition {text!r}, expected a number; what is NaN or infinite is 'not finite'"
        )
    return number


def _checked(condition: Condition) -> Condition:
    rows = [f"{name}=" for name in ("table", "slot", "id") if getattr(condition, name) is not None] + condition.slots
    if condition.tensor is not None and rows:
        raise ValueError(
            f"found tensor= and {rows[0]} in the condition {condition.text!r}, expected either: no tensor has rows"
        )
    return condition
