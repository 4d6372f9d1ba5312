"""Counts what a remote storage gives of files, to any rank."""

import threading
from collections import Counter

from recckpt.storage.remote import RangedFile, RemoteStorage


def count_bytes(monkeypatch):
    """Return the bytes that the storage gives from now on, of files with rows and their catalogs, and of others."""
    n_bytes, lock = Counter(), threading.Lock()
    open_, read_file, read_small = RemoteStorage.open, RangedFile.read, RemoteStorage.read

    def note(name, data):
        with lock:
            n_bytes["rows" if "/sparse/" in name else "others"] += len(data)
        return data

    def opened(storage, name):
        file = open_(storage, name)
        file.name = name
        return file

    monkeypatch.setattr(RemoteStorage, "open", opened)
    monkeypatch.setattr(RangedFile, "read", lambda file, size=-1: note(file.name, read_file(file, size)))
    monkeypatch.setattr(RemoteStorage, "read", lambda self, name, most: note(name, read_small(self, name, most)))
    return n_bytes
