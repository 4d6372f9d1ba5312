"""Writes zip files like torch.save, record by record, and checks them before a load (no torch or numpy here)."""

from __future__ import annotations

import errno
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import BinaryIO, NamedTuple

from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.storage import SinkFile

_ROOT = "archive"
_ALIGNMENT = 64  # alignment of tensors in bytes, so that a load can map the file
HEADER_BYTES, _LENGTHS_AT = 30, 26  # size of the header before each record; name and padding follow the header
_ZIP64_BYTES = 20
_PADDING_ID = 0x4246  # the id that torch uses
_LARGE_BYTES = 1 << 30  # entries of this size or larger have 64-bit sizes; zip requires them from 2 GiB on
_STEP_BYTES = 4 << 20
# Matches many opcodes that have no argument or one of fixed size, because a pickle has about forty per tensor.
_SIMPLE = rb"(?:[(NQ}\])tRaesub\x85-\x89]|[Kqh].|M..|J.{4}|G.{8}|[rj]%b){0,999}"
_GLOBAL = re.compile(rb"c([^\n]{1,200})\n([^\n]{1,200})\n")


class ArchiveContents(NamedTuple):
    pickle: bytes
    records: Iterable[memoryview]


def write_archive(to: SinkFile, contents: ArchiveContents, proceed: Callable[[], None] = lambda: None) -> list[int]:
    """Write a file for ``torch.load(weights_only=True)``, and return the position of the first byte of each record.

    Equal contents make equal files. ``proceed`` is called every few megabytes; if it raises, the write stops.
    """
    with zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: memoryview) -> int:
            entry = zipfile.ZipInfo(f"{_ROOT}/{name}")  # its date is always 1980, so equal contents make equal files
            large = len(data) >= _LARGE_BYTES
            begin = to.n_bytes + HEADER_BYTES + len(entry.filename) + 4 + (_ZIP64_BYTES if large else 0)
            padding = -begin % _ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            with archive.open(entry, "w", force_zip64=large) as file:
                at = to.n_bytes
                for start in range(0, len(data), _STEP_BYTES):
                    proceed()
                    file.write(data[start : start + _STEP_BYTES])
            return at

        add("data.pkl", memoryview(contents.pickle))
        add("byteorder", memoryview(sys.byteorder.encode()))
        places = [add(f"data/{number}", record) for number, record in enumerate(contents.records)]
        add("version", memoryview(b"3\n"))
    return places


@cache
def _globals() -> frozenset[str]:
    """Return the globals that a pickle of dense tensors and plain data may name; part of the format."""
    from recckpt.format.tensor_index import NUMPY_DTYPES, STORAGES

    return frozenset(
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


def data_begin(entry: zipfile.ZipInfo, header: bytes | memoryview) -> int:
    """Return where the bytes of a record begin, given its header of ``HEADER_BYTES``; EOFError if that is cut."""
    if len(header) < HEADER_BYTES:
        raise EOFError(f"{entry.filename} has no header at byte {entry.header_offset}")
    n_name, n_padding = struct.unpack_from("<HH", header, _LENGTHS_AT)
    begin: int = entry.header_offset + HEADER_BYTES + n_name + n_padding
    return begin


class LoadableArchive(NamedTuple):
    root: str
    pickle: bytes
    entries: Mapping[str, zipfile.ZipInfo]


def check_loadable(content: BinaryIO, path: str, max_bytes: int = sys.maxsize) -> LoadableArchive:
    """Check that a file is a zip of torch.save whose pickle is a dict of tensors and plain data.

    The check reads opcodes without running them. A crafted file that is well-formed but not loadable passes. The pickle
    may have at most ``max_bytes``.
    """

    def read(name: str) -> bytes:
        entry = entries[f"{root}/{name}"]
        if entry.compress_type != zipfile.ZIP_STORED or not entry.file_size == entry.compress_size <= max_bytes:
            raise ValueError(f"{name} is compressed, or has {entry.file_size} bytes")
        return archive.read(entry)

    try:
        with zipfile.ZipFile(content) as archive:
            n_entries, entries = len(archive.infolist()), {entry.filename: entry for entry in archive.infolist()}
            root = next(iter(entries), "").partition("/")[0]
            data = read("data.pkl")
            byteorder = read("byteorder") if f"{root}/byteorder" in entries else b"little"
    except Exception as error:  # zipfile raises many kinds of errors for files that are not zip files
        is_of_storage = isinstance(error, OSError) and error.errno != errno.EINVAL  # EINVAL: a seek before byte 0
        if is_of_storage or isinstance(error, RecckptError):
            raise
        found = f"not such a file ({type(error).__name__}: {error!s:.200})"
        raise CorruptCheckpointError(path, "", found=found, expected="a zip file of torch.save") from error
    is_script = f"{root}/constants.pkl" in entries
    if is_script or byteorder != b"little" or len(entries) != n_entries:
        found = "a TorchScript archive" if is_script else f"byte order {byteorder[:10]!r}"
        found = found if len(entries) == n_entries else "a name twice"
        raise CorruptCheckpointError(path, "", found=found, expected="a little-endian zip file of torch.save")
    _check_pickle(data, path)
    return LoadableArchive(root, data, entries)


def _check_pickle(data: bytes, path: str) -> None:
    at = begin = 2 if data.startswith(b"\x80\x02") else 0
    # Memo indices must not be much above the number of bytes, because unpickling allocates memory up to the index.
    small, large = rb"..[\0-\x%02x]\0" % (len(data) >> 16 & 255), rb"...[\0-\x%02x]" % (len(data) >> 24)
    simple = re.compile(_SIMPLE % (small if len(data) < 1 << 24 else large), re.DOTALL)
    before = 0
    while at > before:
        before, at = at, simple.match(data, at).end()  # type: ignore[union-attr]  # always matches, if only ""
        at += _size_at(data, at)
    is_dict = data[begin : begin + 1] == b"}" or _global_at(data, begin) == "collections OrderedDict"
    if at + 1 == len(data) and data[at:] == b".":
        if is_dict:
            return
        at = begin
    if at >= len(data):
        found = "no end of the pickle"
    elif data[at : at + 1] == b".":
        found = f"{len(data) - at - 1} bytes after its end"
    elif data[at : at + 1] == b"c":
        found = f"the global {_global_at(data, at).replace(' ', '.')!r}"
    else:
        import pickletools  # only to name the bad opcode

        names = {opcode.code: opcode.name for opcode in pickletools.opcodes}
        found = f"the opcode {names.get(chr(data[at]), data[at])}"
    raise CorruptCheckpointError(
        path,
        f"data.pkl, byte {at}",
        found=found,
        expected="a dict of tensors and plain data",
        remedy="no code of it was run; do not load this file with weights_only=False",
    )


def _size_at(data: bytes, at: int) -> int:
    """Return the size of an allowed opcode of variable size with its argument; 0 for any other opcode."""
    if data[at : at + 1] == b"X":
        return 5 + int.from_bytes(data[at + 1 : at + 5], "little")
    if data[at : at + 1] == b"\x8a":
        return 2 + int.from_bytes(data[at + 1 : at + 2], "little")
    name = _global_at(data, at)
    return len(name) + 2 if name in _globals() else 0


def _global_at(data: bytes, at: int) -> str:
    named = _GLOBAL.match(data, at)
    return b" ".join(named.groups()).decode("latin1") if named else ""
