"""A request to forget ids: durable before anything is removed, and kept until all is done (docs/format.md, 14)."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.errors import CorruptCheckpointError
from recckpt.format.json_fields import check_seal, parse, seal

FORMAT = "recckpt-forget"  # part of the format
VERSION = 1  # part of the format
MAX_IDS = 1 << 26  # part of the format
MAX_BYTES = 1 << 30  # part of the format
_SEAL = "request_xxh3"  # part of the format


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be forgotten, and who asked for it."""

    request: str  # 32 hex digits that no other has
    table: str
    ids: npt.NDArray[np.int64]  # ascending, all different
    asked: str  # when, UTC
    by: str  # the command or method
    version: str  # of recckpt


def encode(request: Request) -> bytes:
    """Return the bytes of a request's file."""
    ids = base64.b64encode(request.ids.astype("<i8").tobytes()).decode()
    values = {"asked": request.asked, "by": request.by, "writer": request.version, "table": request.table, "ids": ids}
    return seal({"format": FORMAT, "version": VERSION, "request": request.request, **values}, _SEAL)


def decode(data: bytes, path: str) -> Request:
    """Return the request in ``data``.

    Raises CorruptCheckpointError where it is not a whole one, FormatVersionError where a newer format wrote it.
    """
    fields = parse(data, path)
    fields.check_format(FORMAT, VERSION)
    check_seal(data, _SEAL, path)
    try:
        ids = np.frombuffer(base64.b64decode(fields.text("ids"), validate=True), "<i8").astype(np.int64)
    except (binascii.Error, ValueError) as error:
        raise CorruptCheckpointError(
            path, "ids", found=f"no list of ids ({error})", expected="int64 in base64"
        ) from error
    who = fields.text("asked"), fields.text("by"), fields.text("writer")
    return Request(fields.text("request"), fields.text("table"), ids, *who)
