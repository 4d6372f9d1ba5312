"""What torch.save writes in place of a tensor, and the allow-list of names that it needs for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from recckpt.dense.torch_pickle import Function, Machine, PlainCopier, RefusedError, refuse_type
from recckpt.errors import CorruptCheckpointError
from recckpt.format.dtypes import MAX_DIMS, NUMPY_DTYPES

MAX_EXPANDED_BYTES = 1 << 30  # of a tensor larger than its storage, as torch.Tensor.expand makes them
_Result = TypeVar("_Result")

_DTYPES = {f"torch.{name}": name for name in NUMPY_DTYPES}
STORAGES = {
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.storage.UntypedStorage": "uint8",  # counted in bytes; the dtype stands beside the tensor
}
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "torch._tensor._rebuild_from_type_v2": "a tensor of a subclass or with attributes",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the values of a tensor lie; within its storage, as far as the pickle knows the size of that.

    Attributes:
        dtype: a key of :data:`NUMPY_DTYPES`.
        shape: sizes of the dimensions.
        strides: steps of the dimensions, in items.
        offset: first item in the storage.
        storage_key: name of the storage in the file, decimal digits.
        storage_bytes: size of the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_key: str
    storage_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return NUMPY_DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all values, laid out one after the other."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def span(self) -> int:
        """Items of the storage from the first value up to the last."""
        steps = zip(self.shape, self.strides, strict=True)
        return 0 if 0 in self.shape else 1 + sum((size - 1) * stride for size, stride in steps)


def unpickle(data: bytes, path: str, where: str) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors and the plain values, by name, of a pickled dict.

    In plain values a tensor comes as its :class:`StoredTensor`, a dtype or device as a string, a set as a list.

    Raises:
        CorruptCheckpointError: the pickle is broken, or has anything that a dict of tensors does not need.
    """
    return run(data, path, where, find_global, _split)


def run(
    data: bytes, path: str, where: str, find_global: Callable[[str], object], finish: Callable[[Any], _Result]
) -> _Result:
    """Return what ``finish`` makes of a pickled object, in which a tensor is a :class:`StoredTensor`.

    Args:
        data: the pickle.
        path: what messages call the file.
        where: what they call the place of the pickle in it.
        find_global: as :class:`~recckpt.dense.torch_pickle.Machine` asks for it.
        finish: may raise RefusedError too.

    Raises:
        CorruptCheckpointError: the pickle is broken, or has anything that ``find_global`` or ``finish`` refuses.
    """
    machine = Machine(find_global, _find_storage)
    try:
        return finish(machine.run(data))
    except RefusedError as refused:
        found, expected, remedy = refused.found, refused.expected, refused.remedy
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        found, expected, remedy = f"a broken pickle ({error!s:.200})", "a pickle written by torch.save", ""
    place = f"{where}, byte {machine.position}"
    raise CorruptCheckpointError(path, place, found=found, expected=expected, remedy=remedy)


def _split(named: Any) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    if type(named) is not dict:
        refuse_type(named, "a dict of tensors")
    for name in named:
        if type(name) is not str:
            refuse_type(name, "a string, the name of a tensor, as a key")
    tensors = {name: value for name, value in named.items() if isinstance(value, StoredTensor)}
    plain = {name: value for name, value in named.items() if name not in tensors}
    return tensors, PlainCopier(leaf=StoredTensor).copy(plain)


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes that tensors share; its name in the file, its dtype, its size."""

    key: str
    dtype: str
    nbytes: int


def find_global(name: str) -> object:
    """Return what stands for a name that torch.save uses; a dtype is its name, and a set comes as a list."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in STORAGES or name in _DTYPES:
        return name
    if name in _OTHER_TENSORS:
        remedy = "save it as a plain dense tensor: to_dense(), dequantize(), detach().clone()"
        raise RefusedError(_OTHER_TENSORS[name], "a dense tensor", remedy)
    remedy = "nothing of it was run; do not open this file with torch.load(weights_only=False)"
    raise RefusedError(f"the global {name!r:.200}", "only the globals that a dict of tensors needs", remedy)


def _find_storage(reference: Any) -> Storage:
    match reference:
        case ("storage", str(kind), str(key), str(), int(n_items)) if kind in STORAGES and n_items >= 0:
            if not (key.isascii() and key.isdecimal()):
                raise RefusedError(f"the storage name {key!r:.200}", "decimal digits")
            return Storage(key, STORAGES[kind], n_items * NUMPY_DTYPES[STORAGES[kind]].itemsize)
        case _:
            return refuse_type(reference, "('storage', type, key, location, size)")


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMS:
        refuse_type(values, f"a tuple of at most {MAX_DIMS} numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise RefusedError("a bad shape, stride or offset", "numbers from 0 to 2**63 - 1")
    return values


def _tensor(storage: Any, dtype: str, place: list[Any], flags: Any) -> StoredTensor:
    if type(storage) is not Storage:
        refuse_type(storage, "a storage")
    offset, shape, strides = place
    (offset,), shape, strides = _sizes((offset,)), _sizes(shape), _sizes(strides)
    if len(strides) != len(shape):
        raise RefusedError(f"{len(strides)} strides", f"{len(shape)}, one a dimension")
    if flags:
        raise RefusedError("a conjugate or negative view", "a tensor", "save resolve_conj().resolve_neg()")
    tensor = StoredTensor(dtype, shape, strides, offset, storage.key, storage.nbytes)
    if (end := (offset + tensor.span) * tensor.item_bytes) > storage.nbytes:
        raise RefusedError(f"a tensor up to byte {end} of its storage", f"at most {storage.nbytes}")
    if (most := max(storage.nbytes, MAX_EXPANDED_BYTES)) < math.prod(filter(None, shape)) * tensor.item_bytes:
        raise RefusedError(f"a tensor of shape {shape}", f"at most {most} bytes on its storage")
    return tensor


# Below: the functions that torch.save names, with the arguments that they have in torch.


def _typed(*args: Any) -> StoredTensor:
    """Rebuild from storage, offset, shape, strides, requires_grad, hooks and, it may be, flags."""
    storage, *place, _, _, flags = args if len(args) == 7 else (*args, None)
    return _tensor(storage, storage.dtype, place, flags)


def _untyped(*args: Any) -> StoredTensor:
    """Rebuild from the same, with the dtype before the flags: one that has no storage class."""
    storage, *place, _, _, dtype, flags = args if len(args) == 8 else (*args, None)
    if type(dtype) is not str:
        refuse_type(dtype, "a dtype")
    return _tensor(storage, _DTYPES[dtype], place, flags)


def _parameter(tensor: Any, _requires_grad: Any, _hooks: Any, _state: Any = None) -> Any:
    return tensor


def _device(kind: Any, index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        refuse_type(kind, "a device and its number")
    return kind if index is None else f"{kind}:{index}"


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    return text.encode("latin1") if encoding == "latin1" else refuse_type(encoding, "latin1")


def _set(items: Any = ()) -> list[Any]:
    """A set comes as a list: what is in it need not be hashed here."""
    return list(items) if type(items) in (list, tuple) else refuse_type(items, "a list of what is in a set")


FUNCTIONS: Mapping[str, Function] = {
    "torch._utils._rebuild_tensor_v2": Function(_typed),
    "torch._utils._rebuild_tensor_v3": Function(_untyped),
    "torch._utils._rebuild_parameter": Function(_parameter),
    "torch._utils._rebuild_parameter_with_state": Function(_parameter),
    "torch.Size": Function(_sizes),
    "torch.device": Function(_device),
    "collections.OrderedDict": Function(lambda: {}),
    "_codecs.encode": Function(_bytes),
    "__builtin__.bytes": Function(_bytes),
    "__builtin__.set": Function(_set),
    "__builtin__.complex": Function(lambda real, imag: complex(float(real), float(imag))),
}
