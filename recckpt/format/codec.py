"""JSON files: sealed with their own checksum, parsed strictly, and decoded into typed records with bounds."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import xxhash
from msgspec import Meta

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout

MAX_DEPTH = 16  # part of the format
COUNT_LIMIT = 10**18  # part of the format: all counts are below this limit, so that the next number is also valid
CHECKSUM = "xxh3_64"  # part of the format
READER = "1.0"  # part of the format: the oldest version of recckpt that can read what this version writes
MAX_DIGITS = 40  # part of the format, for numbers; counts have at most 18; Python may take a day for a million digits
_SUM = re.compile(r"[0-9a-f]{16}")
_SUMS = re.compile(r"[0-9a-f]{16}(?:,[0-9a-f]{16})*")
_NO_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"\[\]{}]+', re.DOTALL)  # a string, closed or not, or text
_NO_FRAMING = bytes(set(range(256)) - set(b'"[]{}'))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RELEASE = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}")
_SEAL = re.compile(rb',\n  "(\w+)": "([0-9a-f]{16})"\n}\n')  # part of the format
_SEAL_BYTES = len(b',\n  "": "0123456789abcdef"\n}\n')
_STEPS = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")  # the steps of a path of msgspec, which does not name keys
_OF_SHARD = ("save_id", "shard", "shards")
_dumps = json.JSONEncoder(allow_nan=False).encode
_T = TypeVar("_T")
_R = TypeVar("_R", bound="JsonRecord")

Count = Annotated[int, Meta(ge=0, lt=COUNT_LIMIT)]
PositiveCount = Annotated[int, Meta(ge=1, lt=COUNT_LIMIT)]
HighestCount = Annotated[int, Meta(ge=-1, lt=COUNT_LIMIT)]  # the highest of several counts; -1 if there are none
Number = Annotated[float, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Bucket = Annotated[int, Meta(ge=0, le=65536)]
IdRange = tuple[_Id, _Id]  # the least and the greatest, both included
Buckets = tuple[_Bucket, _Bucket]  # [begin, end)
Scalar = str | int | float | bool | None

if TYPE_CHECKING:  # for type checkers; in JSON they are strings of a given form
    Checksum = int
    CkptId = str
    FileName = str
else:

    class _Plain(type):
        def __instancecheck__(cls, value: object) -> bool:
            return True

    class Checksum(metaclass=_Plain):
        pass

    class CkptId(metaclass=_Plain):
        pass

    class FileName(metaclass=_Plain):
        """A name that does not lead out of the checkpoint."""


class JsonRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a JSON object. Fields equal to their default are not written; unknown fields are ignored."""

    def but(self: _R, **changes: Any) -> _R:
        return msgspec.structs.replace(self, **changes)


class _UnfitError(ValueError):
    """A string does not have the required form; args: found, expected."""


@dataclass(frozen=True)
class FileKind:
    format: str
    version: int
    seal: str  # the field with its checksum; "" if another file has the checksum
    max_bytes: int

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """Return a file with one field per line; the last field is the checksum of all bytes before it."""
        return seal({"format": self.format, "version": self.version, "reader": READER, **fields}, self.seal)

    def open(self, data: bytes, path: str) -> Document:
        """Return the JSON object of a file.

        Raises CorruptCheckpointError if the file is damaged or of another kind, FormatVersionError if a newer version
        wrote it. The version is checked before the seal, because a newer version may seal in another way.
        """
        if len(data) > self.max_bytes:
            raise CorruptCheckpointError(path, "its size", found=f"over {self.max_bytes} bytes", expected="less")
        document = parse(data, path)
        if (name := document.text("format")) != self.format:
            raise document.wrong("format", name, self.format)
        if (version := document.count("version")) > self.version:
            raise document.newer(version, self.version)
        if (algorithm := document.values.get("checksum", CHECKSUM)) != CHECKSUM:
            raise document.wrong("checksum", f"unknown algorithm {algorithm!r}", CHECKSUM)
        if self.seal:
            check_seal(data, self.seal, path)
        return document


def seal(values: Mapping[str, Any], key: str) -> bytes:
    """Return a JSON object with one field per line; the last field, ``key``, is the checksum of all bytes before it."""
    body = ("{\n" + ",\n".join(f"  {_dumps(name)}: {_lines(value)}" for name, value in values.items())).encode()
    return body + b',\n  "%s": "%016x"\n}\n' % (key.encode(), xxhash.xxh3_64_intdigest(body))


def check_seal(data: bytes, key: str, path: str) -> None:
    """Raise CorruptCheckpointError if the checksum ``key`` at the end of a file does not match the rest of the file."""
    size = _SEAL_BYTES + len(key)
    match = _SEAL.fullmatch(data[-size:])
    if match is None or match[1] != key.encode():
        ending, expected = f"a file ending in {data[-20:]!r}", f"its own checksum, {key}"
        raise CorruptCheckpointError(path, "its end", found=ending, expected=expected)
    digest = xxhash.xxh3_64_intdigest(data[:-size])
    if digest != int(match[2], 16):
        raise CorruptCheckpointError(path, key, found=f"{digest:016x}", expected=match[2].decode())


def parse(data: bytes, path: str) -> Document:
    """Return the JSON object in ``data``.

    Raises CorruptCheckpointError for other JSON and other bytes, NaN, a duplicate key, deep nesting, and text that
    UTF-8 cannot encode.
    """
    try:
        text, framing = data.decode("utf-8"), data
        if b"\\" not in data:  # then quotes come in pairs, because no string contains one
            framing = data.translate(None, _NO_FRAMING).replace(b'""', b"")
        steps = (1 if bracket in b"[{" else -1 for bracket in _NO_BRACKETS.sub(b"", framing))
        if any(depth > MAX_DEPTH for depth in accumulate(steps)):  # before the recursive parser runs
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short,
        )
        if _SURROGATE.search(data):  # an emoji has two; half of one cannot be encoded as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error!s:.200})"
        raise CorruptCheckpointError(path, "", found=found, expected="a JSON object") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(path, "", found=type(value).__name__, expected="a JSON object")
    return Document(value, path, data)


class Document:
    """A parsed JSON object, which raises errors about ``path``, the file that it was read from."""

    def __init__(self, values: dict[str, Any], path: str, data: bytes) -> None:
        self.values, self.path, self._data = values, path, data

    def read(self, kind: type[_T], key: str = "") -> _T:
        """Return the record in this object, or in its field ``key``.

        CorruptCheckpointError names the field that is missing or wrong. An intact file without a field has an older
        format: FormatVersionError.
        """
        if key and key not in self.values:
            raise self.absent(key)
        values = self.values[key] if key else self.values
        try:
            return msgspec.convert(values, kind, dec_hook=self._parsed)
        except msgspec.ValidationError as error:
            raise self._refused(error, values, kind, key) from error

    def text(self, key: str) -> str:
        return self.read(str, key)

    def count(self, key: str) -> int:
        return self.read(Count, key)

    def wrong(self, where: str, found: object, expected: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path, where, found=str(found)[:200], expected=expected)

    def newer(self, found: object, supported: int) -> FormatVersionError:
        least = _RELEASE.fullmatch(str(self.values.get("reader")))
        return FormatVersionError(self.path, found=found, supported=supported, reader=least[0] if least else "")

    def absent(self, where: str) -> CorruptCheckpointError | FormatVersionError:
        if "." not in where and {"format", "version"} <= self.values.keys():
            match = _SEAL.fullmatch(self._data, max(0, self._data.rfind(b",\n")))
            # The checksum holds, so the field is not missing because of damage.
            if match is not None and xxhash.xxh3_64_intdigest(self._data[: match.start()]) == self.xxh3:
                return FormatVersionError(self.path, found=0, supported=1, missing=where)
        return self.wrong(where, "no such field", "this field")

    @property
    def xxh3(self) -> int:
        return int(self._data[-20:-4], 16)

    def _parsed(self, kind: type, value: object) -> object:
        if kind is Checksum:
            if not isinstance(value, str) or not _SUM.fullmatch(value):
                raise _UnfitError(repr(value), "16 hex digits")
            return int(value, 16)
        if not isinstance(value, str):
            raise _UnfitError(repr(value), "a string")
        if kind is FileName:
            return layout.checked_name(value, self.path)
        try:
            layout.encode_id(value)
        except ValueError as error:
            raise _UnfitError(str(error), "a checkpoint id") from error
        return value

    def _refused(
        self, error: msgspec.ValidationError, value: Any, kind: type, where: str
    ) -> CorruptCheckpointError | FormatVersionError:
        text, _, steps = str(error).partition(" - at `$")
        root = value
        for name, number in _STEPS.findall(steps):
            key = self._first_unfit(value, root, kind, str(error)) if number == "..." else name or int(number)
            where = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".removeprefix(".")
            value = value[key]
        if (absent := re.fullmatch(r"Object missing required field `(\w+)`", text)) is not None:
            return self.absent(f"{where}.{absent[1]}".removeprefix("."))
        if isinstance(error.__cause__, _UnfitError):
            return self.wrong(where, *error.__cause__.args)
        expected = text.removeprefix("Expected ").partition(", got")[0].replace("`", "")
        return self.wrong(where, repr(value), expected if "Expected" in text else "a number that a double can hold")

    def _first_unfit(self, values: dict[str, Any], root: object, kind: type, message: str) -> str:
        """Return the first key of an object whose value is invalid; values are decoded in order."""
        items = list(values.items())

        def is_refused(n_items: int) -> bool:
            values.clear()
            values.update(items[:n_items])
            try:
                msgspec.convert(root, kind, dec_hook=self._parsed)
            except msgspec.ValidationError as error:
                return str(error) == message
            return False

        number = bisect_left(range(1, len(items)), True, key=is_refused)
        values.update(items)
        return items[number][0]


@cache
def _has_sums(kind: Any) -> bool:
    if isinstance(kind, type) and (issubclass(kind, JsonRecord) or is_dataclass(kind)):
        return bool(_fields_with_sums(kind))
    return kind is Checksum or any(map(_has_sums, get_args(kind)))


@cache
def _fields_with_sums(kind: type) -> list[tuple[str, str]]:
    """Return (name, name in JSON) of the fields that may contain checksums."""
    is_record = issubclass(kind, JsonRecord)
    keys = {field.name: field.encode_name for field in msgspec.structs.fields(kind)} if is_record else {}
    return [(name, keys.get(name, name)) for name, of in get_type_hints(kind).items() if _has_sums(of)]


def plain(value: Any) -> Any:
    """Return the JSON of a record, without fields equal to their default, and with checksums as hex digits."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, int):  # a checksum
        return f"{value:016x}"
    json_value = msgspec.to_builtins(value)
    kind: type = type(value)
    for name, key in _fields_with_sums(kind):
        if json_value.get(key) is not None:
            json_value[key] = plain(getattr(value, name))
    return json_value


def sums_of(texts: Mapping[str, str]) -> dict[str, int] | None:
    together = ",".join(texts.values())
    if texts and not (len(together) == 17 * len(texts) - 1 and _SUMS.fullmatch(together)):
        return None  # otherwise no string contains a comma
    return {key: int(text, 16) for key, text in texts.items()}


Shard = tuple[str, int, int]  # save id, number of the shard, number of shards


def encode_of_shard(kind: FileKind, shard: Shard, key: str, entries: Iterable[str], **more: object) -> bytes:
    """Return a file of one shard: a head, and the list ``key`` with one JSON entry per line."""
    head = {
        "format": kind.format,
        "version": kind.version,
        "reader": READER,
        **dict(zip(_OF_SHARD, shard, strict=True)),
        **more,
    }
    lines = ",\n".join(entries)
    return f'{json.dumps(head)[:-1]}, "{key}": [\n{lines}\n]}}\n'.encode()


def open_of_shard(data: bytes, path: str, kind: FileKind, shard: Shard) -> Document:
    """Return the document of a shard's file after checking its kind, shard and save."""
    document = kind.open(data, path)
    if (found := (document.text("save_id"), document.count("shard"), document.count("shards"))) != shard:
        raise document.wrong(", ".join(_OF_SHARD), found, shard)
    return document


def first_repeat(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def time_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def time_of(text: object) -> datetime | None:
    """Return a datetime with its time zone, UTC by default; None if the text is not a time."""
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))  # Python 3.10 does not parse Z
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"duplicate key {first_repeat(key for key, _ in pairs)!r}")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(_dumps(item) for item in value) + "\n  ]"
    return _dumps(value)
