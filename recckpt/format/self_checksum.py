"""JSON files that end with a checksum of themselves, so that a changed byte is always seen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from recckpt.errors import CorruptCheckpointError

_SEAL = re.compile(rb',\n  "(\w+)": "([0-9a-f]{16})"\n}\n')  # part of the format
_VALUE_BYTES = len(b',\n  "": "0123456789abcdef"\n}\n')


def seal(values: Mapping[str, Any], key: str) -> bytes:
    """Return a JSON object, one field a line, whose last field ``key`` is the checksum of all before it."""
    body = ("{\n" + ",\n".join(f"  {_dumps(name)}: {_lines(value)}" for name, value in values.items())).encode()
    return body + b',\n  "%s": "%016x"\n}\n' % (key.encode(), xxhash.xxh3_64_intdigest(body))


def check_seal(data: bytes, key: str, path: str) -> None:
    """Refuse a file that is not as it was written.

    Raises:
        CorruptCheckpointError: the checksum ``key`` is not at the end, or does not hold.
    """
    size = _VALUE_BYTES + len(key)
    found = _SEAL.fullmatch(data[-size:])
    if found is None or found[1] != key.encode():
        ending, expected = f"a file ending in {data[-20:]!r}", f"its own checksum, {key}"
        raise CorruptCheckpointError(path, "its end", found=ending, expected=expected)
    digest = xxhash.xxh3_64_intdigest(data[:-size])
    if digest != int(found[2], 16):
        raise CorruptCheckpointError(path, key, found=f"{digest:016x}", expected=found[2].decode())


def _lines(value: Any) -> str:
    """One list item a line: these files are read by people too."""
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(_dumps(item) for item in value) + "\n  ]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=True)
