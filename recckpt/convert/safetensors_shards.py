"""Shards that ``HuggingFaceStorageWriter(save_distributed=True)`` of torch writes: each file has parts of tensors.

The metadata of every file of this writer says where its tensors begin, also of whole ones
(``save_distributed=False``); how many shards there are it does not say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from recckpt.convert.pieces import SourceBox, put_together
from recckpt.convert.safetensors_file import TensorFile
from recckpt.convert.source import LeftOut, SourceTensor
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError
from recckpt.text import plural

SHARDING, VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"  # keys of torch's metadata
_WHOLE = re.compile(r"(.*/)?model-\d+-of-\d+\.safetensors", re.ASCII)
_Offsets = Mapping[str, tuple[int, ...]]


def are_shards(parts: Mapping[str, TensorFile], files: SourceFiles) -> bool:
    """Say whether tensors of these files may go on in other files.

    Where all of them begin at 0 the file is the first shard or a whole model: its name, which torch gave it, shows
    which.
    """
    of_torch = {name: part for name, part in parts.items() if SHARDING in part.metadata}
    begins = {name: _offsets(name, part, files).values() for name, part in of_torch.items()}
    return any(not _WHOLE.fullmatch(name) or any(map(any, offsets)) for name, offsets in begins.items())


def joined(parts: Mapping[str, TensorFile], files: SourceFiles) -> dict[str, SourceTensor]:
    """Return the tensors of a directory of shards.

    Raises:
        ConversionError: it is one file of them, a file is no shard, or values are missing or there twice.
    """
    if files.is_file:
        found = "a file whose tensors may go on in other shards"
        expected = "the directory with all shards of the save"
        remedy = "give the directory; if the file is whole, call it model-00001-of-00001.safetensors, as torch does"
        raise ConversionError(files.url, SHARDING, found=found, expected=expected, remedy=remedy)
    pieces: dict[str, list[tuple[SourceTensor, tuple[int, ...]]]] = {}
    for name, part in parts.items():
        offsets = _offsets(name, part, files)
        for key, tensor in part.tensors.items():
            pieces.setdefault(key, []).append((tensor, offsets[key]))
    return {key: _tensor(key, its_pieces, files) for key, its_pieces in pieces.items()}


def of_shards(parts: Mapping[str, TensorFile]) -> LeftOut:
    """Return what is to be known of tensors that were put together."""
    reason = f"tensors are put together from {plural(len(parts), 'file')}; how many there were torch does not keep"
    return LeftOut(f"__metadata__ {SHARDING}", reason)


def _tensor(key: str, its_pieces: list[tuple[SourceTensor, tuple[int, ...]]], files: SourceFiles) -> SourceTensor:
    dtypes = sorted({tensor.dtype for tensor, _ in its_pieces})
    sides = {len(offsets) for _, offsets in its_pieces}
    if len(dtypes) > 1 or len(sides) > 1:
        found = f"pieces of {', '.join(f'{tensor.dtype} {tensor.shape}' for tensor, _ in its_pieces)}"
        raise ConversionError(files.url, f"tensor {key!r}", found=found, expected="one dtype, and as many dimensions")
    ends = ([at + size for at, size in zip(offsets, tensor.shape, strict=True)] for tensor, offsets in its_pieces)
    shape = tuple(map(max, zip(*ends, strict=True)))
    pieces = [SourceBox(offsets, tensor.shape, tensor.read) for tensor, offsets in its_pieces]
    return put_together(key, dtypes[0], shape, pieces, files.url)


def _offsets(name: str, part: TensorFile, files: SourceFiles) -> _Offsets:
    """Return where the tensors of a file begin; ConversionError where its metadata does not say it of each."""
    text = part.metadata.get(SHARDING, "{}")
    try:
        listed = json.loads(text)
        offsets = {key: tuple(listed[key]["saved_offsets"]) for key in part.tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        expected = "where each tensor begins"
        raise ConversionError(files.path(name), SHARDING, found=f"{text:.80}", expected=expected) from error
    for key, its_offsets in offsets.items():
        are_counts = all(type(at) is int and 0 <= at < 2**59 for at in its_offsets)
        if not are_counts or len(its_offsets) != len(part.tensors[key].shape):
            found, expected = f"offsets {list(its_offsets)!r:.80}", f"{len(part.tensors[key].shape)} numbers from 0 on"
            raise ConversionError(files.path(name), f"tensor {key!r}", found=found, expected=expected)
    return offsets
