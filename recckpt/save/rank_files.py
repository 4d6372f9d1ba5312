"""All files of one rank: tables and dense state side by side, the catalog last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recckpt.dense.saver import save_state, save_tensors
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.format.manifest import FileEntry, ShardEntry, TableEntry
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import Lookout
from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import run_all
from recckpt.save.stage import Staged
from recckpt.sparse.files.saver import SparseSaver
from recckpt.storage import HashingSink, NewFiles, Storage
from recckpt.storage.staged_upload import Outbox
from recckpt.storage.transfers import Transfers
from recckpt.text import Progress


@dataclass(frozen=True)
class ShardRecord:
    """What one rank wrote.

    Attributes:
        save_id: the attempt that it wrote for.
        shard: its catalog.
        tables: its rows.
        files: all its files.
        seconds: how long it took.
        n_kept: rows that were copied aside because training changed them meanwhile.
    """

    save_id: str
    shard: ShardEntry
    tables: tuple[TableEntry, ...]
    files: tuple[FileEntry, ...]
    seconds: float = 0.0
    n_kept: int = 0


class ShardWriter:
    """Writes the files of one rank into the directory of an attempt."""

    def __init__(
        self,
        intent: Intent,
        storage: Storage,
        sparse_saver: SparseSaver,
        concurrency: int,
        ranks: Ranks,
        *,
        transfers: Transfers,
    ) -> None:
        self._intent, self._storage, self._transfers = intent, storage, transfers
        self._sparse_saver, self._concurrency = sparse_saver, concurrency
        self._rank, self._ranks = ranks.rank, ranks.size

    def write(self, staged: Staged, progress: Progress) -> ShardRecord:
        """Write dense beside sparse, and the catalog last.

        Raises:
            OSError: the storage failed.
        """
        begin = time.perf_counter()
        if self._rank:
            Lookout(self._storage, self._transfers.visible).check_intent(self._intent)
        with Outbox(self._storage, self._transfers) as outbox:
            record = self._write_to(outbox, staged, progress)
            staged.close()  # what follows may take long, and training copies aside what it changes until then
            outbox.publish(self._concurrency)
        return replace(record, seconds=time.perf_counter() - begin)

    def _write_to(self, outbox: NewFiles, staged: Staged, progress: Progress) -> ShardRecord:
        catalogs_written: list[Catalog] = []
        files: list[FileEntry] = []
        states = {layout.io_state(self._rank): staged.io_state, layout.rng(self._rank): staged.rng}
        if staged.own_extra:
            states[layout.extra_of(self._rank)] = staged.own_extra
        if self._rank == 0:
            states[layout.EXTRA] = staged.extra
        pieces: list[Callable[[], None]] = [
            lambda: files.extend(self._write_states(outbox, states)),
            lambda: files.extend(self._write_tensors(outbox, staged)),
            lambda: catalogs_written.append(self._write_tables(outbox, staged, progress)),
        ]
        run_all(lambda piece: piece(), pieces, self._concurrency)
        [catalog] = catalogs_written
        files += [FileEntry(part.file, part.n_bytes) for part in catalog.parts]
        files += [self._write_catalog(outbox, catalog)]
        alike = {t.slots: t.slots for t in staged.tables}  # all ranks are sent this: what is one object is sent once
        tables = tuple(TableEntry(t.name, t.n_rows, alike[t.slots]) for t in staged.tables)
        shard = ShardEntry(files[-1].name, catalog.buckets)
        n_kept = sum(table.n_kept for table in staged.tables)
        return ShardRecord(self._intent.save_id, shard, tables, tuple(files), n_kept=n_kept)

    def _write_states(self, to: NewFiles, states: Mapping[str, Mapping[str, Any]]) -> list[FileEntry]:
        return [save_state(state, to, self._intent.directory, name) for name, state in states.items()]

    def _write_tensors(self, to: NewFiles, staged: Staged) -> list[FileEntry]:
        return save_tensors(
            staged.dense if self._rank == 0 else None,
            staged.sharded.chunks,
            to,
            self._intent.directory,
            save_id=self._intent.save_id,
            shard=self._rank,
            shards=self._ranks,
        )

    def _write_tables(self, to: NewFiles, staged: Staged, progress: Progress) -> Catalog:
        return self._sparse_saver.save(
            staged.tables,
            to,
            self._intent.directory,
            save_id=self._intent.save_id,
            shard=self._rank,
            shards=self._ranks,
            advance=progress.advance,
        )

    def _write_catalog(self, to: NewFiles, catalog: Catalog) -> FileEntry:
        name = layout.catalog(self._rank, self._ranks)
        with to.create(layout.join(self._intent.directory, name)) as sink:
            hashing = HashingSink(sink)
            hashing.write(catalogs.encode(catalog))
        return FileEntry(name, sink.n_bytes, hashing.xxh3)
