"""Which files of a near save a rank reads, where its host may lack those of others."""

from __future__ import annotations

from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.load.open_source import Needs
from recckpt.sparse.files.catalogs import met_shards


def needed_files(manifest: Manifest, needs: Needs, *, is_whole: bool = True) -> frozenset[str]:
    """Return the files that a rank reads to restore a near save: of rows, those of shards that may have rows for it.

    Args:
        manifest: of the near save.
        needs: what the rank has.
        is_whole: whether it reads just that; else parts of it may have other names there, so that it may read any rows.
    """
    names = {file.name for file in manifest.files}
    is_any = bool(needs.slices or needs.tensors) and not is_whole
    if is_any or any(tensor not in manifest.names.dense for tensor in needs.tensors):  # which may be a table
        return frozenset(names)
    catalogs = {manifest.shards[number].catalog for number in met_shards(manifest, set(needs.slices.values()))}
    others = {name for name in names if layout.has_rows(name)} - catalogs
    others = {name for name in others if not any(layout.is_part_of(name, catalog) for catalog in catalogs)}
    return frozenset(names - others)
