"""JSON files: sealed by a checksum of themselves, parsed strictly, and read field by field."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, TypeVar, cast

import xxhash

from recckpt.errors import CorruptCheckpointError, FormatVersionError

MAX_DEPTH = 16  # part of the format
COUNT_LIMIT = 10**18  # part of the format: all counts are below it, so that what comes next to one is a number, too
_MAX_DIGITS = 40  # counts have at most 18; Python may take a day for a million of them
_SUM = re.compile(r"[0-9a-f]{16}")
_SUMS = re.compile(r"[0-9a-f]{16}(?:,[0-9a-f]{16})*")
_NO_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"\[\]{}]+', re.DOTALL)  # a string, open it may be, or text
_NO_FRAMING = bytes(set(range(256)) - set(b'"[]{}'))
_SEAL = re.compile(rb',\n  "(\w+)": "([0-9a-f]{16})"\n}\n')  # part of the format
_SEAL_BYTES = len(b',\n  "": "0123456789abcdef"\n}\n')
_OF_SHARD = ("save_id", "shard", "shards")
_T = TypeVar("_T")


def seal(values: Mapping[str, Any], key: str) -> bytes:
    """Return a JSON object, one field a line, whose last field ``key`` is the checksum of all before it."""
    body = ("{\n" + ",\n".join(f"  {_dumps(name)}: {_lines(value)}" for name, value in values.items())).encode()
    return body + b',\n  "%s": "%016x"\n}\n' % (key.encode(), xxhash.xxh3_64_intdigest(body))


def check_seal(data: bytes, key: str, path: str) -> int:
    """Return the checksum ``key`` at the end of a file; CorruptCheckpointError if it is not that of the rest."""
    size = _SEAL_BYTES + len(key)
    match = _SEAL.fullmatch(data[-size:])
    if match is None or match[1] != key.encode():
        ending, expected = f"a file ending in {data[-20:]!r}", f"its own checksum, {key}"
        raise CorruptCheckpointError(path, "its end", found=ending, expected=expected)
    digest = xxhash.xxh3_64_intdigest(data[:-size])
    if digest != int(match[2], 16):
        raise CorruptCheckpointError(path, key, found=f"{digest:016x}", expected=match[2].decode())
    return digest


def parse(data: bytes, path: str) -> Fields:
    """Return the JSON object in ``data``.

    Raises CorruptCheckpointError for other JSON and other bytes, NaN, a duplicate key, and deep nesting.
    """
    try:
        text = data.decode("utf-8")
        _check_depth(data)
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short,
        )
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error!s:.200})"
        raise CorruptCheckpointError(path, "", found=found, expected="a JSON object") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(path, "", found=type(value).__name__, expected="a JSON object")
    return Fields(value, path)


Shard = tuple[str, int, int]  # of what: its save id, its number, how many shards there are


def encode_of_shard(kind: str, version: int, shard: Shard, key: str, entries: Iterable[str], **more: object) -> bytes:
    """Return a file of one shard: a head, and the list ``key`` with an entry of JSON a line."""
    head = {"format": kind, "version": version, **dict(zip(_OF_SHARD, shard, strict=True)), **more}
    lines = ",\n".join(entries)
    return f'{json.dumps(head)[:-1]}, "{key}": [\n{lines}\n]}}\n'.encode()


def parse_of_shard(data: bytes, path: str, kind: str, version: int, shard: Shard) -> Fields:
    """Return a file of one shard after checking that it is of this kind, and of this shard of this save."""
    fields = parse(data, path)
    fields.check_format(kind, version)
    found = (fields.text("save_id"), fields.count("shard"), fields.count("shards"))
    if found != shard:
        raise fields.wrong(", ".join(_OF_SHARD), str(found), str(shard))
    return fields


class Fields:
    """A JSON object whose fields are read with their type; CorruptCheckpointError for one of another type."""

    __slots__ = ("_inside", "_key", "_values", "path")

    def __init__(
        self, values: dict[str, Any], path: str, inside: Fields | None = None, key: str | tuple[str, int] = ""
    ) -> None:
        self._values, self.path, self._inside, self._key = values, path, inside, key

    def check_format(self, name: str, version: int) -> None:
        """Check the kind of the file, and raise FormatVersionError for a newer version; called first."""
        if self.text("format") != name:
            raise self.wrong("format", self.text("format"), name)
        if self.count("version") > version:
            raise FormatVersionError(self.path, found=self.count("version"), supported=version)

    def text(self, key: str) -> str:
        """Return a string field."""
        return self._get(key, str)

    def checksum(self, key: str) -> int:
        """Return the value of a field of 16 hex digits."""
        return self._number(key, self.text(key))

    def checksum_list(self, key: str) -> tuple[int, ...]:
        """Return the values of a field that is a list of 16 hex digits each."""
        return tuple(self._number(f"{key}[{i}]", text) for i, text in enumerate(self.texts(key)))

    def flag(self, key: str) -> bool:
        """Return a bool field."""
        return self._get(key, bool)

    def count(self, key: str, low: int = 0) -> int:
        """Return an int field of at least ``low``, below :data:`COUNT_LIMIT`."""
        value = self._get(key, int)
        if not low <= value < COUNT_LIMIT:
            raise self.wrong(key, repr(value), f"an int of at least {low}, below 10^18")
        return value

    def maybe_count(self, key: str) -> int | None:
        """Return an int field that may be null."""
        return None if self._values.get(key) is None else self.count(key)

    def number(self, key: str) -> float:
        """Return a field that is a number of at least 0."""
        value: Any = self._values.get(key)
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise self.wrong(key, repr(value), "a number of at least 0")
        return float(value)

    def counts(self, key: str, low: int = 0) -> tuple[int, ...]:
        """Return a field that is a list of ints."""
        values = self._get(key, list)
        for i, value in enumerate(values):
            if type(value) is not int or not low <= value < COUNT_LIMIT:
                raise self.wrong(f"{key}[{i}]", repr(value), f"an int of at least {low}, below 10^18")
        return tuple(values)

    def lists_of_counts(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Return a field that is a list of lists of ints."""
        lists = {f"{key}[{i}]": values for i, values in enumerate(self._get(key, list))}
        inside = Fields(lists, self.path, self._inside, self._key)
        return tuple(inside.counts(name) for name in lists)

    def buckets(self) -> tuple[int, int]:
        """Return the field ``buckets``: [begin, end) within 0 to 65,536."""
        values = self.counts("buckets")
        if len(values) != 2 or not values[0] <= values[1] <= 65536:
            raise self.wrong("buckets", str(values), "[begin, end) within 0 to 65536")
        return values[0], values[1]

    def id_range(self, key: str) -> tuple[int, int]:
        """Return a field that is the least and the greatest of some ids."""
        values = self._get(key, list)
        if len(values) != 2 or {*map(type, values)} != {int} or not -(2**63) <= values[0] <= values[1] < 2**63:
            raise self.wrong(key, str(values), "[least, greatest], which are int64")
        return values[0], values[1]

    def id_ranges(self, key: str) -> dict[str, tuple[int, int]]:
        """Return a field that is an object, name -> the least and the greatest of some ids."""
        inside = self.mapping(key)
        return {name: inside.id_range(name) for name in inside._values}

    def texts(self, key: str) -> list[str]:
        """Return a field that is a list of strings."""
        values = self._get(key, list)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.wrong(f"{key}[{i}]", repr(value), "a string")
        return cast(list[str], values)

    def named_texts(self, key: str) -> dict[str, tuple[str, ...]]:
        """Return a field that is an object of lists of strings."""
        inside = self.mapping(key)
        return {name: tuple(inside.texts(name)) for name in inside._values}

    def mapping(self, key: str) -> Fields:
        """Return a field that is an object."""
        return Fields(self._get(key, dict), self.path, self, key)

    def objects(self, key: str) -> list[Fields]:
        """Return a field that is a list of objects."""
        values = self._get(key, list)
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.wrong(f"{key}[{i}]", type(value).__name__, "an object")
        return [Fields(value, self.path, self, (key, i)) for i, value in enumerate(values)]

    def checksums(self) -> dict[str, int]:
        """Return an object all of whose fields are checksums."""
        values = self._values
        with suppress(TypeError):  # from a value that is not a string
            sums = ",".join(values.values())
            if len(sums) == 17 * len(values) - 1 and _SUMS.fullmatch(sums):  # no value has a comma in it then
                return {key: int(value, 16) for key, value in values.items()}
        return {key: self.checksum(key) for key in values}

    def scalars(self, key: str, *, is_nested: bool = False) -> dict[str, Any]:
        """Return a field that is an object of numbers, strings, bools and nulls, or of lists and objects of these."""
        values = self._get(key, dict)
        for name, value in values.items():
            if not (is_nested or isinstance(value, str | int | float | bool | None)):
                raise self.wrong(f"{key}.{name}", type(value).__name__, "a number, string, bool or null")
        return values

    def has(self, key: str) -> bool:
        """Say whether a field is there and not null."""
        return self._values.get(key) is not None

    def wrong(self, key: str, found: str, expected: str) -> CorruptCheckpointError:
        """Return the error for a wrong field."""
        return CorruptCheckpointError(self.path, self._place(key), found=found[:200], expected=expected)

    def _get(self, key: str, kind: type[_T]) -> _T:
        value = self._values.get(key)
        if type(value) is not kind:
            found = "no such field" if key not in self._values else repr(value)
            raise self.wrong(key, found, f"a field of type {kind.__name__}")
        return value

    def _number(self, key: str, text: str) -> int:
        if not _SUM.fullmatch(text):
            raise self.wrong(key, repr(text), "16 hex digits")
        return int(text, 16)

    @property
    def _where(self) -> str:
        if self._inside is None:
            return ""
        return self._inside._place(self._key if isinstance(self._key, str) else f"{self._key[0]}[{self._key[1]}]")

    def _place(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"duplicate key {first_repeat(key for key, _ in pairs)!r}")
    return values


def first_repeat(names: Iterable[str]) -> str | None:
    """Return the first name that occurs a second time, None if all differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _check_depth(data: bytes) -> None:
    """Refuse deep nesting before the parser recurses into it."""
    if b"\\" not in data:  # no string has a quote in it, so that quotes come in pairs
        data = data.translate(None, _NO_FRAMING).replace(b'""', b"")
    steps = (1 if bracket in b"[{" else -1 for bracket in _NO_BRACKETS.sub(b"", data))
    if any(depth > MAX_DEPTH for depth in accumulate(steps)):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _lines(value: Any) -> str:
    """Put each list item on a line of its own, for people."""
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(_dumps(item) for item in value) + "\n  ]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=True)
