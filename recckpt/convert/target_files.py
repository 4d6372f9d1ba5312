"""The files of a target: all of them, or none."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.storage import ABSENT, Sink, open_parent

# Parts of the formats of exports:
RECORDS = {  # the files that describe an export
    "parquet": "_recckpt.json",
    "npy": "metadata.json",
    "csv": "metadata.json",
    "embedding": "metadata.json",
    "dcp": "recckpt.json",
}
DELETES = ".deletes"  # after the name of a table: the directory of the ids that an increment deletes
_EXISTS = "it exists, expected a new name: remove it, or write to another name"


class TargetFiles:
    """Writes the files of a target, a directory or one file; leaving the block by an error removes them all."""

    def __init__(self, url: str) -> None:
        self.url, self._made = url, dict[str, Sink]()
        self._storage, self._name = open_parent(url)

    def __enter__(self) -> TargetFiles:
        """Refuse a target that exists."""
        try:
            self._storage.size(self._name)
            there = True
        except ABSENT:
            there = bool(self._storage.list_files(self._name))
        except OSError:
            there = True
        if there:
            raise FileExistsError(errno.EEXIST, _EXISTS, self.url)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            for name in self._made:
                with suppress(OSError):
                    self._storage.remove(name)
            with suppress(OSError):
                self._storage.remove_empty_dirs(self._name)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(sink.n_bytes for sink in self._made.values())

    def create(self, *names: str) -> Sink:
        """Open a new file below the target, or the target itself.

        Raises:
            ConversionError: there is one of this name already: an object store would take the second for the first.
        """
        path = layout.join(self._name, *names)
        if path in self._made:
            found, expected = f"{'/'.join(names)} already, of another table or slot", "a file for each"
            raise ConversionError(self.url, "", found=found, expected=expected, remedy="export the tables apart")
        if not self._made:
            self._make_parents()
        self._made[path] = self._storage.create(path)
        return self._made[path]

    def _make_parents(self) -> None:
        try:
            self._storage.check_there()
        except ABSENT:
            self._storage.prepare()

    def put_json(self, value: Mapping[str, Any], *names: str) -> None:
        """Write a small file."""
        self.put(json.dumps(value, indent=2).encode() + b"\n", *names)

    def put(self, data: bytes, *names: str) -> None:
        """Write a small file."""
        with self.create(*names) as sink:
            sink.write(data)


def file_name(table: str) -> str:
    """Return a name of a table that every file system takes; ConversionError where it would be too long."""
    name = layout.encode_name(table)
    if len(name) > layout.MAX_ID_BYTES:
        found, expected = f"a name of {len(name)} bytes once encoded", f"at most {layout.MAX_ID_BYTES} in a file name"
        remedy = "leave it out, or take a format that is one file, such as safetensors"
        raise ConversionError(f"table {name[:40]}...", "", found=found, expected=expected, remedy=remedy)
    return name
