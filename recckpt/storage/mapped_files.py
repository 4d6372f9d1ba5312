"""Memory maps that keep no file descriptor: those of Python's ``mmap`` keep one each, of which there are too few."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, path: str) -> memoryview:
    """Return the bytes of an open file, for reading; they stay when it is closed and its name removed.

    Raises:
        OSError: it cannot be mapped.
    """
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
