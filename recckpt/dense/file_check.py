"""Every byte of a file with dense tensors, read once and held against all its checksums (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import TensorIndex, damaged
from recckpt.storage.base import Files

_STEP_BYTES = 8 << 20


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
