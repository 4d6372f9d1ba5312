"""A checkpoint of a bank with its files open: its names, state and rows. Imports torch only to read state."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.manifest import Manifest
from recckpt.format.names import Name
from recckpt.format.tensor_index import EXTRA
from recckpt.load.inventory import Inventory, LoadCandidate, checkpoint_inventory, names_here
from recckpt.load.source import LocatedCheckpoint
from recckpt.load.tensor_tables import tables_of_tensor
from recckpt.parallel.threads import collected_rarely
from recckpt.sparse.files.catalogs import met_shards
from recckpt.storage.transfers import WorkDir
from recckpt.types import EMBEDDING

if TYPE_CHECKING:
    from recckpt.sparse.files.filler import Filler
    from recckpt.sparse.files.link_pass import LinkLoad
    from recckpt.sparse.files.part_reader import LinkBatches

log = logging.getLogger("recckpt")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Needs:
    """The items that one rank reads from files of single ranks."""

    shard: int
    shards: int
    slices: Mapping[Name, Slice | None]  # slot in the model -> ids that this rank owns, None for all
    positions: bool  # whether it has positions in the data
    gathers: bool  # whether a registered object needs the states of all ranks that saved
    tensors: Collection[str]  # dense tensors that may be tables in the checkpoint


class OpenSource:
    """The open files of a checkpoint to load; they stay readable even if its owner removes the checkpoint.

    ``needs`` is None for a plan, because a plan reads no per-rank files.

    Raises:
        CheckpointRemovedError: the checkpoint is gone already.
        CorruptCheckpointError: a file is missing, or a catalog or an index of tensors is damaged.
    """

    def __init__(self, at: LocatedCheckpoint, needs: Needs | None) -> None:
        self.at, self._manifest, self._directory = at, at.checkpoint.manifest, at.checkpoint.directory
        self._n_bytes = 0
        self.states: dict[str, dict[str, Any]] = {}  # the states read so far
        self._batches: Sequence[LinkBatches] = ()
        self.updates: Collection[str] = ()  # tables for which only links that are new to the model are read
        self._chain = at.opened.twin() if at.opened else OpenChain.of(at.storage, at.checkpoint)
        with ExitStack() as closed_on_error:  # an error refers to this object, and may be kept
            closed_on_error.callback(self._chain.close)
            self._chain.files.keep_open(file.name for file in self._manifest.files if not layout.is_of_rank(file.name))
            if needs is not None:
                self._open_needed(needs)
            self.tensors = self._chain.tensors
            closed_on_error.pop_all()

    def close(self) -> None:
        self.tensors.close()
        self._chain.close()
        self.states, self._batches = {}, ()

    def _open_needed(self, needs: Needs) -> None:
        """Open the needed files of single ranks and, in all links, the files that may have rows for this rank."""
        everyone, own = range(self.at.shards), (0, needs.shard)
        is_resharded = self.at.shards != needs.shards
        of_ranks = [layout.of_rank("rng", needs.shard)]
        of_ranks += [
            layout.of_rank("io_state", shard) for shard in (everyone if needs.positions and is_resharded else own)
        ]
        of_ranks += [layout.of_rank("extra", shard) for shard in (everyone if needs.gathers and is_resharded else own)]
        self._chain.files.keep_open(name for name in of_ranks if self._manifest.file(name))
        slices = {owned for name, owned in needs.slices.items() if self.at.entry.wants(name)}
        of_tensors = set[str]()  # tables that may have the rows of dense tensors here, which are read whole each time
        for name in (Name("dense", tensor) for tensor in needs.tensors):
            try:
                there = self.at.entry.renames.source(name)
            except ValueError:  # the plan refuses such rules
                continue
            if there not in self._manifest.names.dense and self.at.entry.wants(name):
                of_tensors.update(table for table in tables_of_tensor(there) if self._manifest.table(table))
        if of_tensors:
            slices.add(None)
        if slices:
            self._batches, self.updates = self._chain.batches(slices, self.at.loaded_save_id, of_tensors)
            read = self._chain.links[: len(self._batches)]
            self._n_bytes += sum(entry.n_bytes for link in read for entry in link.catalog_files(slices))

    @property
    def bytes_read(self) -> int:
        return self._n_bytes + self.tensors.bytes_read

    def offer(self, model: Inventory) -> LoadCandidate:
        dense = [name.text for name in model if name.group == "dense"]
        dense += [tensor for name, thing in model.items() if name.slot == EMBEDDING for tensor in thing.tied]
        inventory = checkpoint_inventory(self.at.checkpoint, self.tensors.model, dense)
        reduced = {table.name: table.reduced for table in self._manifest.tables if table.reduced is not None}
        sharded = [tensor for tensor in self.tensors.tensors.values() if tensor.of == EXTRA]
        return LoadCandidate(self.at.entry, self.at.label, inventory, reduced, self._manifest.training.unsaved, sharded)

    def rows(
        self, number: int, fillers: Sequence[Filler], download_dir: WorkDir | None, concurrency: int
    ) -> list[LinkLoad]:
        """Return the loads that fill tables, one per link, the newest first."""
        from recckpt.sparse.files.link_pass import LinkLoad  # imports torch, which a plan does not need

        loads = []
        for at, (link, batches) in enumerate(zip(self._chain.links, self._batches, strict=False)):
            taken = [filler for filler in fillers if filler.entry.name in batches.tables]
            fetch = None
            if download_dir is not None:
                fetch = partial(link.files.fetch, download_dir=download_dir, concurrency=concurrency)
            loads.append(LinkLoad((number, at), taken, batches, fetch))
        return loads

    def state(self, name: str, *, is_kept: bool = True) -> Mapping[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty without such a file. Cached if ``is_kept``."""
        if name in self.states:
            return self.states[name]
        entry = self._manifest.file(name)
        self._n_bytes += entry.n_bytes if entry else 0
        state = self._chain.state(name)
        if is_kept:
            self.states[name] = state
        return state

    def value(self, name: str, key: str) -> Any:
        state = self.state(name)
        if key not in state:
            raise self.corrupt(name, repr(key), found="nothing", expected="its state, as the manifest says")
        return state[key]

    def registered(self, name: str, shard: int) -> Any:
        if name not in self.at.extras_of_ranks:
            return self.value(layout.EXTRA, name)
        return self.own_state("extra", name, shard)

    def registered_on_all(self, name: str, first: int) -> Iterator[Any]:
        if name not in self.at.extras_of_ranks:
            yield self.value(layout.EXTRA, name)
            return
        for shard in sorted(range(self.at.shards), key=lambda shard: shard != first):
            states = self.state(layout.of_rank("extra", shard), is_kept=False)
            if name in states:
                yield states[name]

    def own_state(self, content: str, name: str, shard: int) -> Any:
        """Return the state of a rank; if this rank saved none, the state of the first rank that did."""
        own = self.state(layout.of_rank(content, shard))
        if name in own:
            return own[name]
        for other in range(self.at.shards):
            states = self.state(layout.of_rank(content, other))
            if name in states:
                label = self.at.label
                log.warning("%s: rank %d saved no state of %r, and gets that of rank %d", label, shard, name, other)
                return states[name]
        return self.value(layout.of_rank(content, shard), name)  # raises: the manifest says that some rank has a state

    def row_scalars(self) -> dict[str, Any]:
        is_there = layout.SPARSE_OPTIM in self._manifest.names.extra
        state = self.value(layout.EXTRA, layout.SPARSE_OPTIM) if is_there else {}
        groups = state.get("param_groups", []) if isinstance(state, dict) else None
        tables = [group.get("tables", []) if isinstance(group, dict) else None for group in groups or ()]
        is_state = isinstance(groups, list) and isinstance(state.get("state", {}), dict)
        if not is_state or not all(isinstance(one, list) and all(isinstance(n, str) for n in one) for one in tables):
            found, expected = f"{state!s:.80}", "the state dict of an optimizer"
            raise self.corrupt(layout.EXTRA, repr(layout.SPARSE_OPTIM), found=found, expected=expected)
        return dict(state)

    def corrupt(self, name: str, where: str, *, found: object, expected: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(layout.join(self._directory, name), where, found=found, expected=expected)

    def dense(self, live: Iterable[str]) -> dict[str, Any]:
        """Return the dense state under the model's names; for a sharded tensor, the places of its values."""
        from recckpt.dense.loader import check_indexed  # imports torch, which a plan does not need

        values = dict(self.state(layout.MODEL))
        path = layout.join(self._directory, layout.MODEL)
        check_indexed(values, self.tensors.model, self._manifest.names.dense, path)
        values |= {name: tensor for name, tensor in self.tensors.model.items() if tensor.is_sharded}
        return self.under_names_of(live, values)

    def under_names_of(self, live: Iterable[str], values: Mapping[str, _T]) -> dict[str, _T]:
        """Return values under the model's names; names differ if only one side was wrapped."""
        here = names_here(self._manifest.names.dense, live)
        return {here.get(name, name): value for name, value in values.items()}


@contextmanager
def opened(sources: Iterable[LocatedCheckpoint], needs: Needs | None = None) -> Iterator[list[OpenSource]]:
    """Open checkpoints until the end of the ``with`` block; errors as for :class:`OpenSource`."""
    with collected_rarely(), ExitStack() as stack:
        opened_sources = []
        for source in sources:
            opened_sources.append(OpenSource(source, needs))
            stack.callback(opened_sources[-1].close)
        yield opened_sources


def needed_files(manifest: Manifest, needs: Needs, *, is_whole: bool = True) -> frozenset[str]:
    """Return the files that a rank reads to restore a near save, including files of shards that may have its rows.

    If the restore is not whole, names may differ in the checkpoint, so any shard may have rows for this rank.
    """
    names = {file.name for file in manifest.files}
    is_any = bool(needs.slices or needs.tensors) and not is_whole
    if is_any or any(tensor not in manifest.names.dense for tensor in needs.tensors):  # such a tensor may be a table
        return frozenset(names)
    catalogs = {manifest.shards[number].catalog for number in met_shards(manifest, set(needs.slices.values()))}
    others = {name for name in names if layout.has_rows(name)} - catalogs
    others = {name for name in others if not any(layout.is_part_of(name, catalog) for catalog in catalogs)}
    return frozenset(names - others)
