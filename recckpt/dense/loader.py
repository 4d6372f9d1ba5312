"""``.pt`` files to dense state: checked whole, then loaded without running any code from them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch

from recckpt.dense.tiling import StoredTensor
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.checked import read_checked
from recckpt.storage.base import Files


def load_state(storage: Files, directory: str, entry: FileEntry) -> dict[str, Any]:
    """Return the dict in a ``.pt`` file, on the CPU.

    Raises:
        CorruptCheckpointError: damaged, no torch file, or one that needs code to run.
    """
    data, path = read_checked(storage, directory, entry), layout.join(directory, entry.name)
    return loaded(io.BytesIO(data), path, "cpu")


def loaded(file: BinaryIO, path: str, device: str) -> dict[Any, Any]:
    """Return the dict in a file of torch.save, without running any code from it; messages call it ``path``.

    Raises:
        CorruptCheckpointError: no torch file, or one that needs code to run.
        OSError: it cannot be read.
    """
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except OSError:
        raise
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
    said = [line.strip().partition("WeightsUnpickler error: ")[-1] or line.strip() for line in str(error).splitlines()]
    advice = ("weights_only", "Weights only load failed")
    said = [line.partition(" Please ")[0] for line in said if line and not any(words in line for words in advice)]
    return f"{type(error).__name__}: {said[0]:.200}" if said else type(error).__name__


def check_indexed(
    state: Mapping[str, Any], tensors: Mapping[str, StoredTensor], names: Iterable[str], path: str
) -> None:
    """Check that ``model.pt`` holds what the index lists, and of plain values what the manifest names, and no more.

    Raises:
        CorruptCheckpointError: it does not; names what differs.
    """
    expected = {name: _described(tensors.get(name)) for name in names if not _is_elsewhere(tensors.get(name))}
    found = {name: _described(value) for name, value in state.items()}
    for name in (*expected, *found):
        if expected.get(name) != found.get(name):
            there, listed = found.get(name, "nothing"), expected.get(name, "nothing")
            raise CorruptCheckpointError(path, repr(name), found=there, expected=f"{listed}, by index and manifest")


def _is_elsewhere(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.is_sharded


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | StoredTensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "plain data"
