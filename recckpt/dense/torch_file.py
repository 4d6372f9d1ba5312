"""Read the tensors of a torch.save file without torch: the zip around the pickle, and the bytes in it."""

from __future__ import annotations

import difflib
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np

from recckpt.dense.stored_tensor import NUMPY_DTYPES, StoredTensor, unpickle
from recckpt.errors import CorruptCheckpointError

MAX_PICKLE_BYTES = 1 << 25  # about 150,000 tensors
_CHUNK_BYTES = 1 << 22
_ENTRY_MAGIC, _ENTRY_HEADER_BYTES = b"PK\x03\x04", 30
_END_MAGIC, _END_BYTES = b"PK\x05\x06", 22
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled number that torch < 1.6 wrote first
_ENCRYPTED = 1


class TorchFile:
    """Tensors of a file written by torch.save, read without torch and without running any code from it.

    The file holds a dict: tensors by name, and it may be plain values among them. All that it says about
    itself is checked when it is opened; the bytes of a tensor are read when asked for. Not thread-safe, for
    the position of ``file`` is shared.

    Args:
        file: open for reading, seekable; the caller closes it.
        path: what messages call it.

    Raises:
        CorruptCheckpointError: it is not such a file, is damaged, or asks for code to be run.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        file.seek(0, 2)
        self._file_bytes = file.tell()
        self._check_ends()
        self._entries = self._list_entries()
        self._root = next(iter(self._entries), "").partition("/")[0]
        self._check_byteorder()
        data = self._read_entry("data.pkl", most=MAX_PICKLE_BYTES)
        self._tensors, self._values = unpickle(data, path, "data.pkl")
        for name, tensor in self._tensors.items():
            self._check_storage(name, tensor)

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the dict."""
        return list(self._tensors)

    def dtype(self, name: str) -> str:
        """Return the dtype as torch calls it, such as ``bfloat16``."""
        return self._tensor(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; ``()`` is a scalar."""
        return self._tensor(name).shape

    def nbytes(self, name: str) -> int:
        """Return the bytes that :meth:`read` gives."""
        return self._tensor(name).nbytes

    def values(self) -> dict[str, Any]:
        """Return what is no tensor, by name: numbers, strings, bytes, None, and lists, tuples, dicts of them.

        A dtype or device comes as a string, a set as a list; a tensor in a list or dict as its
        :class:`~recckpt.dense.stored_tensor.StoredTensor`.
        """
        return dict(self._values)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Return the values of a tensor, contiguous and writable, sharing memory with no other.

        A dtype that numpy lacks comes as bit patterns: ``bfloat16`` as uint16, ``float8_*`` as uint8,
        ``complex32`` as uint32. Only the bytes from its first value up to its last are read. Their checksum
        is checked when they are a whole storage, which is so but for views of larger tensors.

        Raises:
            KeyError: there is no such tensor; names the nearest one.
            CorruptCheckpointError: the bytes are damaged.
        """
        tensor, dtype = self._tensor(name), NUMPY_DTYPES[self.dtype(name)]
        where = f"tensor {name!r}"
        begin, n_bytes = tensor.offset * dtype.itemsize, tensor.span * dtype.itemsize
        data = self._read_bytes(self._storage(tensor, where), begin, n_bytes, where)
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)
        # A dimension of size one may have any stride, also one that numpy cannot take.
        pairs = zip(tensor.shape, tensor.strides, strict=True)
        steps = [stride * dtype.itemsize if size > 1 else 0 for size, stride in pairs]
        view: np.ndarray[Any, Any] = np.ndarray(tensor.shape, dtype, buffer=data.data, strides=steps)
        return view if view.flags.c_contiguous else view.copy()

    def _tensor(self, name: str) -> StoredTensor:
        if name in self._tensors:
            return self._tensors[name]
        near = difflib.get_close_matches(name, self._tensors, n=1)
        hint = f"the nearest name is {near[0]!r}" if near else f"it has {len(self._tensors)} others"
        kind = "but a plain value" if name in self._values else hint
        raise KeyError(f"{self._path} has no tensor {name!r}; {kind}")

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
        self._file.seek(max(self._file_bytes - _END_BYTES, 0))
        end = self._file.read(_END_BYTES)
        if not end.startswith(_END_MAGIC) or len(end) != _END_BYTES:
            found = f"{self._file_bytes} bytes without the end of a zip file"
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

    def _check_storage(self, name: str, tensor: StoredTensor) -> None:
        where = f"tensor {name!r}"
        found = self._storage(tensor, where).file_size
        if found != tensor.storage_bytes or found > self._file_bytes:
            raise self._corrupt(where, f"a storage of {found} bytes", f"{tensor.storage_bytes} bytes")

    def _check_byteorder(self) -> None:
        if f"{self._root}/byteorder" not in self._entries:
            return  # torch before 2.1 wrote none
        found = self._read_entry("byteorder", most=16)
        if found != b"little":
            remedy = "save it again on a little-endian machine"
            raise self._corrupt("byteorder", repr(found), "b'little'", remedy)

    def _read_entry(self, name: str, *, most: int) -> bytes:
        entry = self._entry(name, name)
        if entry.file_size > most:
            raise self._corrupt(name, f"{entry.file_size} bytes", f"at most {most}")
        return self._read_bytes(entry, 0, entry.file_size, name).tobytes()

    def _read_bytes(
        self, entry: zipfile.ZipInfo, begin: int, n_bytes: int, where: str
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a range of an entry; a whole one has its checksum checked."""
        start = self._locate(entry, where) + begin
        if start + n_bytes > self._file_bytes:
            raise self._corrupt(where, f"an entry up to byte {start + n_bytes}", f"at most {self._file_bytes}")
        data = np.empty(n_bytes, np.uint8)
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
        return data

    def _locate(self, entry: zipfile.ZipInfo, where: str) -> int:
        """Return the first byte of an entry: behind its own header, which torch pads to align the data."""
        if not 0 <= entry.header_offset <= self._file_bytes - _ENTRY_HEADER_BYTES:
            raise self._corrupt(where, f"an entry at byte {entry.header_offset}", "a place in the file")
        self._file.seek(entry.header_offset)
        header = self._file.read(_ENTRY_HEADER_BYTES)
        if not header.startswith(_ENTRY_MAGIC) or len(header) != _ENTRY_HEADER_BYTES:
            raise self._corrupt(where, f"an entry that begins with {header[:4]!r}", repr(_ENTRY_MAGIC))
        name_bytes, extra_bytes = struct.unpack("<HH", header[-4:])
        return entry.header_offset + _ENTRY_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
