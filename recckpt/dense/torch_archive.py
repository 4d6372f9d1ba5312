"""The zip that torch.save makes: a pickle, and the bytes of tensors in records, written one by one (no torch here)."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from recckpt.storage import HashingSink, Sink

ROOT = "archive"
_ALIGNMENT = 64  # of tensors in the file, so that it can be mapped
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_PADDING_ID = 0x4246  # torch's own
_LARGE_BYTES = 1 << 30  # from here on an entry has sizes of 64 bits; well below the 2 GiB where it must
_STEP_BYTES = 4 << 20


class Contents(NamedTuple):
    """What goes into a file.

    Attributes:
        pickle: the state, in which tensors refer to records by number.
        records: the bytes of their storages.
    """

    pickle: bytes
    records: Iterable[memoryview]


def write_archive(
    sink: Sink | HashingSink, contents: Contents, proceed: Callable[[], None] = lambda: None
) -> list[int]:
    """Write a file that ``torch.load(weights_only=True)`` reads; the same contents make the same bytes.

    Args:
        sink: takes the bytes.
        contents: of the file.
        proceed: called before every few megabytes; raises where the work is to be dropped.

    Returns:
        The first byte of each record, a multiple of 64.
    """
    with zipfile.ZipFile(_Stream(sink), "w", zipfile.ZIP_STORED) as archive:
        _add(archive, sink, "data.pkl", memoryview(contents.pickle), proceed)
        _add(archive, sink, "byteorder", memoryview(sys.byteorder.encode()), proceed)
        places = [
            _add(archive, sink, f"data/{number}", record, proceed) for number, record in enumerate(contents.records)
        ]
        _add(archive, sink, "version", memoryview(b"3\n"), proceed)
    return places


def _add(
    archive: zipfile.ZipFile, sink: Sink | HashingSink, name: str, data: memoryview, proceed: Callable[[], None]
) -> int:
    entry = zipfile.ZipInfo(f"{ROOT}/{name}")  # dated 1980
    large = len(data) >= _LARGE_BYTES
    begin = sink.n_bytes + _HEADER_BYTES + len(entry.filename) + 4 + (_ZIP64_BYTES if large else 0)
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=large) as file:
        at = sink.n_bytes
        for start in range(0, len(data), _STEP_BYTES):
            proceed()
            file.write(data[start : start + _STEP_BYTES])
    return at


class _Stream(io.RawIOBase):
    """A sink as a file that can only be appended to."""

    def __init__(self, sink: Sink | HashingSink) -> None:
        self._sink = sink

    def write(self, data: Any) -> int:
        return self._sink.write(data)
