"""Where a load takes things from: the checkpoints of a bank, found and opened (no torch before a state is read)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Part
from recckpt.load.conf import Entry, parse_bank
from recckpt.load.inventory import checkpoint_inventory, names_here, registered_names
from recckpt.load.matching import Inventory, Offer
from recckpt.load.problems import Problems
from recckpt.load.selection import Name
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles
from recckpt.sparse.files.catalogs import met_shards, read_parts
from recckpt.storage import Storage

log = logging.getLogger("recckpt")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Needs:
    """What a rank reads of the files of which each rank reads some.

    Attributes:
        shard: number of this rank.
        shards: number of ranks.
        slices: slot of a table of the model -> the ids that this rank owns, None for all.
        positions: whether it has positions in the data.
        gathers: whether a registered object takes what it needs from the states of all ranks that saved.
    """

    shard: int
    shards: int
    slices: Mapping[Name, Slice | None]
    positions: bool
    gathers: bool


@dataclass
class Source:
    """One checkpoint, what is wanted of it, and its files while they are read."""

    entry: Entry
    storage: Storage
    checkpoint: Checkpoint
    bytes_read: int = 0
    _held: HeldFiles | None = None
    _tensors: DenseTensors | None = None
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)
    _inventories: dict[tuple[str, ...], Inventory] = field(default_factory=dict)
    _parts: list[Part] | None = None

    @property
    def label(self) -> str:
        """Where it is."""
        return layout.join(self.storage.url.removesuffix("/"), self.checkpoint.directory)

    @property
    def called(self) -> str:
        """What messages call it: the entry of a bank, and where it is."""
        return f"{self.entry.label} ({self.label})" if self.entry.path else self.label

    @property
    def shards(self) -> int:
        """How many ranks wrote it."""
        return len(self.checkpoint.manifest.shards)

    @property
    def files(self) -> HeldFiles:
        """Its files; what every rank reads is opened when they are first asked for, the rest by :meth:`hold`.

        Raises:
            CheckpointRemovedError: it is gone already.
            CorruptCheckpointError: a file is missing.
        """
        if self._held is None:
            sizes = {file.name: file.n_bytes for file in self.checkpoint.manifest.files}
            common = [name for name in sizes if not layout.is_of_rank(name)]
            self._held = HeldFiles(self.storage, self.checkpoint.directory, sizes, common)
        return self._held

    def hold(self, needs: Needs) -> None:
        """Open what a rank needs, so that no writer that removes it disturbs.

        Raises:
            CheckpointRemovedError, CorruptCheckpointError: as :attr:`files`; or a catalog is damaged.
        """
        there = range(self.shards) if needs.positions and self.shards != needs.shards else {0, needs.shard}
        of_ranks = [layout.rng(needs.shard), *(layout.io_state(shard) for shard in there)]
        there = range(self.shards) if needs.gathers and self.shards != needs.shards else {0, needs.shard}
        of_ranks += [layout.extra_of(shard) for shard in there]
        self.files.hold(name for name in of_ranks if self.checkpoint.manifest.file(name))
        slices = {own for name, own in needs.slices.items() if self.entry.wants(name)}
        if slices and self._parts is None:
            manifest = self.checkpoint.manifest
            catalogs = {manifest.shards[number].catalog for number in met_shards(manifest, slices)}
            self.files.hold(sorted(catalogs))
            self.bytes_read += sum(file.n_bytes for file in manifest.files if file.name in catalogs)
            self._parts = read_parts(self.checkpoint, self.files, slices)
            self.files.hold(part.file for part in self._parts)

    def release(self) -> None:
        """Close the files, and forget what was read of them; what it offers is kept."""
        if self._tensors is not None:
            self.bytes_read += self._tensors.bytes_read
            self._tensors.close()
        self._held, self._tensors, self._parts, self._states = None, None, None, {}

    @property
    def tensors(self) -> DenseTensors:
        """Its dense tensors.

        Raises:
            CorruptCheckpointError: an index of them is damaged.
        """
        if self._tensors is None:
            self._tensors = DenseTensors(self.files, self.checkpoint.directory, self.checkpoint.manifest)
        return self._tensors

    def offer(self, model: Inventory) -> Offer:
        """Return what it has of the names of a model."""
        dense = tuple(name.text for name in model if name.group == "dense")
        if dense not in self._inventories:
            self._inventories[dense] = checkpoint_inventory(self.checkpoint, self.files, dense, self.tensors)
        return Offer(self.entry, self.label, self._inventories[dense])

    @property
    def registered(self) -> list[Name]:
        """The names of objects whose state it has."""
        return registered_names(self.checkpoint)

    @property
    def extras_of_ranks(self) -> tuple[str, ...]:
        """The names of objects of which each rank has saved a state of its own."""
        return self.checkpoint.manifest.names.extra_of_ranks

    @property
    def parts(self) -> list[Part]:
        """The parts with rows for the rank that :meth:`hold` was called for."""
        return self._parts or []

    def state(self, name: str) -> Mapping[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty where the checkpoint has no such file."""
        if name not in self._states:
            self._states[name] = self.read_once(name)
        return self._states[name]

    def read_once(self, name: str) -> dict[str, Any]:
        """Return what :meth:`state` does, and do not keep it."""
        from recckpt.dense.loader import load_state  # torch, which a plan does without

        entry = self.checkpoint.manifest.file(name)
        self.bytes_read += entry.n_bytes if entry else 0
        return load_state(self.files, self.checkpoint.directory, entry) if entry else {}

    def value(self, name: str, key: str) -> Any:
        """Return what a ``.pt`` file has under a key.

        Raises:
            CorruptCheckpointError: nothing, though the manifest says that it has.
        """
        state = self.state(name)
        if key not in state:
            raise self.corrupt(name, repr(key), found="nothing", expected="its state, as the manifest says")
        return state[key]

    def own_state(self, file_of: Callable[[int], str], name: str, shard: int) -> Any:
        """Return the state of a rank; where it had none, that of rank 0, or of the first that had one."""
        own = self.state(file_of(shard))
        if name in own:
            return own[name]
        for other in range(self.shards):
            found = self.state(file_of(other))
            if name in found:
                log.warning("%s: rank %d had no state of %r, it takes that of rank %d", self.label, shard, name, other)
                return found[name]
        return self.value(file_of(shard), name)  # an error: the manifest says that a rank has one

    def corrupt(self, name: str, where: str, *, found: object, expected: object) -> CorruptCheckpointError:
        """Return the error that says what is wrong with a file."""
        path = layout.join(self.checkpoint.directory, name)
        return CorruptCheckpointError(path, where, found=found, expected=expected)

    def dense(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dense state under the model's names; of sharded tensors, where their values lie."""
        from recckpt.dense.loader import check_indexed  # torch, which a plan does without

        found = dict(self.state(layout.MODEL))
        path, names = layout.join(self.checkpoint.directory, layout.MODEL), self.checkpoint.manifest.names.dense
        check_indexed(found, self.tensors.model, names, path)
        found |= {name: tensor for name, tensor in self.tensors.model.items() if tensor.is_sharded}
        return self.under_names_of(live, found)

    def under_names_of(self, live: Iterable[str], found: Mapping[str, _T]) -> dict[str, _T]:
        """Return what is known by names of tensors there by those of a model, where one of the two was wrapped."""
        here = names_here(self.checkpoint.manifest.names.dense, live)
        return {here.get(name, name): value for name, value in found.items()}


def open_files(sources: Sequence[Source], needs: Needs) -> None:
    """Open what a rank needs of some checkpoints before anything changes.

    Raises:
        CheckpointRemovedError, CorruptCheckpointError: as :meth:`Source.hold`.
    """
    for source in sources:
        source.hold(needs)


def bank_sources(bank: Sequence[Mapping[str, Any]], problems: Problems) -> list[Source]:
    """Return the checkpoints of a bank in order, and add what is wrong with its entries to ``problems``."""
    sources = []
    for entry in parse_bank(bank, problems.conf):
        if entry.path:
            try:
                sources.append(locate_source(entry))
            except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError) as error:
                problems.not_found.append((entry, error))
            except (OSError, ValueError) as error:
                problems.conf.append(f"{entry.label}['path']: {error}")
    return sources


def located_bank(bank: Sequence[Mapping[str, Any]]) -> tuple[list[Source], Problems]:
    """Return the checkpoints of a bank in order, and what is wrong with its entries."""
    problems = Problems()
    return bank_sources(bank, problems), problems


def locate_source(entry: Entry) -> Source:
    """Return the checkpoint that an entry means: the one at its path, or the newest in the output dir there."""
    return Source(entry, *locate_path(entry.path))
