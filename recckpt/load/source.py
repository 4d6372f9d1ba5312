"""Which checkpoints a load takes things from: those of a bank, or the one that was asked for (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.load.conf import Entry, parse_bank
from recckpt.load.problems import Problems
from recckpt.output_dir.at_path import locate_id, locate_path, open_checkpoint
from recckpt.output_dir.listing import Checkpoint, list_checkpoints, newest
from recckpt.storage import Storage, absolute, open_storage


@runtime_checkable
class OpenCheckpoint(Protocol):
    """What has a checkpoint open, such as a :class:`recckpt.CheckpointReader`."""

    @property
    def chain(self) -> OpenChain:
        """The open files."""


@dataclass(frozen=True)
class LocatedCheckpoint:
    """A checkpoint that was located, and what is to be loaded of it."""

    entry: Entry  # what is to be loaded
    storage: Storage  # the output dir that it lies in
    checkpoint: Checkpoint  # the newest link, with those below
    loaded_save_id: str = ""  # of the link whose rows the model's tables still have as they were loaded; "" for none
    opened: OpenChain | None = None  # its files, where the caller has them open; they stay the caller's

    @property
    def label(self) -> str:
        """Where it is."""
        return (self.checkpoint.near_dir or self.storage).url_of(self.checkpoint.directory)

    @property
    def shards(self) -> int:
        """How many ranks wrote it."""
        return len(self.checkpoint.manifest.shards)

    @property
    def extras_of_ranks(self) -> tuple[str, ...]:
        """The names of objects of which each rank has saved a state of its own."""
        return self.checkpoint.manifest.names.extra_of_ranks


@dataclass(frozen=True)
class LocatedBank:
    """The checkpoints of a bank, in its order, and what is wrong with its entries."""

    sources: Sequence[LocatedCheckpoint]
    problems: Problems


def locate_source(entry: Entry) -> LocatedCheckpoint:
    """Return the checkpoint that an entry means: the one at its path, or the newest in the output dir there."""
    return LocatedCheckpoint(entry, *locate_path(entry.path))


def locate_given(entry: Entry, place: str | os.PathLike[str] | OpenCheckpoint) -> LocatedCheckpoint:
    """Return the checkpoint that a caller means: one that is open, that at a path, or the newest in an output dir."""
    if isinstance(place, OpenCheckpoint):
        chain = place.chain
        return LocatedCheckpoint(entry, chain.storage, chain.checkpoint, opened=chain)
    return LocatedCheckpoint(entry, *locate_path(os.fspath(place)))


def locate_bank(bank: Sequence[Mapping[str, Any]]) -> LocatedBank:
    """Return the checkpoints that the entries of a bank mean."""
    problems, sources = Problems(), []
    for entry in parse_bank(bank, problems.conf):
        if entry.path:
            try:
                here = replace(entry, path=absolute(entry.path))  # it may be looked at again from elsewhere
                sources.append(locate_source(here))
            except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError) as error:
                problems.not_found.append((entry, error))
            except (OSError, ValueError) as error:
                problems.conf.append(f"{entry.label}['path']: {error}")
    return LocatedBank(sources, problems)


def locate_asked(
    own: Storage, ckpt_path: str | None, ckpt_id: str | None, direct_path: bool
) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint that :meth:`recckpt.Saver.load` means by these, ``own`` being the own output dir."""
    if direct_path:
        return _at(own, str(ckpt_path))
    if ckpt_id is not None:
        storage = own if ckpt_path is None else open_storage(str(ckpt_path))
        return storage, locate_id(storage, ckpt_id)
    return _named(own, str(ckpt_path)) if ckpt_path is not None else (own, newest(own))


def _named(own: Storage, word: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint that a word means: an id of the own output dir goes before a path."""
    try:
        return own, locate_id(own, word)
    except (OSError, ValueError) as error:  # not an id, or not one of ours
        not_own = error
    try:
        return locate_path(word)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}; nor is it a checkpoint of the own output dir: {not_own}") from error


def _at(own: Storage, path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint at a path; where there is none, look whether it is an id that ``save`` was given."""
    try:
        return open_checkpoint(path)
    except CheckpointNotFoundError as error:
        try:
            is_id = list_checkpoints(own).find(path) is not None
        except OSError:
            is_id = False
        if not is_id:
            raise
        hint = f"the own output dir has a checkpoint {path!r}: load(ckpt_id={path!r}) takes it"
        raise CheckpointNotFoundError(f"{error}; {hint}") from error
