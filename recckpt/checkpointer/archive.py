"""State as a ``.pt`` file: the zip that torch.save makes, written to a sink piece by piece (no torch here)."""

from __future__ import annotations

import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

from recckpt.storage import Sink, SinkFile

_ROOT = "archive"
_ALIGNMENT = 64  # of tensors in the file, so that it can be mapped
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_PADDING_ID = 0x4246  # torch's own
_LARGE_BYTES = 1 << 30  # from here on an entry has sizes of 64 bits; well below the 2 GiB where it must
_CHUNK_BYTES = 4 << 20


class Contents(NamedTuple):
    """What goes into a file.

    Attributes:
        pickle: the state, in which tensors refer to pieces by number.
        pieces: the bytes of its storages.
    """

    pickle: bytes
    pieces: Iterable[memoryview]


def write_archive(sink: Sink, contents: Contents, proceed: Callable[[], None]) -> None:
    """Write a file that ``torch.load(weights_only=True)`` reads.

    Args:
        sink: takes the bytes.
        contents: of the file.
        proceed: called before every few megabytes; raises where the work is to be dropped.
    """
    with zipfile.ZipFile(SinkFile(sink), "w", zipfile.ZIP_STORED) as archive:
        _add(archive, sink, "data.pkl", memoryview(contents.pickle), proceed)
        _add(archive, sink, "byteorder", memoryview(sys.byteorder.encode()), proceed)
        for number, piece in enumerate(contents.pieces):
            _add(archive, sink, f"data/{number}", piece, proceed)
        _add(archive, sink, "version", memoryview(b"3\n"), proceed)


def _add(archive: zipfile.ZipFile, sink: Sink, name: str, data: memoryview, proceed: Callable[[], None]) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")  # dated 1980: the same state makes the same bytes
    large = len(data) >= _LARGE_BYTES
    begin = sink.n_bytes + _HEADER_BYTES + len(entry.filename) + 4 + (_ZIP64_BYTES if large else 0)
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=large) as file:
        for start in range(0, len(data), _CHUNK_BYTES):
            proceed()
            file.write(data[start : start + _CHUNK_BYTES])
