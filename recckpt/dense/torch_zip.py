"""The zip that torch.save writes: its entries, and the bytes in them, checked as they are read (no torch here)."""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

from recckpt.dense.stored_tensor import StoredTensor
from recckpt.errors import CorruptCheckpointError

_CHUNK_BYTES = 1 << 22
_ENTRY_MAGIC, _ENTRY_HEADER_BYTES = b"PK\x03\x04", 30
_END_MAGIC, _END_BYTES = b"PK\x05\x06", 22
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled number that torch < 1.6 wrote first
_ENCRYPTED = 1


class TorchZip:
    """The entries of a file written by torch.save. Not thread-safe, for the position of ``file`` is shared.

    Args:
        file: open for reading, seekable; the caller closes it.
        path: what messages call it.

    Attributes:
        n_bytes: size of the file.

    Raises:
        CorruptCheckpointError: it is not such a file, or is damaged.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        file.seek(0, 2)
        self.n_bytes = file.tell()
        self._check_ends()
        self._entries = self._list_entries()
        self._root = next(iter(self._entries), "").partition("/")[0]
        self._check_byteorder()

    def read(self, name: str, *, most: int) -> bytes:
        """Return a whole entry of at most ``most`` bytes."""
        entry = self._entry(name, name)
        if entry.file_size > most:
            raise self._corrupt(name, f"{entry.file_size} bytes", f"at most {most}")
        data = np.empty(entry.file_size, np.uint8)
        self._fill(data, entry, 0, name)
        return data.tobytes()

    def check_storage(self, tensor: StoredTensor, where: str) -> None:
        """Raise where the storage of a tensor is not there in the size that the pickle says."""
        found = self._storage(tensor, where).file_size
        if found != tensor.storage_bytes or found > self.n_bytes:
            raise self._corrupt(where, f"a storage of {found} bytes", f"{tensor.storage_bytes} bytes")

    def fill(self, data: np.ndarray[Any, np.dtype[np.uint8]], tensor: StoredTensor, begin: int, where: str) -> None:
        """Fill ``data`` with the storage of a tensor from byte ``begin`` on; of a whole one check the checksum."""
        self._fill(data, self._storage(tensor, where), begin, where)

    def _corrupt(self, where: str, found: object, expected: object, remedy: str = "") -> CorruptCheckpointError:
        return CorruptCheckpointError(self._path, where, found=found, expected=expected, remedy=remedy)

    def _check_ends(self) -> None:
        """Say what it is if it is no zip, and that its end is missing if it was cut."""
        self._file.seek(0)
        head = self._file.read(len(_LEGACY_MAGIC))
        if head == _LEGACY_MAGIC:
            remedy = "load it with torch and save it again with torch 1.6 or newer"
            raise self._corrupt("", "a file of torch before 1.6", "the zip format of torch.save", remedy)
        if not head.startswith(_ENTRY_MAGIC):
            found = f"a file that begins with {head[:8]!r}" if head else "an empty file"
            raise self._corrupt("", found, "a zip file written by torch.save")
        self._file.seek(max(self.n_bytes - _END_BYTES, 0))
        end = self._file.read(_END_BYTES)
        if not end.startswith(_END_MAGIC) or len(end) != _END_BYTES:
            found = f"{self.n_bytes} bytes without the end of a zip file"
            raise self._corrupt("end", found, "the end record of a zip file")

    def _list_entries(self) -> dict[str, zipfile.ZipInfo]:
        try:
            listed = zipfile.ZipFile(self._file).infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
            expected = "the directory of a zip file"
            raise self._corrupt("zip directory", f"a broken one ({error!s:.200})", expected) from None
        entries = {entry.filename: entry for entry in listed}
        if len(entries) != len(listed):
            raise self._corrupt("zip directory", "an entry of a name that is there twice", "each name once")
        return entries

    def _entry(self, name: str, where: str) -> zipfile.ZipInfo:
        entry = self._entries.get(f"{self._root}/{name}")
        if entry is None:
            raise self._corrupt(where, f"no zip entry {name!r}", "one, as torch.save writes it")
        plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & _ENCRYPTED
        if not plain or entry.compress_size != entry.file_size:
            raise self._corrupt(where, f"a compressed or encrypted entry {name!r}", "bytes stored as they are")
        return entry

    def _storage(self, tensor: StoredTensor, where: str) -> zipfile.ZipInfo:
        return self._entry(f"data/{tensor.storage_key}", where)

    def _check_byteorder(self) -> None:
        if f"{self._root}/byteorder" not in self._entries:
            return  # torch before 2.1 wrote none
        found = self.read("byteorder", most=16)
        if found != b"little":
            remedy = "save it again on a little-endian machine"
            raise self._corrupt("byteorder", repr(found), "b'little'", remedy)

    def _fill(self, data: np.ndarray[Any, np.dtype[np.uint8]], entry: zipfile.ZipInfo, begin: int, where: str) -> None:
        start, n_bytes = self._locate(entry, where) + begin, len(data)
        if start + n_bytes > self.n_bytes:
            raise self._corrupt(where, f"an entry up to byte {start + n_bytes}", f"at most {self.n_bytes}")
        self._file.seek(start)
        filled = checksum = 0
        while filled < n_bytes:
            chunk = self._file.read(min(n_bytes - filled, _CHUNK_BYTES))
            if not chunk:
                raise self._corrupt(where, f"{filled} bytes", f"{n_bytes} bytes")
            data[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
            checksum = zlib.crc32(chunk, checksum)
            filled += len(chunk)
        # torch writes a checksum of 0 when it was told to compute none.
        if n_bytes == entry.file_size and entry.CRC not in (0, checksum):
            raise self._corrupt(where, f"checksum {checksum:08x}", f"{entry.CRC:08x}")

    def _locate(self, entry: zipfile.ZipInfo, where: str) -> int:
        """Return the first byte of an entry: behind its own header, which torch pads to align the data."""
        if not 0 <= entry.header_offset <= self.n_bytes - _ENTRY_HEADER_BYTES:
            raise self._corrupt(where, f"an entry at byte {entry.header_offset}", "a place in the file")
        self._file.seek(entry.header_offset)
        header = self._file.read(_ENTRY_HEADER_BYTES)
        if not header.startswith(_ENTRY_MAGIC) or len(header) != _ENTRY_HEADER_BYTES:
            raise self._corrupt(where, f"an entry that begins with {header[:4]!r}", repr(_ENTRY_MAGIC))
        name_bytes, extra_bytes = struct.unpack("<HH", header[-4:])
        return entry.header_offset + _ENTRY_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
