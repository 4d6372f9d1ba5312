"""Requests to forget ids, and the audit of completed requests (docs/format.md, section 14)."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import distinct
from recckpt.format.codec import FileKind

MAX_IDS = 1 << 26  # part of the format
MAX_BYTES = 1 << 30  # part of the format
KIND = FileKind("recckpt-forget", 1, "request_xxh3", MAX_BYTES)  # part of the format
_SEAL = re.compile(rb', "line_xxh3": "([0-9a-f]{16})"}')  # part of the format
_SEAL_BYTES = len(b', "line_xxh3": "0123456789abcdef"}')
_REMEDY = "move the file elsewhere and keep it: it lists what was forgotten"

Ids = npt.NDArray[np.int64]  # ascending, without duplicates


@dataclass(frozen=True, eq=False)
class Request:
    request: str  # 32 hex digits, unique
    table: str
    ids: Ids
    asked: str  # time of the request, UTC
    by: str  # the command or method
    version: str  # version of recckpt


def checked_ids(ids: Any) -> Ids:
    """Return the ids sorted and unique; TypeError or ValueError if the list is empty, too long, or not int64."""
    values = list(ids) if not isinstance(ids, np.ndarray) and isinstance(ids, Iterable) else ids
    if isinstance(values, list) and bool in set(map(type, values)):  # numpy would convert True to 1
        raise TypeError("expected ids that are int64, found bool")
    found = np.asarray(values)
    if found.ndim != 1 or not found.size:
        raise ValueError(f"expected at least one id to forget, found {'none' if not found.size else found.shape}")
    if found.dtype == np.dtype(object) or (found.dtype.kind == "u" and int(found.max()) >= 2**63):
        raise ValueError("expected int64 ids, found a value outside the range of int64, or not a number")
    if found.dtype.kind not in "iu":
        raise TypeError(f"expected ids that are int64, found {found.dtype}")
    if found.size > MAX_IDS:
        raise ValueError(f"expected at most {MAX_IDS} ids at once, found {found.size}: forget them in several calls")
    return distinct(found.astype(np.int64))


def encode_request(request: Request) -> bytes:
    ids = base64.b64encode(request.ids.astype("<i8").tobytes()).decode()
    who = {"request": request.request, "asked": request.asked, "by": request.by, "writer": request.version}
    return KIND.encode({**who, "table": request.table, "ids": ids})


def decode_request(data: bytes, path: str) -> Request:
    """Return the request in ``data``.

    Raises CorruptCheckpointError if the request is incomplete, FormatVersionError if a newer format wrote it.
    """
    document = KIND.open(data, path)
    try:
        ids = np.frombuffer(base64.b64decode(document.text("ids"), validate=True), "<i8").astype(np.int64)
    except (binascii.Error, ValueError) as error:
        raise document.wrong("ids", f"not a list of ids ({error})", "int64 in base64") from error
    asked, by, version = (document.text(key) for key in ("asked", "by", "writer"))
    return Request(document.text("request"), document.text("table"), ids, asked, by, version)


def encode_line(values: Mapping[str, Any], before: bytes) -> bytes:
    body = json.dumps(values, allow_nan=False).encode().removesuffix(b"}")
    return body + b', "line_xxh3": "%016x"}\n' % xxhash.xxh3_64_intdigest(before + body)


def decode_audit(data: bytes, path: str) -> list[dict[str, Any]]:
    """Return the lines; CorruptCheckpointError if a line is cut, changed or missing, or has another format."""

    def damaged(number: int, found: object, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(path, f"line {number}", found=found, expected=expected, remedy=_REMEDY)

    lines, so_far = [], xxhash.xxh3_64()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        seal = _SEAL.fullmatch(line[-_SEAL_BYTES:])
        if seal is None:
            raise damaged(number, f"a line ending in {line[-20:]!r}", "its own checksum, line_xxh3")
        so_far.update(line[:-_SEAL_BYTES])
        if so_far.intdigest() != int(seal[1], 16):
            raise damaged(number, so_far.hexdigest(), f"{seal[1].decode()}: this line, or an earlier one, was changed")
        so_far.update(seal[0] + b"\n")
        try:
            values = json.loads(line)
        except ValueError as error:
            raise damaged(number, error, "a JSON object") from error
        if not isinstance(values, dict):
            raise damaged(number, type(values).__name__, "a JSON object")
        lines.append(values)
    if data and not data.endswith(b"\n"):
        raise damaged(len(lines) + 1, "a line that is cut", "one JSON object per line")
    return lines
