"""A disk that keeps only what was synced, and of the rest what chance has it keep."""

import hashlib
from dataclasses import dataclass, field

TEARS = ("0", "1", "half", "all but 1", "all", "zeros")  # what becomes of bytes that were never synced


@dataclass(eq=False)
class File:
    """A file in memory; its first ``synced`` bytes are on the disk."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0

    def torn(self, how):
        """Return what may be left after a power cut."""
        n_lost = len(self.data) - self.synced
        if how == "zeros":  # the length was noted, and not all the blocks were written
            n_kept = self.synced + n_lost // 2
            return bytes(self.data[:n_kept]) + bytes(len(self.data) - n_kept)
        n_kept = {"0": 0, "1": min(1, n_lost), "half": n_lost // 2, "all but 1": max(0, n_lost - 1), "all": n_lost}[how]
        return bytes(self.data[: self.synced + n_kept])


@dataclass(eq=False)
class Directory:
    """A directory in memory; what it has on the disk; and the changes between, each a dict of names."""

    entries: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    changes: list = field(default_factory=list)

    def change(self, change):
        """Change entries in one step; None removes one."""
        _apply(self.entries, change)
        self.changes.append(change)

    def sync(self):
        self.synced, self.changes = dict(self.entries), []

    def kept(self, keeps):
        """Return what may be left after a power cut: each change since the last sync is kept or lost."""
        entries = dict(self.synced)
        for change in self.changes:
            if keeps():
                _apply(entries, change)
        return entries


def _apply(entries, change):
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """Replays what was done to a directory."""

    def __init__(self):
        self._root = Directory()
        self._files = {}

    def do(self, op):
        getattr(self, f"_{op.kind}")(op)

    def left(self, keeps=lambda: True, tear=lambda: "all"):
        """Return path -> bytes, None for a directory, of what may be left after a power cut now.

        Args:
            keeps: says of each change of a directory that was not synced whether it is kept.
            tear: says of each file what is kept of bytes that were not synced.
        """
        found, todo, torn = {}, [("", self._root)], {}
        while todo:
            path, directory = todo.pop()
            for name, node in sorted(directory.kept(keeps).items()):
                inner = f"{path}/{name}" if path else name
                if isinstance(node, Directory):
                    found[inner] = None
                    todo.append((inner, node))
                else:
                    if node not in torn:  # two names of one file have the same bytes
                        torn[node] = node.torn(tear())
                    found[inner] = torn[node]
        return found

    def _acknowledged(self, op):
        pass

    def _create(self, op):
        self._files[op.file] = File()
        self._enter(op.path, self._files[op.file])

    def _write(self, op):
        self._files[op.file].data += op.data

    def _sync(self, op):
        if op.file >= 0:
            self._files[op.file].synced = len(self._files[op.file].data)
        else:
            self._node(op.path).sync()

    def _link(self, op):
        self._enter(op.to, self._node(op.path))

    def _unlink(self, op):
        self._enter(op.path, None)

    def _rename(self, op):
        directory, name = self._place(op.path)
        target, new_name = self._place(op.to)
        assert directory is target, "a rename between directories is none that the model knows"
        directory.change({new_name: directory.entries[name], name: None})

    def _mkdir(self, op):
        self._enter(op.path, Directory())

    def _rmdir(self, op):
        self._enter(op.path, None)

    def _enter(self, path, node):
        directory, name = self._place(path)
        directory.change({name: node})

    def _place(self, path):
        parent, _, name = path.rpartition("/")
        return self._node(parent), name

    def _node(self, path):
        node = self._root
        for name in filter(None, path.split("/")):
            node = node.entries[name]
        return node


def cuts(disk, chance, n_random):
    """Yield what may be left after a power cut now: all or nothing of what was not synced, and random mixtures."""
    for tear in TEARS:
        for kept in (False, True):
            yield disk.left(lambda kept=kept: kept, lambda tear=tear: tear)
    for _ in range(n_random):
        share = chance.choice((0.2, 0.5, 0.8))
        yield disk.left(lambda share=share: chance.random() < share, lambda: chance.choice(TEARS))


def put(left, directory):
    """Make a directory that holds what is left."""
    for path in sorted(left):
        if left[path] is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(left[path])


def digest(left):
    """Return what tells one state from another."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(left):
        data = left[path]
        whole.update(f"{path}\0{'d' if data is None else len(data)}\0".encode())
        whole.update(data or b"")
    return whole.digest()
