"""Files as memory maps that keep no file descriptor: Python's ``mmap`` keeps one for each, and those run out."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import weakref
from typing import IO, TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from recckpt.storage.base import Files

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_CHUNK_BYTES = 8 << 20
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, path: str) -> memoryview:
    """Return the bytes of an open file, for reading; they stay when it is closed and its name removed."""
    n_bytes = os.fstat(descriptor).st_size
    if n_bytes == 0:
        return memoryview(b"")
    address = _LIBC.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)  # every view of it keeps it alive
    weakref.finalize(memory, _LIBC.munmap, address, n_bytes).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def mapped(storage: Files, name: str) -> memoryview:
    """Return the bytes of a file as a memory map; of a temporary copy if the storage has no maps."""
    found = storage.map(name)
    if found is not None:
        return found
    with storage.open(name) as source, tempfile.TemporaryFile(buffering=0) as copy:
        return map_copy(source, copy)


def map_copy(source: BinaryIO, copy: IO[bytes]) -> memoryview:
    """Copy a file and return the copy as a memory map, which keeps no descriptor."""
    shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    return map_file(copy.fileno(), str(copy.name))
