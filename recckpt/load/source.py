"""Locates the checkpoints of a load, and replacements for damaged checkpoints. Does not import torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.load.conf import Entry, parse_bank
from recckpt.load.problems import Problems
from recckpt.output_dir.at_path import locate_id, locate_path, open_checkpoint
from recckpt.output_dir.listing import Checkpoint, Listing, chained, list_checkpoints, newest
from recckpt.storage import Storage, absolute, open_storage

log = logging.getLogger("recckpt")


@runtime_checkable
class OpenCheckpoint(Protocol):
    """An object that has a checkpoint open, such as a :class:`recckpt.CheckpointReader`."""

    @property
    def chain(self) -> OpenChain:
        """The open files."""


@dataclass(frozen=True)
class LocatedCheckpoint:
    entry: Entry  # the names to load
    storage: Storage  # output dir
    checkpoint: Checkpoint  # with its parents
    loaded_save_id: str = ""  # save id of the link whose rows the model's tables have, unchanged; "" for none
    opened: OpenChain | None = None  # open files, if the caller has them; the caller closes them

    @property
    def label(self) -> str:
        return (self.checkpoint.near_dir or self.storage).url_of(self.checkpoint.directory)

    @property
    def shards(self) -> int:
        return len(self.checkpoint.manifest.shards)

    @property
    def extras_of_ranks(self) -> tuple[str, ...]:
        return self.checkpoint.manifest.names.extra_of_ranks


@dataclass(frozen=True)
class LocatedBank:
    sources: Sequence[LocatedCheckpoint]
    problems: Problems


def locate_given(entry: Entry, place: str | os.PathLike[str] | OpenCheckpoint) -> LocatedCheckpoint:
    if isinstance(place, OpenCheckpoint):
        chain = place.chain
        return LocatedCheckpoint(entry, chain.storage, chain.checkpoint, opened=chain)
    return LocatedCheckpoint(entry, *locate_path(os.fspath(place)))


def locate_bank(bank: Sequence[Mapping[str, Any]]) -> LocatedBank:
    problems, sources = Problems(), []
    for entry in parse_bank(bank, problems.conf):
        if entry.path:
            try:
                here = replace(entry, path=absolute(entry.path))  # the working directory may change before a retry
                sources.append(locate_given(here, here.path))
            except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError) as error:
                problems.not_found.append((entry, error))
            except (OSError, ValueError) as error:
                problems.conf.append(f"{entry.label}['path']: {error}")
    return LocatedBank(sources, problems)


def locate_asked(
    own: Storage, ckpt_path: str | None, ckpt_id: str | None, direct_path: bool
) -> tuple[Storage, Checkpoint]:
    if direct_path:
        try:
            return open_checkpoint(str(ckpt_path))
        except CheckpointNotFoundError as error:  # the path may be an id that was given to ``save``
            try:
                is_id = list_checkpoints(own).find(str(ckpt_path)) is not None
            except OSError:
                is_id = False
            if not is_id:
                raise
            hint = f"the own output dir has a checkpoint {ckpt_path!r}: load(ckpt_id={ckpt_path!r}) loads it"
            raise CheckpointNotFoundError(f"{error}; {hint}") from error
    if ckpt_id is not None:
        storage = own if ckpt_path is None else open_storage(str(ckpt_path))
        return storage, locate_id(storage, ckpt_id)
    if ckpt_path is None:
        return own, newest(own)
    try:  # an id of the own output dir takes precedence over a path
        return own, locate_id(own, str(ckpt_path))
    except (OSError, ValueError) as error:  # not an id, or not an id of this output dir
        not_own = error
    try:
        return locate_path(str(ckpt_path))
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}; nor is it a checkpoint of the own output dir: {not_own}") from error


@dataclass
class KnownDamage:
    """The damage found by reading so far, by output dir and directory. Not thread-safe."""

    _errors: dict[str, dict[str, CorruptCheckpointError]] = field(default_factory=dict)

    def note(self, storage: Storage, directory: str, error: CorruptCheckpointError) -> None:
        self._errors.setdefault(storage.url, {})[directory] = error

    def whole(self, storage: Storage) -> Listing:
        """Return the listing of an output dir without checkpoints that need damaged files."""
        listing = list_checkpoints(storage)
        return replace(listing, committed=chained(listing.committed, self._errors.get(storage.url, {}))[0])

    def instead(self, bank: LocatedBank, error: CorruptCheckpointError) -> LocatedBank | None:
        """Return a bank with replacements for the checkpoints that an error may be about; None without replacements.

        The error names only a directory, and several output dirs may have a directory of this name.
        """
        others = [self.stand_in(source, error) for source in bank.sources]
        sources = [other or source for other, source in zip(others, bank.sources, strict=True)]
        return replace(bank, sources=sources) if any(others) else None

    def stand_in(self, source: LocatedCheckpoint, error: CorruptCheckpointError) -> LocatedCheckpoint | None:
        """Return another checkpoint of the same name if an error may be about this one; None if there is none."""
        directory = damaged_link(source.checkpoint, error)
        if directory is None:
            return None
        self.note(source.storage, directory, error)
        try:
            there = self.whole(source.storage).named(source.checkpoint.manifest.name)
        except OSError:  # the bucket or directory may be entered but not listed
            return None
        if there is None:
            return None
        other = replace(source, checkpoint=there, opened=None)
        log.error("%s is damaged, reading %s instead: %s", source.label, other.label, error)
        return other


def damaged_link(checkpoint: Checkpoint, error: CorruptCheckpointError) -> str | None:
    directories = (link.directory for link in checkpoint.links)
    return next((name for name in directories if error.path.startswith(f"{name}/")), None)
