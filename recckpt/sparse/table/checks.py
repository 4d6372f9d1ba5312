"""What a table accepts: the shapes, dtypes and ids that its door lets in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import Slice
from recckpt.sparse.table.opaque import check_has_values, check_proxy
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

Int64s = npt.NDArray[np.int64]

_NESTED = (
    "ids must be a plain tensor, found a nested one: table.bag(ids) pools its rows; for rows that are not pooled "
    "write torch.nested.nested_tensor_from_jagged(table(ids.values()), ids.offsets()), or pad the ids, with padding_id="
)
_PROBES = count()
MAX_VALUES = 1 << 18  # of a row: a megabyte in float32, where embeddings have hundreds
_RESERVED_SLOTS = frozenset({EMBEDDING, "id", "table", "op"})  # columns of the format


def flat_ids(ids: Tensor) -> Int64s:
    """Return ``ids`` in one dimension on the CPU, without a copy where they lie there."""
    if not isinstance(ids, Tensor):
        check_proxy(ids)
        raise TypeError(f"ids must be an int64 tensor, found a {type(ids).__name__}; convert them with torch.as_tensor")
    if ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64, found {ids.dtype}; convert them with ids.long()")
    check_has_values(ids)
    try:
        flat: Int64s = ids.detach().reshape(-1).cpu().contiguous().numpy()
    except RuntimeError as error:
        if not ids.is_nested:
            raise
        raise ValueError(_NESTED) from error
    return flat


def asked_ids(ids: Tensor) -> Int64s:
    """As :func:`flat_ids`, of a look-up, which takes int32 too, as ``nn.Embedding`` does."""
    return flat_ids(ids.long() if isinstance(ids, Tensor) and ids.dtype == torch.int32 else ids)


def checked_shape(shape: int | Sequence[int], *, scalar: bool = False) -> tuple[int, ...]:
    """Return ``shape`` as a tuple; ``()`` is a shape where it may be ``scalar``."""
    values: tuple[object, ...] = (
        tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    )
    if not all(isinstance(size, int | np.integer) and not isinstance(size, bool) for size in values):
        raise ValueError(f"a shape is an int or a sequence of ints, found {shape!r}")
    sizes = tuple(int(cast(int, size)) for size in values)
    if (not sizes and not scalar) or math.prod(sizes) < 1 or any(size < 1 for size in sizes):
        raise ValueError(f"a shape needs dimensions of at least 1, found {sizes}")
    if math.prod(sizes) > MAX_VALUES:
        raise ValueError(
            f"a row has at most {MAX_VALUES} values, found the shape {sizes}: give the shape of one row, such as 64; "
            "the number of ids is not given, a table grows"
        )
    return sizes


def checked_device(table: str, device: str | torch.device) -> torch.device:
    """Return ``device``, or raise ValueError where rows would have no values there."""
    if torch.device(device).type == "meta":
        raise ValueError(f"table {table!r}: rows on the device 'meta' have no values: leave the table where it is")
    if torch.get_default_device().type == "meta":
        raise ValueError(
            f"table {table!r}: made under torch.device('meta'), where nothing has values: make it outside, or under "
            "torch.device('cpu'); an empty table takes no memory"
        )
    return torch.device(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in the format."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or name not in ITEM_BYTES:
        raise ValueError(f"a slot cannot be {dtype!r}; choose one of {', '.join(ITEM_BYTES)}")
    return name


def spec_of(name: str, tensor: Tensor) -> SlotSpec:
    """Return what a slot is whose values are the rows of a tensor, also where the format does not have its dtype."""
    return SlotSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


def check_slot_name(table: str, name: str) -> None:
    """Raise ValueError where no optimizer slot can have this name."""
    if not name or name in _RESERVED_SLOTS or "@" in name:
        raise ValueError(f"table {table!r}: a slot cannot be named {name!r}; choose another name")


def check_values(table: str, spec: SlotSpec, values: Tensor, n_rows: int) -> None:
    """Raise ValueError unless ``values`` are ``n_rows`` rows of the slot."""
    expected = (n_rows, *spec.shape)
    if tuple(values.shape) != expected or values.dtype != getattr(torch, spec.dtype):
        raise ValueError(
            f"table {table!r}, {spec.name!r}: found {values.dtype} {tuple(values.shape)}, expected "
            f"torch.{spec.dtype} {expected}"
        )


def check_owned(table: str, slice_: Slice, ids: Int64s) -> None:
    """Raise ValueError where an id lies outside the slice."""
    if slice_.is_everything:
        return
    strangers = ids[~slice_.owns(ids)]
    if len(strangers):
        raise ValueError(
            f"table {table!r} holds {slice_} only; {len(strangers)} of {len(ids)} ids lie outside, the first "
            f"is {strangers[0]}: send ids to the rank that owns them"
        )


def checked_move(table: str, dtype: torch.dtype, device: torch.device, fn: Callable[[Tensor], Tensor]) -> torch.device:
    """Return where ``fn``, which torch applies to a whole model, takes tensors; refuse what rows cannot follow."""
    probe = torch.full((4,), next(_PROBES) % 100 + 1, dtype=dtype, device=device)  # unlike the last one
    moved = fn(probe)
    if moved.dtype != dtype:
        raise TypeError(
            f"table {table!r} keeps its dtype {dtype}, cannot become {moved.dtype}: make the "
            "table with dtype=..., and convert the dense modules one by one"
        )
    checked_device(table, moved.device)
    if not torch.equal(moved.cpu(), probe.cpu()):
        raise ValueError(
            f"table {table!r}: to_empty() would leave its rows without values: call it on the dense modules "
            "one by one, and table.to(device) here"
        )
    if moved.device.type == "cpu" and moved.is_shared():  # type: ignore[no-untyped-call]
        raise ValueError(
            f"table {table!r}: share_memory() cannot share its rows, which grow in the memory of this process: call it "
            "on the dense modules one by one; a ShardedHashTable has its rows on several processes, and "
            "recckpt.CheckpointReader gives them to others"
        )
    return moved.device


def checked_count(table: str, n_rows: Any) -> int:
    """Return a number of rows as an int, or raise ValueError where it is not one of at least 0."""
    if not isinstance(n_rows, int | np.integer) or isinstance(n_rows, bool) or n_rows < 0:
        raise ValueError(f"table {table!r}: n_rows must be an int of at least 0, found {n_rows!r}")
    return int(n_rows)


def checked_padding(table: str, padding_id: Any) -> int | None:
    """Return the id of padding, or raise ValueError where no id can be this: it would be pooled as any other."""
    if padding_id is None:
        return None
    is_id = isinstance(padding_id, int | np.integer) and not isinstance(padding_id, bool)
    if not is_id or not -(1 << 63) <= padding_id < 1 << 63:
        raise ValueError(f"table {table!r}: padding_id must be an int64 or None, found {padding_id!r:.100}")
    return int(padding_id)


def checked_initial(table: str, spec: SlotSpec, initial: Any) -> float:
    """Return the value that rows of a slot start with, or raise ValueError where it is none of its dtype."""
    is_number = isinstance(initial, int | float | np.integer | np.floating) and not isinstance(initial, bool)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if is_number and limits.min <= initial <= limits.max:
        fits = dtype.is_floating_point or initial == int(initial)
    else:
        fits = is_number and dtype.is_floating_point and not abs(initial) < math.inf  # infinite, or NaN
    if not fits:
        raise ValueError(f"table {table!r}, {spec.name!r}: initial must be a {spec.dtype}, found {initial!r:.100}")
    return initial if isinstance(initial, int | float) else initial.item()
