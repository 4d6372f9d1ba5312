"""File objects of Python over a sink, for libraries that write to such."""

from __future__ import annotations

import io
from typing import Any

import xxhash

from recckpt.storage.base import Sink


class SinkFile(io.RawIOBase):
    """A file object over a sink, without seeking; closing it leaves the sink open."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        return self._sink.write(data)

    @property
    def n_bytes(self) -> int:
        """Bytes so far."""
        return self._sink.n_bytes

    def tell(self) -> int:
        """Return the bytes so far."""
        return self._sink.n_bytes


class HashingSink(SinkFile):
    """A file object over a sink, with the checksum of what was written."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._hash = xxhash.xxh3_64()

    @property
    def xxh3(self) -> int:
        """Checksum of the bytes so far."""
        return self._hash.intdigest()

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        self._hash.update(data)
        return super().write(data)
