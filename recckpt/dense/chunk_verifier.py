"""Every byte of one shard's part of sharded tensors, read once and held against all its checksums (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.tensor_index import ChunkIndex, corrupt
from recckpt.storage.base import Files

_STEP_BYTES = 8 << 20


def check_chunks(
    files: Files, directory: str, index: ChunkIndex, expected: int | None, advance: Callable[[int], object]
) -> Iterator[CorruptCheckpointError]:
    """Yield each block that is damaged, or that the file as a whole is.

    Args:
        files: where the checkpoint lies.
        directory: of the checkpoint in it.
        index: of the shard.
        expected: checksum of the file, by the manifest.
        advance: counts bytes.
    """
    with files.open(layout.join(directory, index.file)) as content:
        passed = _Passed(content, advance)
        is_whole = True
        for chunk in index.chunks:
            passed.skip(chunk.at)
            for number, begin in enumerate(range(0, chunk.n_bytes, index.block_bytes)):
                block = passed.read(min(index.block_bytes, chunk.n_bytes - begin))
                found = xxhash.xxh3_64_intdigest(block)
                if found != chunk.xxh3[number]:
                    is_whole, where = False, f"tensor {chunk.name!r}, bytes {chunk.at + begin} on"
                    yield corrupt(directory, index, where, f"{found:016x}", f"{chunk.xxh3[number]:016x}")
        passed.skip(index.n_bytes)
    if is_whole and passed.digest.intdigest() != expected:  # between the chunks, or more than the checkup of sizes saw
        yield corrupt(directory, index, "its checksum", f"{passed.digest.intdigest():016x}", f"{expected or 0:016x}")


class _Passed:
    """A file that is read from front to end, and the checksum of what has been read."""

    def __init__(self, content: BinaryIO, advance: Callable[[int], object]) -> None:
        self._content, self._advance, self._at = content, advance, 0
        self.digest = xxhash.xxh3_64()

    def read(self, n_bytes: int) -> bytes:
        data = self._content.read(n_bytes)
        self._at += len(data)
        self.digest.update(data)
        self._advance(len(data))
        return data

    def skip(self, at: int) -> None:
        while self._at < at and self.read(min(at - self._at, _STEP_BYTES)):
            pass
