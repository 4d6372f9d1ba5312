"""Where a load takes things from: the checkpoints of a bank, found and opened (no torch before a state is read)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recckpt import layout
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.inventory import checkpoint_inventory, dense_prefix, registered_names
from recckpt.listing import Checkpoint, locate_path
from recckpt.load_conf import Entry, parse_bank
from recckpt.load_plan import Inventory, Offer
from recckpt.names import Name
from recckpt.problems import Problems
from recckpt.sparse.catalog import Part
from recckpt.sparse.shards import read_parts
from recckpt.storage import Storage


@dataclass
class Source:
    """One checkpoint, what is wanted of it, and its small files as far as they have been read."""

    entry: Entry
    storage: Storage
    checkpoint: Checkpoint
    bytes_read: int = 0
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Where it is."""
        return layout.join(self.storage.url.removesuffix("/"), self.checkpoint.directory)

    @property
    def shards(self) -> int:
        """How many ranks wrote it."""
        return len(self.checkpoint.manifest.shards)

    def offer(self, model: Inventory) -> Offer:
        """Return what it has of the names of a model."""
        dense = [name.text for name in model if name.group == "dense"]
        return Offer(self.entry, self.label, checkpoint_inventory(self.checkpoint, self.storage, dense))

    @property
    def registered(self) -> list[Name]:
        """The names of objects whose state it has."""
        return registered_names(self.checkpoint, self.storage)

    def parts(self) -> list[Part]:
        """Return the parts of all shards, from their catalogs."""
        catalogs = {shard.catalog for shard in self.checkpoint.manifest.shards}
        self.bytes_read += sum(file.n_bytes for file in self.checkpoint.manifest.files if file.name in catalogs)
        return read_parts(self.checkpoint, self.storage)

    def state(self, name: str) -> Mapping[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty where the checkpoint has no such file."""
        if name not in self._states:
            from recckpt.dense.loader import load_state  # torch, which a plan does without

            entry = self.checkpoint.manifest.file(name)
            self._states[name] = load_state(self.storage, self.checkpoint.directory, entry) if entry else {}
            self.bytes_read += entry.n_bytes if entry else 0
        return self._states[name]

    def value(self, name: str, key: str) -> Any:
        """Return what a ``.pt`` file has under a key.

        Raises:
            CorruptCheckpointError: nothing, though the manifest says that it has.
        """
        state = self.state(name)
        if key not in state:
            raise self.corrupt(name, repr(key), found="nothing", expected="its state, as the manifest says")
        return state[key]

    def corrupt(self, name: str, where: str, *, found: object, expected: object) -> CorruptCheckpointError:
        """Return the error that says what is wrong with a file."""
        path = layout.join(self.checkpoint.directory, name)
        return CorruptCheckpointError(path, where, found=found, expected=expected)

    def dense(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dense state under the model's names."""
        found = self.state(layout.MODEL)
        strip, add = dense_prefix(found, live)
        return {add + name.removeprefix(strip): value for name, value in found.items()}


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


def locate_source(entry: Entry) -> Source:
    """Return the checkpoint that an entry means: the one at its path, or the newest in the output dir there."""
    return Source(entry, *locate_path(entry.path))
