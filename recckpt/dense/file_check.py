"""Files of dense tensors checked: all bytes by checksum, and what the pickle of a ``.pt`` file names (no torch)."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.dtypes import NUMPY_DTYPES, STORAGES
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import TensorIndex, damaged
from recckpt.storage.base import Files

_STEP_BYTES = 8 << 20
_GLOBALS = frozenset(  # part of the format: what a pickle of dense tensors and plain data names
    {
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}" for kind in STORAGES.values()),
        "torch.storage UntypedStorage",
        *(f"torch {dtype}" for dtype in NUMPY_DTYPES),
        "torch Size",
        "torch device",
        "collections OrderedDict",
        "collections Counter",
        "_codecs encode",
        "__builtin__ set",
        "__builtin__ complex",
    }
)
_OPCODES = frozenset(
    """PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE EMPTY_DICT EMPTY_LIST
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET
    GLOBAL REDUCE BUILD BINPERSID""".split()  # noqa: SIM905
)
_BROKEN = (zipfile.BadZipFile, NotImplementedError, ValueError, KeyError, OverflowError, EOFError, struct.error)


def check_file(
    files: Files,
    directory: str,
    file: FileEntry,
    *,
    index: TensorIndex | None,
    advance: Callable[[int], object],
) -> Iterator[CorruptCheckpointError]:
    """Yield each damaged block of the tensors that an index lists in a file, or that the file as a whole is damaged."""
    path, is_whole = layout.join(directory, file.name), True
    chunks, block_bytes = (index.chunks, index.block_bytes) if index else ((), 1)
    with files.open(path) as content:
        passed = _Passed(content, advance)
        for chunk in chunks:
            if chunk.file != file.name or chunk.at < passed.at:
                continue  # of another file, or the same bytes as the one before
            passed.skip(chunk.at)
            for begin, expected in zip(range(0, chunk.n_bytes, block_bytes), chunk.xxh3, strict=True):
                found = xxhash.xxh3_64_intdigest(passed.read(min(block_bytes, chunk.n_bytes - begin)))
                if found != expected:
                    is_whole = False
                    yield damaged(directory, chunk, begin, found, expected)
        passed.skip(file.n_bytes)
    found = passed.digest.intdigest()
    if is_whole and found != file.xxh3:  # between the chunks
        yield CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{file.xxh3 or 0:016x}")


class _Passed:
    """A file that is read from front to end, and the checksum of what has been read."""

    def __init__(self, content: BinaryIO, advance: Callable[[int], object]) -> None:
        self._content, self._advance, self.at = content, advance, 0
        self.digest = xxhash.xxh3_64()

    def read(self, n_bytes: int) -> bytes:
        data = self._content.read(n_bytes)
        self.at += len(data)
        self.digest.update(data)
        self._advance(len(data))
        return data

    def skip(self, at: int) -> None:
        while self.at < at and self.read(min(at - self.at, _STEP_BYTES)):
            pass


def check_loadable(content: BinaryIO, path: str) -> None:
    """Check that a file is a zip of torch.save, with a pickle of a dict that names nothing but tensors and plain data.

    The opcodes of the pickle are only read, not run. A file that was crafted to be well-formed and not loadable passes.
    """
    try:
        with zipfile.ZipFile(content) as archive:
            names = archive.namelist()
            root = names[0].partition("/")[0] if names else ""
            data = archive.read(f"{root}/data.pkl")
            byteorder = archive.read(f"{root}/byteorder") if f"{root}/byteorder" in names else b"little"
    except _BROKEN as error:
        found = f"not such a file ({type(error).__name__}: {error!s:.200})"
        raise CorruptCheckpointError(path, "", found=found, expected="a zip file of torch.save") from error
    if byteorder != b"little" or f"{root}/constants.pkl" in names:
        found = "a TorchScript archive" if f"{root}/constants.pkl" in names else f"byte order {byteorder[:10]!r}"
        raise CorruptCheckpointError(path, "", found=found, expected="a little-endian zip file of torch.save")
    _check_pickle(data, path)


def _check_pickle(data: bytes, path: str) -> None:
    n_read = 0
    try:
        for number, (opcode, value, at) in enumerate(pickletools.genops(data)):
            n_read = (at or 0) + 1
            found = f"the global {value!r:.200}" if opcode.name == "GLOBAL" else f"the opcode {opcode.name}"
            is_known = value in _GLOBALS if opcode.name == "GLOBAL" else opcode.name in _OPCODES
            is_dict = number != 1 or opcode.name == "EMPTY_DICT" or value == "collections OrderedDict"
            if not is_known or not is_dict:
                expected = "what a dict of tensors and plain data needs"
                raise CorruptCheckpointError(path, f"data.pkl, byte {at}", found=found, expected=expected)
    except ValueError as error:
        found = f"a broken pickle ({error!s:.200})"
        raise CorruptCheckpointError(path, "data.pkl", found=found, expected="a pickle of torch.save") from error
    if n_read != len(data):
        raise CorruptCheckpointError(path, "data.pkl", found=f"{len(data) - n_read} bytes behind it", expected="none")
