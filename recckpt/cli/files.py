"""``recckpt show --files``: the files of a checkpoint, and those of each table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import read_parts
from recckpt.storage import Storage
from recckpt.text import escaped, grid, size


def files_of_tables(storage: Storage, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return table -> the files that have rows of it, by the catalogs."""
    found: dict[str, list[str]] = {table.name: [] for table in checkpoint.manifest.tables}
    for part in read_parts(checkpoint, storage):
        for name in dict.fromkeys(batch.table for batch in part.batches):
            found[name].append(part.file)
    return found


def file_data(file: FileEntry) -> dict[str, Any]:
    """Return what JSON says of a file."""
    return {"name": file.name, "bytes": file.n_bytes, "xxh3": None if file.xxh3 is None else f"{file.xxh3:016x}"}


def file_lines(manifest: Manifest) -> list[str]:
    """Return a table of the files."""
    rows = [(escaped(f.name), size(f.n_bytes), "-" if f.xxh3 is None else f"{f.xxh3:016x}") for f in manifest.files]
    return grid(("NAME", "SIZE", "XXH3"), rows, ("SIZE",))


def table_lines(files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return where each table is: the one file, or a pattern for the files of its schema."""
    rows = []
    for name, names in files.items():
        patterns = dict.fromkeys(map(layout.pattern_of_parts, names)) if len(names) > 1 else names
        rows.append((escaped(name), str(len(names)), ", ".join(map(escaped, patterns)) or "-"))
    return grid(("TABLE", "FILES", "NAMES"), rows, ("FILES",)) if rows else []
