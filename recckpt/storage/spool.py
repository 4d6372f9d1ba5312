"""Files of a storage that has no memory map, copied to where there is one."""

from __future__ import annotations

import mmap
import shutil
import tempfile

from recckpt.storage.held import Files

_CHUNK_BYTES = 8 << 20


def mapped(storage: Files, name: str) -> memoryview:
    """Return the bytes of a file as a memory map, of a temporary copy where the storage has none itself.

    Raises:
        OSError: it cannot be read, or the temporary directory is full.
    """
    found = storage.map(name)
    if found is not None:
        return found
    with storage.open(name) as source, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
        copy.flush()
        if copy.tell() == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ))
