"""Storages as a network shows them: what others have written appears after some looks, and each read is counted."""

import threading
from collections import Counter
from dataclasses import replace

from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from recckpt.storage.local import LocalStorage
from recckpt.storage.transfers import VISIBLE


class LateStorage(LocalStorage):
    """Shows a file as it is only after it has been looked at; time passes only between looks.

    Attributes:
        late: name -> what is seen of the file at first, a size or None for no file, one look each.
        waited: seconds.
        visible: how to look for files of others, in this time.
    """

    def __init__(self, path, timeout_sec=60.0):
        super().__init__(str(path))
        self.late, self.waited = {}, 0.0
        self.visible = replace(VISIBLE, deadline_sec=timeout_sec, sleep=self._sleep, clock=lambda: self.waited)

    def size(self, name):
        seen = self._look(name)
        return super().size(name) if seen is None else seen

    def listed(self, directory):
        found = super().listed(directory)
        return {name: file for name, file in found.items() if not self.late.get(f"{directory}/{name}")}

    def read(self, name, max_bytes, begin=0):
        self._look(name)
        return super().read(name, max_bytes, begin)

    def _look(self, name):
        """Return the size that is seen, None for the true one."""
        if not self.late.get(name):
            return None
        seen = self.late[name].pop(0)
        if seen is None:
            raise FileNotFoundError(2, "not yet", name)
        return seen

    def _clock(self):
        return self.waited

    def _sleep(self, seconds):
        self.waited += seconds


class _ReadAhead(AbstractBufferedFile):
    """A file as backends of object stores open it: its size is looked up, and bytes are asked for ahead."""

    def _fetch_range(self, start, end):
        return self.fs.cat_file(self.path, start, end)


def count_bytes(monkeypatch):
    """Return the bytes that ``memory://`` gives from now on, of files with rows and their catalogs, and of others.

    It counts "parts" too, the bytes of the files with rows alone, and "requests" about those.
    """
    counts, lock = Counter(), threading.Lock()
    cat_file, open_ = MemoryFileSystem.cat_file, MemoryFileSystem._open

    def note(path, n_bytes):
        with lock:
            counts["rows" if "/sparse/" in path else "others"] += n_bytes
            if path.endswith(".arrow"):
                counts["parts"] += n_bytes
                counts["requests"] += 1

    def read(fs, path, start=None, end=None, **options):
        data = cat_file(fs, path, start=start, end=end, **options)
        note(path, len(data))
        return data

    def opened(fs, path, mode="rb", **options):
        if mode != "rb":
            return open_(fs, path, mode, **options)
        note(path, 0)
        return _ReadAhead(fs, path, mode, block_size=options["block_size"])

    monkeypatch.setattr(MemoryFileSystem, "cat_file", read)
    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    return counts
