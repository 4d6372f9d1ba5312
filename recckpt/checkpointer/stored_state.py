"""The state in a ``.pt`` file: torch reads its pickle, and the bytes of tensors are read when they are asked for."""

from __future__ import annotations

import errno
import io
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.checkpointer.pack import span
from recckpt.dense.loader import loaded
from recckpt.errors import CorruptCheckpointError

_HEADER = struct.Struct("<4s22xHH")  # of a file in a zip: magic, sizes of its name and of what is added
_STEP_BYTES = 4 << 20
_ALIGNMENT = 64  # where a part of a storage begins, so that it suits every dtype
_MAX_DEPTH = 120  # what pack() makes is less deep; far from what the interpreter's stack takes
_SKIPS_VALUES = torch.__version__ >= "2.11"  # of older ones, torch.load(map_location="meta") reads all the same
_PLAIN = (type(None), int, float, complex, str, bytes, set, torch.Size, torch.dtype, torch.device)


class StoredState:
    """A state whose tensors have no values until they are read from the file. Not thread-safe.

    Attributes:
        tree: the state, as ``torch.load(weights_only=True)`` gives it; its tensors are on the device ``meta``.

    Raises:
        CorruptCheckpointError: it is damaged, or holds more than tensors and plain data. Nothing of it was run.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._records: dict[int, zipfile.ZipInfo] = {}
        alone = self._without_values()
        file.seek(0)
        self.tree = loaded(alone, path, "meta") if _SKIPS_VALUES else loaded(file, path, "cpu")
        self._seen: set[int] = set()
        self._check(self.tree, 0, set())

    def storage(self, tensor: Tensor) -> int:
        """Return the same number for tensors of one storage."""
        storage = tensor.untyped_storage()
        place = getattr(storage, "_checkpoint_offset", None)
        return int(storage._cdata if place is None else place)

    def read(self, tensor: Tensor, begin: int, data: npt.NDArray[np.uint8], where: str) -> None:
        """Fill ``data`` with the storage of a tensor from byte ``begin`` on, and check the checksum of a whole one."""
        if not tensor.is_meta:
            values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            data[:] = values.numpy()[begin : begin + len(data)]
            return
        record = self._records[self.storage(tensor)]
        self._file.seek(self._first_byte(record, where) + begin)
        filled = checksum = 0
        while filled < len(data):
            step = self._file.read(min(len(data) - filled, _STEP_BYTES))
            if not step:
                raise self._corrupt(where, f"{filled} bytes", f"{len(data)} bytes")
            data[filled : filled + len(step)] = np.frombuffer(step, np.uint8)
            checksum = zlib.crc32(step, checksum)
            filled += len(step)
        # torch writes a checksum of 0 where it computed none.
        if len(data) == record.file_size and record.CRC not in (0, checksum):
            raise self._corrupt(where, f"checksum {checksum:08x}", f"{record.CRC:08x}")

    def _without_values(self) -> io.BytesIO:
        """Return the same file with empty records, whose places in it say which they are."""
        try:
            with zipfile.ZipFile(self._file) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                root = next(iter(entries), "").partition("/")[0]
                data = archive.read(f"{root}/data.pkl")
                byteorder = archive.read(f"{root}/byteorder") if f"{root}/byteorder" in entries else b"little"
                n_entries = len(archive.infolist())
        except Exception as error:  # zipfile raises many kinds for other bytes
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a place before the file gives
                raise
            raise self._corrupt(
                "", f"not such a file ({type(error).__name__}: {error!s:.200})", "a zip file of torch.save"
            ) from error
        if len(entries) != n_entries or byteorder != b"little":
            raise self._corrupt("", "a name twice, or another byte order", "a little-endian zip file of torch.save")
        alone = io.BytesIO()
        with zipfile.ZipFile(alone, "w") as archive:
            archive.writestr(f"{root}/data.pkl", data)
            archive.writestr(f"{root}/version", "3\n")
            for name, entry in entries.items():
                if name.startswith(f"{root}/data/"):
                    self._records[alone.tell() + _HEADER.size + len(name.encode())] = entry
                    archive.writestr(name, b"")
        alone.seek(0)
        return alone

    def _check(self, value: Any, depth: int, outer: set[int]) -> None:
        """Check that a value is plain data and tensors inside their records, and does not hold itself."""
        if isinstance(value, Tensor):
            self._check_tensor(value)
        elif isinstance(value, dict | list) or type(value) is tuple:
            if id(value) in outer or depth > _MAX_DEPTH:
                raise self._corrupt("", "a value that holds itself, or is nested too deep", f"{_MAX_DEPTH} levels")
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self._check(item, depth + 1, {*outer, id(value)})
        elif not isinstance(value, _PLAIN):
            raise self._corrupt("", f"a {type(value).__name__}", "a tensor or a plain value")

    def _check_tensor(self, tensor: Tensor) -> None:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise self._corrupt("", f"a {type(tensor).__name__} of layout {tensor.layout}", "a plain tensor")
        if not tensor.is_meta:
            return
        record, n_bytes = self._records.get(self.storage(tensor)), tensor.untyped_storage().nbytes()
        stored_as_is = record is not None and record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & 1
        if record is None or not stored_as_is or not record.file_size == record.compress_size == n_bytes:
            raise self._corrupt("", f"a storage of {n_bytes} bytes", "a record of as many bytes, stored as they are")
        end = (int(tensor.storage_offset()) + span(tensor)) * tensor.element_size()
        if end > n_bytes:
            raise self._corrupt(record.filename, f"a tensor up to byte {end}", f"at most {n_bytes}")

    def _first_byte(self, record: zipfile.ZipInfo, where: str) -> int:
        self._file.seek(record.header_offset)
        header = self._file.read(_HEADER.size)
        if len(header) != _HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise self._corrupt(where, f"an entry that begins with {header[:4]!r}", "the header of a file in a zip")
        _, name_bytes, added_bytes = _HEADER.unpack(header)
        return record.header_offset + _HEADER.size + int(name_bytes) + int(added_bytes)

    def _corrupt(self, where: str, found: object, expected: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(self._path, where, found=found, expected=expected)


class TensorFiller:
    """Reads tensors, and no bytes that none of them needs; of the parts that are taken whole all at once.

    New tensors go where ``map_location`` says, as ``torch.load`` takes it.
    """

    def __init__(self, stored: StoredState, wholes: Iterable[Any], map_location: Any) -> None:
        self._stored = stored
        self._place = _placing(map_location)
        self._ranges: dict[int, tuple[int, int]] = {}
        seen: set[int] = set()
        for part in wholes:
            self._find_ranges(part, seen)
        self._storages: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def whole(self, tree: Any) -> Any:
        """Return a part of the tree with its tensors; those that shared memory when they were saved do so again."""
        if isinstance(tree, Tensor):
            return self._new(tree)
        if not isinstance(tree, dict | list) and type(tree) is not tuple:
            return tree
        if id(tree) not in self._made:
            if isinstance(tree, dict):
                items = ((key, self.whole(item)) for key, item in tree.items())
                self._made[id(tree)] = OrderedDict(items) if type(tree) is OrderedDict else dict(items)
            else:
                self._made[id(tree)] = type(tree)([self.whole(item) for item in tree])
        return self._made[id(tree)]

    def fill(self, target: Tensor, stored: Tensor, where: str) -> None:
        """Read the values of a tensor into another one of its shape and dtype."""
        begin, end = _bytes_of(stored)
        target = target.detach()
        if _is_same_order(target, stored):
            flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
            self._stored.read(stored, begin, flat.numpy(), where)
        else:
            target.copy_(_view(self._read(stored, begin, end, where).untyped_storage(), stored, begin))

    def _find_ranges(self, tree: Any, seen: set[int]) -> None:
        """Note which bytes of each storage the tensors of a part need."""
        if isinstance(tree, Tensor):
            begin, end = _bytes_of(tree)
            key = self._stored.storage(tree)
            lowest, highest = self._ranges.get(key, (begin, end))
            self._ranges[key] = (min(lowest, begin), max(highest, end))
        elif (isinstance(tree, dict | list) or type(tree) is tuple) and id(tree) not in seen:
            seen.add(id(tree))
            for item in tree.values() if isinstance(tree, dict) else tree:
                self._find_ranges(item, seen)

    def _new(self, stored: Tensor) -> Tensor:
        key = self._stored.storage(stored)
        begin, end = self._ranges[key]
        begin -= begin % _ALIGNMENT
        if key not in self._storages:
            self._storages[key] = self._place(self._read(stored, begin, end, "a tensor"))
        return _view(self._storages[key], stored, begin)

    def _read(self, stored: Tensor, begin: int, end: int, where: str) -> Tensor:
        memory = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        self._stored.read(stored, begin, memory.numpy(), where)
        return memory


def _bytes_of(stored: Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins and ends."""
    begin = int(stored.storage_offset()) * stored.element_size()
    return begin, begin + span(stored) * stored.element_size()


def _is_same_order(target: Tensor, stored: Tensor) -> bool:
    """Say whether the bytes in the file are those that the memory of a tensor needs, one to one."""
    steps = zip(target.shape, target.stride(), stored.stride(), strict=True)
    dense = target.numel() == span(target) and all(size == 1 or one == other for size, one, other in steps)
    return dense and target.device.type == "cpu" and not target.is_conj() and not target.is_neg()


def _view(storage: Any, stored: Tensor, begin: int) -> Tensor:
    """Return a tensor over memory that holds its storage from byte ``begin`` on."""
    offset = int(stored.storage_offset()) - begin // stored.element_size()
    tensor = torch.empty(0, dtype=stored.dtype, device=storage.device)
    return tensor.set_(storage, offset, stored.shape, stored.stride())


def _placing(map_location: Any) -> Callable[[Tensor], Any]:
    """Return what moves a block of bytes, all of which were saved from a CPU, and gives its storage."""
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
