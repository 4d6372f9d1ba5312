"""A trained model, to be evaluated or served: a checkpoint loaded into a model, without a saver, writing nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from recckpt.dense.registered import extra_registry, io_registry
from recckpt.errors import LoadConfError
from recckpt.format.names import GROUPS, Name
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.loader import Loader
from recckpt.load.problems import Problems
from recckpt.load.report import LoadReport
from recckpt.load.source import LocatedBank, OpenCheckpoint, locate_given
from recckpt.storage import absolute, open_storage

_THREADS = 4  # that read


def load_into(
    model: nn.Module,
    path: str | os.PathLike[str] | OpenCheckpoint,
    *,
    load_conf: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load the tables and the dense state of a trained model, to evaluate or serve it; writes nothing.

    What only training needs (optimizers, registered objects, positions in the data) is neither loaded nor missed. Call
    ``model.eval()`` to look up without making rows. Not collective: under ``torchrun`` each rank that calls it loads
    the ids that its tables own. Not thread-safe: nobody uses the model meanwhile.

    Args:
        model: any module; what it has must be in the checkpoint, and the other way round, where ``load_conf`` does
            not say otherwise.
        path: a checkpoint, or an output dir, which stands for its newest checkpoint; a path or any fsspec URL, which
            need not be writable. Or one that is open, as :func:`recckpt.follow` yields it.
        load_conf: what to take, as of :meth:`recckpt.Saver.load`; None for all of the model.

    Returns:
        What was taken from where; its ``global_step`` is that of the checkpoint.

    Raises:
        TypeError: ``model`` is not a module.
        CheckpointNotFoundError: there is no checkpoint.
        LoadConfError, StateMismatchError: what is asked for does not exist or does not fit; nothing has changed.
        CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed before it was read.
        PartlyLoadedError: reading failed when tables that had rows had been changed.
    """
    entry, place = serving_entry(model, load_conf), place_of(path)
    loader = serving_loader(model, place)
    return loader.load_located(lambda: LocatedBank([locate_given(entry, place)], Problems()))


def serving_entry(model: nn.Module, load_conf: Mapping[str, Any] | None) -> Entry:
    """Return what is to be loaded into a model that is not trained; TypeError, LoadConfError where that cannot be."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    entry = replace(parse_load_conf(load_conf), serves=True)
    _check_groups(entry)
    return entry


def place_of(path: str | os.PathLike[str] | OpenCheckpoint) -> str | OpenCheckpoint:
    """Return a path wherever the process goes, and what is open as it is."""
    return path if isinstance(path, OpenCheckpoint) else absolute(os.fspath(path))


def serving_loader(model: nn.Module, place: str | OpenCheckpoint) -> Loader:
    """Return what loads into a model that is not trained."""
    storage = place.chain.storage if isinstance(place, OpenCheckpoint) else open_storage(place)
    return Loader(model, None, extra_registry(), io_registry(), storage, _THREADS, None)


def _check_groups(entry: Entry) -> None:
    """Refuse groups of which nothing is loaded here."""
    groups = [group for group in GROUPS if Name(group, "").is_of_training]
    if asked := [pattern.text for pattern in entry.load if pattern.text in groups]:
        what = f"'load': only training needs {', '.join(map(repr, asked))}: Saver.load takes that, load_into does not"
        raise LoadConfError([f"{entry.label}: {what}"])
