"""Files of a storage that has no memory map, copied to where there is one."""

from __future__ import annotations

import shutil
import tempfile
from typing import IO, TYPE_CHECKING, BinaryIO

from recckpt.storage.mapped_files import map_file

if TYPE_CHECKING:
    from recckpt.storage.base import Files

_CHUNK_BYTES = 8 << 20


def mapped(storage: Files, name: str) -> memoryview:
    """Return the bytes of a file as a memory map, of a temporary copy where the storage has none itself.

    Raises:
        OSError: it cannot be read, or the temporary directory is full.
    """
    found = storage.map(name)
    if found is not None:
        return found
    with storage.open(name) as source, tempfile.TemporaryFile(buffering=0) as copy:
        return map_copy(source, copy)


def map_copy(source: BinaryIO, copy: IO[bytes]) -> memoryview:
    """Copy a file and return the copy as a memory map, which keeps no descriptor."""
    shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    return map_file(copy.fileno(), str(copy.name))
