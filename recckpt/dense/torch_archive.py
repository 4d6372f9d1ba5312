"""The zip that torch.save makes: a pickle, and the bytes of tensors in records, written one by one (no torch here)."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

from recckpt.storage import SinkFile

_ROOT = "archive"
_ALIGNMENT = 64  # of tensors in the file, so that it can be mapped
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_PADDING_ID = 0x4246  # torch's own
_LARGE_BYTES = 1 << 30  # from here on an entry has sizes of 64 bits; well below the 2 GiB where it must
_STEP_BYTES = 4 << 20


class ArchiveContents(NamedTuple):
    """What goes into a file: a pickle in which tensors refer to records by number, and the records."""

    pickle: bytes
    records: Iterable[memoryview]


def write_archive(to: SinkFile, contents: ArchiveContents, proceed: Callable[[], None] = lambda: None) -> list[int]:
    """Write a file that ``torch.load(weights_only=True)`` reads, and return the first byte of each record.

    The same contents make the same bytes. ``proceed`` is called before every few megabytes, and raises to stop the
    write.
    """
    with zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, to, "data.pkl", memoryview(contents.pickle), proceed)
        _add(archive, to, "byteorder", memoryview(sys.byteorder.encode()), proceed)
        places = [
            _add(archive, to, f"data/{number}", record, proceed) for number, record in enumerate(contents.records)
        ]
        _add(archive, to, "version", memoryview(b"3\n"), proceed)
    return places


def _add(archive: zipfile.ZipFile, to: SinkFile, name: str, data: memoryview, proceed: Callable[[], None]) -> int:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")  # dated 1980
    large = len(data) >= _LARGE_BYTES
    begin = to.n_bytes + _HEADER_BYTES + len(entry.filename) + 4 + (_ZIP64_BYTES if large else 0)
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=large) as file:
        at = to.n_bytes
        for start in range(0, len(data), _STEP_BYTES):
            proceed()
            file.write(data[start : start + _STEP_BYTES])
    return at
