"""The model bank: other runs' checkpoints, and the own one as the last word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.listing import locate_path
from recckpt.load_conf import Entry, parse_bank
from recckpt.load_plan import Problems, resolve
from recckpt.names import Name
from recckpt.target import Source, Target


def bank_sources(bank: Sequence[Mapping[str, Any]], problems: Problems) -> list[Source]:
    """Return the checkpoints of a bank in order, and add what is wrong with its entries to ``problems``."""
    sources = []
    for entry in parse_bank(bank, problems.conf):
        if entry.path:
            try:
                sources.append(locate_source(entry))
            except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError) as error:
                problems.not_found.append(error)
            except (OSError, ValueError) as error:
                problems.conf.append(f"{entry.label}['path']: {error}")
    return sources


def locate_source(entry: Entry) -> Source:
    """Return the checkpoint that an entry means: the one at its path, or the newest in the output dir there."""
    return Source(entry, *locate_path(entry.path))


@dataclass(frozen=True)
class Followed:
    """A dynamic entry of a bank: the names that it gives, and the checkpoint that they were taken from."""

    entry: Entry
    save_id: str

    def newer(self) -> Source | None:
        """Return the checkpoint that is there now, None where it is the one taken or there is none."""
        try:
            source = locate_source(self.entry)
        except (CheckpointNotFoundError, CorruptCheckpointError, OSError):
            return None  # a run that is being written or rotated; it is looked at again
        return None if source.checkpoint.manifest.save_id == self.save_id else source


def followed(target: Target, sources: Sequence[Source]) -> list[Followed]:
    """Return the dynamic entries of a bank with the names that they win against the other entries."""
    model = target.inventory()
    items = resolve(model, [source.offer(model) for source in sources], Problems())
    return [
        Followed(replace(source.entry, only=frozenset(_names_of(items, number))), source.checkpoint.manifest.save_id)
        for number, source in enumerate(sources)
        if source.entry.is_dynamic
    ]


def _names_of(items: Sequence[Any], number: int) -> list[Name]:
    return [item.name for item in items if item.offer == number]
