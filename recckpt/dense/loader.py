"""``.pt`` files to dense state: checked whole, then loaded without running any code from them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from recckpt.errors import CorruptCheckpointError, StateMismatchError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.checked import read_checked
from recckpt.storage.base import Files

_EXTRA_STATE = "_extra_state"  # torch's: what a module gives it takes back, of whatever shape


def load_state(storage: Files, directory: str, entry: FileEntry) -> dict[str, Any]:
    """Return the dict in a ``.pt`` file, on the CPU.

    Raises:
        CorruptCheckpointError: damaged, no torch file, or one that needs code to run.
    """
    data, path = read_checked(storage, directory, entry), layout.join(directory, entry.name)
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # its bytes are those that were written, so whoever wrote them meant harm
        found, remedy = f"not loadable ({_reason(error)})", "do not load this file with weights_only=False"
        raise CorruptCheckpointError(
            path, "", found=found, expected="tensors and plain data", remedy=f"nothing of it was run; {remedy}"
        ) from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(path, "", found=type(state).__name__, expected="a dict")
    return state


def _reason(error: Exception) -> str:
    """Return what torch says is wrong, without its advice to load the file all the same."""
    said = [line.strip() for line in str(error).splitlines()]
    said = [line.partition(" Please ")[0] for line in said if line and "weights_only" not in line]
    return f"{type(error).__name__}: {said[0]:.200}" if said else type(error).__name__


def check_fits(found: Mapping[str, Any], live: Mapping[str, Any], *, strict: bool) -> None:
    """Compare dense state from a file with the model's, before anything is copied.

    Raises:
        StateMismatchError: a shape or dtype differs, or, with ``strict``, a name on either side has no partner.
    """
    mismatched = {
        name: (_describe(found[name]), _describe(live[name]))
        for name in live
        if name in found and not name.endswith(_EXTRA_STATE) and _describe(found[name]) != _describe(live[name])
    }
    missing = [name for name in live if name not in found] if strict else []
    unexpected = [name for name in found if name not in live] if strict else []
    if missing or unexpected or mismatched:
        remedy = "pass load_conf={'strict': False} to load what fits by name" if missing or unexpected else ""
        raise StateMismatchError(
            "model.pt", missing=missing, unexpected=unexpected, mismatched=mismatched, remedy=remedy
        )


def _describe(value: Any) -> str:
    """Name what has to agree: dtype and shape of tensors, whatever else is plain data."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "plain data"
