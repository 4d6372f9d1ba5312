"""Finds checkpoints of an output dir, and which are kept because others need them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import StateValue
from recckpt.output_dir.at_path import read_checkpoint
from recckpt.output_dir.listing import Checkpoint, Listing, describe, newest_first
from recckpt.policies.keep import Best, best_id
from recckpt.storage import Storage, open_parent, open_storage

Place = str | os.PathLike[str]
State = Mapping[str, StateValue]


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        path: path or URL of the checkpoint; readers and loads take it.
        ckpt_id: id of the checkpoint.
        step: global step; None if the saver does not count steps.
        time: time of the commit, in UTC, as ISO 8601.
        kind: ``"full"`` or ``"delta"``.
        ephemeral: whether it is removed once a newer one is committed.
        n_bytes: size of the checkpoint's own files.
        state: numbers and strings saved with the checkpoint, such as metrics.
    """

    path: str
    ckpt_id: str
    step: int | None
    time: str
    kind: str
    ephemeral: bool
    n_bytes: int
    state: dict[str, StateValue]


def list_checkpoints(path: Place, state: State | None = None) -> list[CheckpointInfo]:
    """Return the usable checkpoints of an output dir, oldest first; [] if it is empty. Needs no torch.

    Damaged checkpoints are left out and logged as errors.

    Args:
        path: an output dir; any fsspec URL.
        state: only checkpoints saved with these entries, such as the label ``{"day": "2026-11-22"}``; None for all.

    Raises:
        TypeError: ``state`` is not a mapping.
        CheckpointNotFoundError: ``path`` is a checkpoint, or is not a directory.
        FormatVersionError: a newer recckpt wrote a checkpoint there.
        CorruptCheckpointError: all checkpoints are damaged.
    """
    storage, present, labelled = _present(path, state)
    if not present and storage.why_empty():
        raise CheckpointNotFoundError(f"{storage.url}: {storage.why_empty()}, expected an output dir")
    if not present:
        refuse_checkpoint(storage.url)
    return [_info(storage, each) for each in reversed(labelled)]


def find_checkpoint(
    path: Place,
    which: int | Literal["latest", "best"] | str,
    metric: str | Mapping[str, float] | None = None,
    mode: Literal["max", "min"] = "max",
    *,
    state: State | None = None,
) -> CheckpointInfo:
    """Return one checkpoint of an output dir. Needs no torch.

    Args:
        path: an output dir; any fsspec URL.
        which: a step, ``"latest"``, ``"best"``, or an id such as ``"ckpt_300"``.
        metric: for ``"best"``: name of a number saved with the checkpoints, or several names with weights, as in
            :class:`recckpt.policies.keep.Best`.
        mode: for ``"best"``: whether the greatest or the least value is best; of equal values, the newest checkpoint.
        state: only checkpoints saved with these entries, such as the label ``{"day": "2026-11-22"}``.

    Raises:
        TypeError: ``state`` is not a mapping.
        ValueError: ``"best"`` without a metric, or a metric without ``"best"``.
        CheckpointNotFoundError: there is no such checkpoint; the message lists the existing ones.
        FormatVersionError, CorruptCheckpointError: as :func:`list_checkpoints`.
    """
    if isinstance(which, bool) or not isinstance(which, int | str) or (which == "best") != (metric is not None):
        call = f"which={which!r} and metric={metric!r}"
        raise ValueError(f"found {call}, expected a step, 'latest' or an id alone, or 'best' with the name of a metric")
    storage, present, choice = _present(path, state)
    if state and present and not choice:
        entries = [item for each in present for item in each.manifest.state.items() if item[0] in state]
        there = ", ".join(sorted({f"{name}={value!r}" for name, value in entries})) or "none"
        problem = f"found no checkpoint that was saved with {dict(state)}, expected one; there are {there}"
        raise CheckpointNotFoundError(f"{storage.url}: {problem}")
    ckpt_id = _id_of_step(choice, which, storage.url) if isinstance(which, int) else which
    if metric is not None:
        ckpt_id = best_id([checkpoint.manifest for checkpoint in reversed(choice)], Best(1, metric, mode), storage.url)
    match = choice[0] if choice and which == "latest" else next((c for c in choice if c.ckpt_id == ckpt_id), None)
    if match is None:
        raise CheckpointNotFoundError(f"{storage.url}: found no checkpoint {which!r}; {describe(choice[::-1])}")
    return _info(storage, match)


def is_checkpoint(path: Place) -> bool:
    """Return whether a path or URL is itself a committed checkpoint with all its files. Needs no torch."""
    try:
        return read_checkpoint(*open_parent(os.fspath(path))) is not None
    except (CheckpointNotFoundError, CorruptCheckpointError, ValueError):
        return False


def refuse_checkpoint(path: Place) -> None:
    """Raise CheckpointNotFoundError if a path, expected to be an output dir, is a checkpoint."""
    if is_checkpoint(path):
        what = "is a checkpoint itself, expected an output dir; name its parent"
        raise CheckpointNotFoundError(f"{os.fspath(path)}: {what}")


def _id_of_step(checkpoints: Sequence[Checkpoint], step: int, place: str) -> str:
    """Return the checkpoint id of a step, with the default prefix or a manager's own prefix."""
    usual, ending = layout.step_id(step), layout.step_id(step, "")
    named = [each.ckpt_id for each in checkpoints if each.manifest.step == step and each.ckpt_id.endswith(ending)]
    if not named or any(each.ckpt_id == usual for each in checkpoints):
        return usual
    if len(named) > 1:
        names = " and ".join(map(repr, sorted(named)))
        raise CheckpointNotFoundError(f"{place}: step {step} belongs to {names}: name the one you mean by its id")
    return named[0]


def _present(path: Place, state: State | None) -> tuple[Storage, list[Checkpoint], list[Checkpoint]]:
    """Return an output dir, its checkpoints, newest first, and those saved with the entries of ``state``."""
    if not isinstance(state, Mapping | None):
        raise TypeError(f"state must be a mapping of names to values, or None, found {state!r:.200}")
    storage, labels = open_storage(os.fspath(path)), dict(state or {})
    present = newest_first(storage)
    states = ((each, each.manifest.state) for each in present)
    return storage, present, [each for each, s in states if labels == {name: s[name] for name in s if name in labels}]


def _info(storage: Storage, checkpoint: Checkpoint) -> CheckpointInfo:
    record = checkpoint.manifest
    path = storage.url_of(checkpoint.directory)
    own = (record.ckpt_id, record.step, record.time, record.kind, record.ephemeral, record.n_bytes)
    return CheckpointInfo(path, *own, dict(record.state))


SECOND_CHAIN = "second chain"  # see second_chain()


def needed_by(listing: Listing) -> dict[str, list[Checkpoint]]:
    """Return, for each directory of a base, the current checkpoints that need this base, oldest first."""
    needed: dict[str, list[Checkpoint]] = {}
    for checkpoint in listing.current:
        for link in checkpoint.below:
            needed.setdefault(link.directory, []).append(checkpoint)
    return needed


def second_chain(listing: Listing) -> Checkpoint | None:
    """Return the newest checkpoint of the chain before the newest chain; None if the newest checkpoint is full.

    Rotation keeps it, so that damage to one full checkpoint does not make all checkpoints useless.
    """
    regular = [checkpoint for checkpoint in listing.current if not checkpoint.manifest.ephemeral]
    if not regular or not regular[-1].below:
        return None
    base = regular[-1].links[-1].directory
    return next((each for each in reversed(regular) if each.links[-1].directory != base), None)
