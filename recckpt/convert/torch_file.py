"""Reads files of torch.save without running code, and wraps their tensors for an import."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recckpt.convert.source import Array, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import NUMPY_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

_BROKEN = (RuntimeError, EOFError, ValueError, KeyError, OSError, zipfile.BadZipFile, AttributeError, TypeError)


def load_torch(files: SourceFiles, name: str) -> Any:
    """Return ``torch.load(weights_only=True)`` of a file, mapped if possible; ConversionError if it fails."""
    import torch

    path, local = files.path(name), files.local(name)
    try:
        if local is not None and zipfile.is_zipfile(local):
            return torch.load(local, map_location="cpu", weights_only=True, mmap=True)
        with files.open(name) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = f"a pickle that needs code to load ({_reason_of(error)})"
        remedy = "no code was run and nothing was written; save only tensors and plain values, such as a state_dict()"
        raise ConversionError(path, "", found=found, expected="tensors and plain values", remedy=remedy) from error
    except _BROKEN as error:
        found = f"what torch cannot read ({str(error).splitlines()[0] if str(error) else type(error).__name__:.200})"
        raise ConversionError(path, "", found=found, expected="an undamaged file of torch.save") from error


def _reason_of(error: Exception) -> str:
    """Return torch's error message without its advice to load the file with ``weights_only=False``."""
    lines = [line.strip().partition("WeightsUnpickler error: ")[-1] or line.strip() for line in str(error).splitlines()]
    advice = ("weights_only", "Weights only load failed")
    lines = [line.partition(" Please ")[0] for line in lines if line and not any(words in line for words in advice)]
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__


def load_torch_dict(files: SourceFiles, name: str) -> dict[str, Any]:
    state = load_torch(files, name)
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ConversionError(files.path(name), "", found=f"a {type(state).__name__}", expected="a dict by name")
    return dict(state)


def tensor_of(name: str, value: Tensor, path: str) -> SourceTensor:
    """Wrap a torch tensor for an import; ConversionError for a kind that a checkpoint cannot store."""
    import torch

    from recckpt.dense.state_copy import plain_tensor

    try:
        tensor = plain_tensor(name, value)
    except ValueError as error:
        raise ConversionError(path, f"tensor {name!r}", found=str(error), expected="plain values") from error
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NUMPY_DTYPES:
        raise ConversionError(path, f"tensor {name!r}", found=f"values of {dtype}", expected="a supported dtype")

    def read(begin: int, end: int) -> Array:
        rows = (tensor if tensor.dim() else tensor.reshape(1))[begin:end].resolve_conj().resolve_neg()
        bits: Array = rows.contiguous().reshape(-1).view(torch.uint8).numpy().view(NUMPY_DTYPES[dtype])
        return bits.reshape(rows.shape)

    same = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype)
    return SourceTensor(name, dtype, tuple(tensor.shape), same, read)


def split_values(state: Mapping[str, Any], path: str) -> tuple[dict[str, SourceTensor], dict[str, Any]]:
    import torch

    tensors = {name: tensor_of(name, value, path) for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, portable_values({name: value for name, value in state.items() if name not in tensors}, path)


def portable_values(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return values in types that a checkpoint can store; ConversionError if there are other values."""
    from recckpt.dense.state_copy import portable

    try:
        return {name: portable(name, value) for name, value in values.items()}
    except ValueError as error:
        raise ConversionError(path, "", found=str(error), expected="tensors and plain values") from error
