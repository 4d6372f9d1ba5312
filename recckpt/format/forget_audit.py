"""The audit of what was forgotten: a line a request, sealed together with all lines before it (docs/format.md, 14)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from recckpt.errors import CorruptCheckpointError

_SEAL = re.compile(rb', "line_xxh3": "([0-9a-f]{16})"}')  # part of the format
_SEAL_BYTES = len(b', "line_xxh3": "0123456789abcdef"}')
_REMEDY = "move the file away, and keep it: it says what was forgotten"


def encode_line(values: Mapping[str, Any], before: bytes) -> bytes:
    """Return a line with these fields, to follow the bytes ``before``."""
    body = json.dumps(values, allow_nan=False).encode().removesuffix(b"}")
    return body + b', "line_xxh3": "%016x"}\n' % xxhash.xxh3_64_intdigest(before + body)


def decode(data: bytes, path: str) -> list[dict[str, Any]]:
    """Return the lines; CorruptCheckpointError where one is cut, changed, missing or not of this format."""
    lines, so_far = [], xxhash.xxh3_64()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        seal = _SEAL.fullmatch(line[-_SEAL_BYTES:])
        if seal is None:
            raise _damaged(path, number, f"a line ending in {line[-20:]!r}", "its own checksum, line_xxh3")
        body = line[:-_SEAL_BYTES]
        so_far.update(body)
        if so_far.intdigest() != int(seal[1], 16):
            seal_text = seal[1].decode()
            raise _damaged(path, number, so_far.hexdigest(), f"{seal_text}: this line, or one before, was changed")
        so_far.update(seal[0] + b"\n")
        lines.append(_object(line, path, number))
    if data and not data.endswith(b"\n"):
        raise _damaged(path, len(lines) + 1, "a line that is cut", "JSON objects, one a line")
    return lines


def _object(line: bytes, path: str, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise _damaged(path, number, str(error), "a JSON object") from error
    if not isinstance(values, dict):
        raise _damaged(path, number, type(values).__name__, "a JSON object")
    return values


def _damaged(path: str, number: int, found: str, expected: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(path, f"line {number}", found=found, expected=expected, remedy=_REMEDY)
