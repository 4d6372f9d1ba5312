"""The bugs that can be planted, by name: of full checkpoints, of deltas, of their marks, and of live tables."""

from faults.delta_plants import DELTA_PLANTS
from faults.live_plants import LIVE_PLANTS
from faults.plant import Plant

SYNC = "os.fsync(fd)"


def without_fsync(of):
    return Plant("recckpt.storage.local_files:LocalSink.close", SYNC, f"None if {of} else {SYNC}")


def without_dir_fsync(of):
    return Plant("recckpt.storage.local_files:sync_entries", SYNC, f"None if {of} else {SYNC}")


COMMIT, PUT = "recckpt.output_dir.commit:commit", "        storage.put_if_absent(path, data)\n"
REMOVE = "recckpt.output_dir.rotation:remove"
LIST, ORDER = "recckpt.output_dir.listing:_list", "committed=committed"
MTIME = "__import__('os').stat(f'{storage.url}/{c.directory}/manifest.json').st_mtime_ns"

PLANTS = {
    "the index file before the manifest": Plant(
        COMMIT, PUT, f'        storage.replace(layout.INDEX_FILE, f"{{record.ckpt_id}}\\n".encode())\n{PUT}'
    ),
    "rotation before the commit": Plant(
        COMMIT,
        PUT,
        "        for found in fence.listing.committed:\n"
        f"            __import__('recckpt.output_dir.rotation').output_dir.rotation.remove(storage, found, 1)\n{PUT}",
    ),
    "the index file in place": Plant(
        "recckpt.storage.local:LocalStorage.replace",
        "temporary.replace(path)",
        "temporary.unlink(), path.write_bytes(data)",
    ),
    "data before the manifest at a removal": Plant(
        REMOVE,
        "        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))",
        "        for file in checkpoint.manifest.files:\n"
        "            storage.remove(layout.join(checkpoint.directory, file.name))\n"
        "        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))",
    ),
    "no fsync of data": without_fsync("self._path.suffix in ('.arrow', '.pt')"),
    "no fsync of the manifest": without_fsync("'manifest.json.' in self._path.name"),
    "no fsync of the index file": without_fsync("self._path.name.startswith('checkpoint.')"),
    "no fsync of directories": without_dir_fsync("True"),
    "no fsync of the directory of a checkpoint": without_dir_fsync("path.name.startswith('ckpt_')"),
    "no fsync of the output dir": without_dir_fsync("path.name == 'recorded'"),
    "an fsync that fails is passed over": tuple(
        Plant(
            f"recckpt.storage.local_files:{function}",
            f"    {SYNC}",
            f"    with suppress(OSError):\n                {SYNC}",
        )
        for function in ("LocalSink.close", "sync_entries")
    ),
    "a write that fails is taken for done": Plant(
        "recckpt.storage.local_files:LocalSink.write",
        "view = view[os.write(self._fd, view) :]",
        "with suppress(OSError):\n                os.write(self._fd, view)\n            view = view[:0]",
    ),
    "no fence check after the commit": Plant(
        COMMIT, '        storage.sync_dir("")\n        fence.check()\n', '        storage.sync_dir("")\n'
    ),
    "no fence check before a removal": Plant(
        "recckpt.output_dir.fence:Fence.remove",
        "        self.check()\n        if rotation.remove(",
        "        if rotation.remove(",
    ),
    "late commits count": Plant(
        "recckpt.output_dir.listing:_list", "takeover = _takeover(storage, damaged)", "takeover = NO_TAKEOVER"
    ),
    "an error publishes a file": Plant(
        "recckpt.storage.base:Sink.__exit__", "self.discard()\n        return", "self.close()\n        return"
    ),
    "an error publishes a large object": Plant(
        "recckpt.storage.upload:Upload.discard", "self._file.discard()", "self._file.commit()"
    ),
    "a manifest that was put is not read back": Plant(
        "recckpt.storage.objects:ObjectStorage._put", "        doubt = error\n", "        raise\n"
    ),
    "order by steps as strings": Plant(
        LIST, ORDER, "committed=tuple(sorted(committed, key=lambda c: str(c.manifest.step)))"
    ),
    "order by mtime": Plant(
        LIST,
        ORDER,
        f"committed=tuple(sorted(committed, key=lambda c: c.manifest.place if '://' in storage.url else {MTIME}))",
    ),
    "checksums of manifests are not compared": Plant(
        "recckpt.format.json_fields:check_seal", "if digest != int(match[2], 16):", "if False:"
    ),
    "checksums of files are not compared": Plant(
        "recckpt.output_dir.checkpoint_dir:_read_checked", "if found != entry.xxh3:", "if False:"
    ),
    "checksums of columns are not compared": Plant(
        "recckpt.sparse.files.part_reader:PartReader.column_problem", "if digest != expected:", "if False:"
    ),
    **DELTA_PLANTS,
    **LIVE_PLANTS,
}


def plants_of(name):
    """Return what a bug consists of."""
    found = PLANTS[name]
    return found if isinstance(found, tuple) else (found,)


def plant(name, patch=setattr):
    """Plant a bug, for the rest of this process or as long as what ``patch`` does lasts."""
    for bug in plants_of(name):
        patch(bug.function, "__code__", bug.code)
