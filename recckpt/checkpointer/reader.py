"""Reads one rank's file, completely, or only the bytes that a state dict needs."""

from __future__ import annotations

import logging
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.checkpointer.staging import child, span
from recckpt.checkpointer.writer import RankInfo, storage_at
from recckpt.dense.loader import unpickled
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError

_log = logging.getLogger(__name__)
_MAX_SHOWN = 10
_HEADER = struct.Struct("<4s22xHH")  # header of a file in a zip: magic, sizes of the name and of the extra field
_STEP_BYTES = 4 << 20
_ALIGNMENT = 64  # alignment of parts of a storage, suitable for every dtype
_MAX_DEPTH = 120  # deeper than anything that pack() makes, and far below the limit of the interpreter's stack
_PLAIN = (type(None), int, float, complex, str, bytes, set, torch.Size, torch.dtype, torch.device)


class StateReader:
    """Reads ``<path>/checkpoint_<rank>.pt``, without running any code from it.

    Args:
        rank_info: this rank.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._name = rank_info.file_name

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: dict[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the state, and the dotted paths that are missing; arguments as in :meth:`Checkpointer.load`."""
        if state_dict is not None and not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is a dict or None, found a {type(state_dict).__name__}")
        storage = storage_at(path)
        place = storage.url_of(self._name)
        try:
            file = storage.open(self._name)
        except FileNotFoundError as error:
            # If the number of ranks differs, the file names differ.
            try:
                others = [name for name in storage.list_files("") if "/" not in name]
            except OSError:
                others = []
            hint = f"found {', '.join(others[:_MAX_SHOWN])}" if others else "there is nothing at all"
            raise CheckpointNotFoundError(
                f"{place}: no such file; {hint}. Load a state with as many ranks as saved it"
            ) from error
        try:
            with file:
                stored = StoredState(file, place, _placing(map_location))
                asked = Comparison(state_dict, stored.tree)
                if asked.mismatched or (strict and asked.missing):
                    remedy = "pass strict=False to load what is there" if not asked.mismatched else ""
                    raise StateMismatchError(place, missing=asked.missing, mismatched=asked.mismatched, remedy=remedy)
                stored.plan(asked.wholes)
                state = stored.filled("", state_dict, stored.tree)
        except CorruptCheckpointError as error:
            if error.remedy != CorruptCheckpointError.REMEDY:  # the default names commands that cannot read such files
                raise
            raise CorruptCheckpointError(
                error.path, error.where, found=error.found, expected=error.expected, remedy="load another checkpoint"
            ) from error
        if asked.missing:
            shown = ", ".join(asked.missing[:_MAX_SHOWN]) + (", ..." if len(asked.missing) > _MAX_SHOWN else "")
            _log.warning("%s: %d keys are missing and stay unchanged: %s", place, len(asked.missing), shown)
        return state, asked.missing


class Comparison:
    """Compares a template with a stored tree: missing and mismatched paths, and parts to read completely."""

    def __init__(self, template: Any, tree: Any) -> None:
        self.missing: list[str] = []  # dotted paths that the tree lacks
        self.mismatched: dict[str, tuple[str, str]] = {}  # dotted path -> (found, expected)
        self.wholes: list[Any] = []  # parts of the tree that are read completely
        self._compare("", template, tree)

    def _compare(self, name: str, template: Any, tree: Any) -> None:
        if template is None:
            self.wholes.append(tree)
        elif isinstance(template, dict) and isinstance(tree, dict):
            for key, value in template.items():
                if key in tree:
                    self._compare(child(name, key), value, tree[key])
                else:
                    self.missing.append(child(name, key))
        elif _are_sequences(template, tree) and len(template) == len(tree):
            for i, (value, item) in enumerate(zip(template, tree, strict=True)):
                self._compare(f"{name}[{i}]", value, item)
        else:
            found, expected = _found(tree), _expected(template)
            if found != expected:
                self.mismatched[name] = found, expected


def _are_sequences(template: Any, tree: Any) -> bool:
    return type(template) in (list, tuple) and type(tree) is type(template)


def _found(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}"
    if type(tree) in (list, tuple):
        return f"a {type(tree).__name__} of {len(tree)}"
    return "a dict" if isinstance(tree, dict) else f"a value of type {type(tree).__name__}"


def _expected(template: Any) -> str:
    """Describe the value that a part of a template accepts, in the same words as :func:`_found`."""
    if isinstance(template, np.ndarray):
        if not template.flags.writeable:
            return "a read-only numpy array, not to be filled"
        try:
            template = torch.from_numpy(template)
        except (TypeError, ValueError):
            return f"a numpy array of {template.dtype}, not to be filled"
    if isinstance(template, Tensor):
        plain = type(template) in (Tensor, torch.nn.Parameter) and template.layout == torch.strided
        if not plain or template.is_quantized or template.is_nested or template.is_meta:
            return f"a {type(template).__name__} of layout {template.layout} on {template.device}, not to be filled"
        kind = _found(template)
        return kind if template.numel() <= span(template) else f"{kind}, expanded, so not to be filled"
    return _found(template.item() if isinstance(template, np.generic) else template)


class StoredState:
    """The state in a file; tensors have no values until they are read. Not thread-safe.

    ``tree`` is the state, with tensors on the device ``meta``. ``place`` moves a block of bytes to its device and
    returns the storage of the new tensors. CorruptCheckpointError if the file is damaged or contains anything other
    than tensors and plain data; no code in the file is run.
    """

    def __init__(self, file: BinaryIO, path: str, place: Callable[[Tensor], Any]) -> None:
        self._file, self._path, self._place = file, path, place
        self._records: dict[int, zipfile.ZipInfo] = {}
        self._empty: list[torch.UntypedStorage] = []  # kept alive, so that each has a unique address
        self.tree = unpickled(file, path, self._without_values)
        self._check(self.tree, 0, set(), set())
        self._ranges: dict[int, tuple[int, int]] = {}
        self._storages: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def _without_values(self, record: zipfile.ZipInfo) -> torch.UntypedStorage:
        empty = torch.UntypedStorage(record.file_size, device="meta")  # type: ignore[no-untyped-call]
        self._empty.append(empty)
        self._records[empty._cdata] = record
        return empty

    def _check(self, value: Any, depth: int, outer: set[int], seen: set[int]) -> None:
        """Check that a value consists of plain data and tensors, and does not contain itself."""
        if isinstance(value, dict | list) or type(value) is tuple:
            if id(value) in outer or depth > _MAX_DEPTH:
                raise self._corrupt("", "a value that contains itself, or is nested too deep", f"{_MAX_DEPTH} levels")
            if id(value) not in seen:
                seen.add(id(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self._check(item, depth + 1, {*outer, id(value)}, seen)
        elif not isinstance(value, (Tensor, *_PLAIN)):
            raise self._corrupt("", f"a {type(value).__name__}", "a tensor or a plain value")

    def plan(self, wholes: list[Any]) -> None:
        """Record which bytes of each storage the parts read completely need, so that they are read once."""
        for tensor in _tensors_in(wholes, set()):
            begin, end = _bytes_of(tensor)
            key = tensor.untyped_storage()._cdata
            lowest, highest = self._ranges.get(key, (begin, end))
            self._ranges[key] = (min(lowest, begin), max(highest, end))

    def filled(self, name: str, template: Any, tree: Any) -> Any:
        """Fill a template in place with the values of a compared tree; return the template.

        A tuple that contains anything other than tensors is replaced by a new tuple.
        """
        if template is None:
            return self._whole(tree)
        if isinstance(template, Tensor | np.ndarray):
            self._fill(template if isinstance(template, Tensor) else torch.from_numpy(template), tree, name)
            return template
        if isinstance(template, dict):
            for key in [key for key in template if key in tree]:
                template[key] = self.filled(child(name, key), template[key], tree[key])
            return template
        if _are_sequences(template, tree):
            items = [self.filled(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(template, tree, strict=True))]
            if type(template) is tuple:
                return tuple(items)
            template[:] = items
            return template
        return tree

    def _whole(self, tree: Any) -> Any:
        """Return a part of the tree with values; values that shared memory when saved share memory again."""
        if isinstance(tree, Tensor):
            key = tree.untyped_storage()._cdata
            begin, end = self._ranges[key]
            begin -= begin % _ALIGNMENT
            if key not in self._storages:
                self._storages[key] = self._place(self._read(tree, begin, end, "a tensor"))
            return _view(self._storages[key], tree, begin)
        if not isinstance(tree, dict | list) and type(tree) is not tuple:
            return tree
        if id(tree) not in self._made:
            if isinstance(tree, dict):
                items = ((key, self._whole(item)) for key, item in tree.items())
                self._made[id(tree)] = OrderedDict(items) if type(tree) is OrderedDict else dict(items)
            else:
                self._made[id(tree)] = type(tree)([self._whole(item) for item in tree])
        return self._made[id(tree)]

    def _fill(self, target: Tensor, stored: Tensor, name: str) -> None:
        begin, end = _bytes_of(stored)
        target, where = target.detach(), f"tensor {name!r}"
        steps = zip(target.shape, target.stride(), stored.stride(), strict=True)
        dense = target.numel() == span(target) and all(size == 1 or one == other for size, one, other in steps)
        if dense and target.device.type == "cpu" and not target.is_conj() and not target.is_neg():
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            self._read_into(stored, begin, flat.numpy(), where)  # the file has the same bytes as the tensor's memory
        else:
            target.copy_(_view(self._read(stored, begin, end, where).untyped_storage(), stored, begin))

    def _read(self, stored: Tensor, begin: int, end: int, where: str) -> Tensor:
        memory = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        self._read_into(stored, begin, memory.numpy(), where)
        return memory

    def _read_into(self, stored: Tensor, begin: int, data: npt.NDArray[np.uint8], where: str) -> None:
        """Fill ``data`` from a tensor's storage, from byte ``begin`` on; for a whole storage, check the checksum."""
        record = self._records[stored.untyped_storage()._cdata]
        self._file.seek(record.header_offset)
        header = self._file.read(_HEADER.size)
        if len(header) != _HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise self._corrupt(where, f"an entry that begins with {header[:4]!r}", "the header of a file in a zip")
        self._file.seek(record.header_offset + _HEADER.size + sum(_HEADER.unpack(header)[1:]) + begin)
        filled = checksum = 0
        while filled < len(data):
            step = self._file.read(min(len(data) - filled, _STEP_BYTES))
            if not step:
                raise self._corrupt(where, f"{filled} bytes", f"{len(data)} bytes")
            data[filled : filled + len(step)] = np.frombuffer(step, np.uint8)
            checksum = zlib.crc32(step, checksum)
            filled += len(step)
        # torch writes a checksum of 0 if it computed none.
        if len(data) == record.file_size and record.CRC not in (0, checksum):
            raise self._corrupt(where, f"checksum {checksum:08x}", f"{record.CRC:08x}")

    def _corrupt(self, where: str, found: object, expected: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(self._path, where, found=found, expected=expected)


def _tensors_in(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif (isinstance(tree, dict | list) or type(tree) is tuple) and id(tree) not in seen:
        seen.add(id(tree))
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_in(item, seen)


def _bytes_of(stored: Tensor) -> tuple[int, int]:
    begin = int(stored.storage_offset()) * stored.element_size()
    return begin, begin + span(stored) * stored.element_size()


def _view(storage: Any, stored: Tensor, begin: int) -> Tensor:
    """Return a tensor over memory that contains its storage from byte ``begin`` on."""
    offset = int(stored.storage_offset()) - begin // stored.element_size()
    tensor = torch.empty(0, dtype=stored.dtype, device=storage.device)
    return tensor.set_(storage, offset, stored.shape, stored.stride())


def _placing(map_location: Any) -> Callable[[Tensor], Any]:
    """Return a function that moves a block of bytes that was saved from a CPU, and returns its storage."""
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    if map_location is None:
        return lambda memory: memory.untyped_storage()
    if isinstance(map_location, str | torch.device):
        device = torch.device(map_location)
        return lambda memory: memory.to(device).untyped_storage()
    if not callable(map_location):
        raise TypeError(
            "default_map_location is a device, a dict from device to device, a function of (storage, device) or None, "
            f"found a {type(map_location).__name__}"
        )

    def ask(memory: Tensor) -> Any:
        storage = memory.untyped_storage()
        placed = map_location(storage, "cpu")
        return storage if placed is None else placed

    return ask
