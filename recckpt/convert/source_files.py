"""The files of a source: one file or a directory, on this host or at a URL."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recckpt.convert.source import Array, LeftOut
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.storage import open_parent, open_storage

_LOCAL = ("file://", "local://")
_MAX_FILES = 1_000_000
_MOST_LISTED = 20


class SourceFiles:
    """Lists and opens the files of a source. Follows symbolic links, because users make them, such as in caches.

    ``names`` are relative to the directory, sorted; a single file has its own name. ConversionError if there is no
    file, or a checkpoint of recckpt; ValueError if no storage supports the URL.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if not self.url or "\0" in self.url:  # an empty URL, as from an unset variable, would mean all files here
            raise ValueError(f"a source is a path or URL, found {self.url!r}")
        self._is_local = "://" not in self.url or self.url.startswith(_LOCAL)
        if self._is_local:
            self._path = Path(self.url.split("://", 1)[-1]).expanduser()
            self.is_file = self._path.is_file()
            paths = [Path(base, name) for base, _, names in os.walk(self._path) for name in names]
            if len(paths) > _MAX_FILES:
                found, expected = f"{len(paths)} files", f"at most {_MAX_FILES}"
                raise ConversionError(str(self._path), "", found=found, expected=expected)
            below = sorted(path.relative_to(self._path).as_posix() for path in paths)
            self.names = [self._path.name] if self.is_file else below
        else:
            self._storage = open_storage(self.url)
            self.names = list(filter(None, self._storage.list_files("")))  # for a file, some stores list an empty name
            self.is_file = not self.names
            if self.is_file:
                self._storage, name = open_parent(self.url)
                self.names = [name]
        # Refuse files of recckpt: its parts look like Arrow files, and one part alone does not have all rows.
        ours = [name for name in self.names if name.rpartition("/")[2] in (layout.INTENT, layout.MANIFEST)]
        if ours and not self.is_file:
            found = f"{ours[0]}, which belongs to a checkpoint of recckpt"
            remedy = "load the checkpoint, or `recckpt export` it first, with --skip-damaged if it is damaged"
            raise ConversionError(self.url, "", found=found, expected="what another program saved", remedy=remedy)
        try:
            is_there = bool(self.names) and (not self.is_file or self.size(self.names[0]) >= 0)
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise ConversionError(self.url, "", found="no file and no directory with files", expected="a source")

    @property
    def stem(self) -> str:
        """The name of the source without its suffix, which names a table without a name."""
        name = self.url.rstrip("/").rpartition("/")[2]
        return name.partition(".")[0] if self.is_file else name

    def path(self, name: str) -> str:
        """Return the path of a file for messages."""
        return self.url if self.is_file else f"{self.url.rstrip('/')}/{name}"

    def below(self, directory: str) -> SourceFiles:
        return SourceFiles(f"{self.url.rstrip('/')}/{directory}")

    def ending(self, *endings: str) -> list[str]:
        """Return the names with one of these suffixes; leaves out hidden files by the rules of Spark and Hive."""
        parts = ((name, name.split("/")) for name in self.names)
        return [n for n, segments in parts if n.endswith(endings) and not any(s[0] in "_." for s in segments)]

    def need(self, name: str, why: str) -> str:
        """Return ``name``; ConversionError if there is no such file."""
        if name not in self.names:
            raise ConversionError(self.path(name), "", found="no such file", expected=why, remedy="copy it there")
        return name

    def local(self, name: str) -> Path | None:
        """Return the path of a file on this host; None for a URL."""
        return (self._path if self.is_file else self._path / name) if self._is_local else None

    def open(self, name: str) -> BinaryIO:
        local = self.local(name)
        return self._storage.open(name) if local is None else local.open("rb")

    def size(self, name: str) -> int:
        local = self.local(name)
        return self._storage.size(name) if local is None else local.stat().st_size

    def read(self, name: str, max_bytes: int) -> bytes:
        if self.size(name) > max_bytes:
            found = f"{self.size(name)} bytes"
            raise ConversionError(self.path(name), "its size", found=found, expected=f"at most {max_bytes}")
        with self.open(name) as file:
            return file.read()

    def json_object(self, name: str, max_bytes: int) -> dict[str, Any]:
        try:
            value = json.loads(self.read(name, max_bytes))
        except (ValueError, RecursionError) as error:
            found = f"invalid JSON ({error!s:.100})"
            raise ConversionError(self.path(name), "", found=found, expected="a JSON object") from error
        if not isinstance(value, dict):
            raise ConversionError(self.path(name), "", found=f"{value!r:.60}", expected="a JSON object")
        return value

    def array(self, name: str, begin: int, dtype: np.dtype[np.generic], shape: Sequence[int]) -> Array:
        """Return the array that begins at a byte offset of a file; ConversionError if the file is too short."""
        n_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        values = np.empty(n_bytes, np.uint8)
        with self.open(name) as file:
            file.seek(begin)
            view, done = values.data, 0
            while done < n_bytes and (data := file.read(min(n_bytes - done, 32 << 20))):
                view[done : done + len(data)] = data
                done += len(data)
        if done < n_bytes:
            found = f"the end of the file after {done} bytes"
            raise ConversionError(self.path(name), f"byte {begin} on", found=found, expected=f"{n_bytes} bytes")
        return values.view(dtype).reshape(shape)

    def beside(self, names: Sequence[str], format: str) -> list[LeftOut]:
        """List what an import omits: Hive's partition columns, and all files except ``names`` and hidden ones."""
        if self.is_file:
            return []
        segments = {segment for name in names for segment in name.split("/")[:-1]}
        columns = sorted({segment.partition("=")[0] for segment in segments if "=" in segment})
        why = "is only in names of directories; put it into a column"
        left = [LeftOut(f"partition {column}", why) for column in columns]
        others = sorted(set(self.ending("")) - set(names))
        left += [LeftOut(name, f"is not a file of {format}") for name in others[:_MOST_LISTED]]
        if len(others) > _MOST_LISTED:
            left.append(LeftOut(f"{len(others) - _MOST_LISTED} more files", f"are not of {format}"))
        return left
