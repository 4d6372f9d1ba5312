"""Checks shapes, dtypes and ids passed to tables; refuses calls under tracers and transforms of torch."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import Slice
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

_P = ParamSpec("_P")
_R = TypeVar("_R")
Int64s = npt.NDArray[np.int64]
_NESTED = (
    "ids must be a plain tensor, found a nested one: table.bag(ids) pools its rows; to get rows without pooling, "
    "write torch.nested.nested_tensor_from_jagged(table(ids.values()), ids.offsets()), or pad the ids, with padding_id="
)
_FLOATS = "make them int64 at their source: as floats, large ids have already lost their last digits"
_PROBES = count()
MAX_VALUES = 1 << 18  # values per row, a megabyte of float32; embeddings have hundreds
_RESERVED_SLOTS = frozenset({EMBEDDING, "id", "table", "op"})  # column names of the file format


def _asked(name: str, of: Any = torch._C) -> Callable[..., Any]:
    """Return a private function of torch, or a function that returns False if this version of torch lacks it."""
    function: Callable[..., Any] = getattr(of, name, lambda *_: False)
    return function


_is_exporting = _asked("is_exporting", torch.compiler)  # missing in torch 2.6
_is_tracing = _asked("_is_tracing")  # true under torch.jit.trace, and torch.onnx.export with dynamo=False
_is_transformed = _asked("_are_functorch_transforms_active")
_interpreter = _asked("peek_interpreter_stack", getattr(torch._C, "_functorch", None))
_n_modes = _asked("_len_torch_dispatch_stack")
_mode = _asked("_get_dispatch_mode")
_MODES: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_PRE_DISPATCH: Any = getattr(torch._C.DispatchKey, "PreDispatch", None)  # set by make_fx(pre_dispatch=True)
_is_pre_dispatch = functools.partial(_asked("_dispatch_tls_is_dispatch_key_included"), _PRE_DISPATCH)
_FAKE = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
_NOT_IN_PROGRAM = (
    "a table cannot be part of a program of {}: numba looks up its rows, so the program would contain the rows of its "
    "example as constants. Export or trace the dense part, with the rows as its input, and serve the rows with "
    "recckpt.CheckpointReader; or, if ids are small, replace the table by an nn.Embedding with the matrix that "
    "`recckpt export --to embedding` writes"
)
_NOT_TRANSFORMED = (
    "a table cannot be called inside {0}: numba looks up its rows, and only backward passes train them. Call the table "
    "before, with ids of any shape, and pass the rows to the function that is transformed{1}"
)
_TRANSFORMS = {
    "Vmap": (
        "torch.vmap (torch.func.jacfwd)",
        "; take gradients of one loss at a time (is_grads_batched=False, vectorize=False)",
    ),
    "Grad": ("torch.func.grad (or vjp, jacrev, hessian)", ""),
    "Jvp": ("torch.func.jvp (or jacfwd, hessian)", ""),
    "Functionalize": ("torch.func.functionalize", ""),
}
_NO_VALUES = (
    "a table cannot be called inside FakeTensorMode, where ids have no values to look up: call the table outside, or "
    "replace its rows by torch.empty(*ids.shape, *table.embedding_shape)"
)


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make ``torch.compile`` break its graph at a function and compile nothing inside it.

    Numba looks up rows, which no graph can contain. So tracers and transforms (``torch.jit.trace``, ``make_fx``,
    ``torch.func``) are refused before the function begins.
    """
    uncompiled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _is_tracing() or _is_transformed() or _n_modes() or _is_pre_dispatch():
            _check_modes()
        return function(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Calling torch.compiler.disable imports torch._dynamo, which takes seconds: avoid that unless something was
        # compiled. The compiler must not see sys.modules, or it would guard on all of it at each compiled call.
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            if _is_tracing() or _is_transformed() or _n_modes() or _is_pre_dispatch():  # inlined, for fast look-ups
                _check_modes()
            return function(*args, **kwargs)
        if _is_exporting():
            _refuse_program("torch.export")
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(run))  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            return uncompiled[0](*args, **kwargs)
        try:  # not while compiling, because graphs cannot break inside try
            return uncompiled[0](*args, **kwargs)
        except Exception as error:
            # Drop the compiler's frames from the traceback, so that it begins in the function.
            code, part = getattr(function, "__code__", None), error.__traceback__
            while part is not None and part.tb_frame.f_code is not code:
                part = part.tb_next
            raise error.with_traceback(part or error.__traceback__)  # noqa: B904  # it is the same error

    code: Any = call
    code.__code__ = code.__code__.replace(co_name=function.__name__)  # own code object: the compiler caches by code
    return call


def check_has_values(ids: Tensor) -> None:
    if ids.is_meta or (type(ids) is not Tensor and isinstance(ids, _FAKE)):
        kind = "on the device 'meta'" if ids.is_meta else "of FakeTensorMode"
        raise ValueError(
            f"ids {kind} have no values to look up: pass real ids, or replace the rows by "
            "torch.empty(*ids.shape, *table.embedding_shape)"
        )


def refuse_export() -> None:
    if torch.onnx.is_in_onnx_export():
        _refuse_program("torch.onnx.export")


def check_proxy(ids: object) -> None:
    if isinstance(ids, torch.fx.Proxy):
        _refuse_program("torch.fx.symbolic_trace")


def _check_modes() -> None:
    """Raise RuntimeError if the call is traced, transformed or gets fake tensors; other dispatch modes are fine."""
    if _is_tracing():
        _refuse_program("torch.jit.trace, nor of torch.onnx.export, which uses it")
    if _is_transformed():
        interpreter = _interpreter()
        transform, addition = _TRANSFORMS.get(interpreter.key().name if interpreter else "", ("torch.func", ""))
        raise RuntimeError(_NOT_TRANSFORMED.format(transform, addition))
    if _is_pre_dispatch() or (_MODES and (_mode(_MODES.PROXY) or _mode(_MODES.FUNCTIONAL))):
        _refuse_program("make_fx, nor of torch.func.linearize, which uses it")
    if _MODES and _mode(_MODES.FAKE):
        raise RuntimeError(_NO_VALUES)


def _refuse_program(tool: str) -> NoReturn:
    raise RuntimeError(_NOT_IN_PROGRAM.format(tool))


def flat_ids(ids: Tensor, *, as_asked: bool = False) -> Int64s:
    """Return ``ids`` in one dimension on the CPU, without a copy if they are there. ``as_asked`` allows int32."""
    if not isinstance(ids, Tensor):
        check_proxy(ids)
        raise TypeError(f"ids must be an int64 tensor, found a {type(ids).__name__}; convert them with torch.as_tensor")
    if as_asked and ids.dtype == torch.int32:
        ids = ids.long()
    if ids.dtype != torch.int64:
        is_exact = not (ids.is_floating_point() or ids.is_complex() or ids.is_quantized)
        remedy = "convert them with ids.long()" if is_exact else _FLOATS
        raise ValueError(f"ids must be int64, found {ids.dtype}; {remedy}")
    check_has_values(ids)
    try:
        flat: Int64s = ids.detach().reshape(-1).cpu().contiguous().numpy()
    except RuntimeError as error:
        if not ids.is_nested:
            raise
        raise ValueError(_NESTED) from error
    return flat


def checked_shape(shape: int | Sequence[int], *, scalar: bool = False) -> tuple[int, ...]:
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
            f"a row has at most {MAX_VALUES} values, found the shape {sizes}: pass the shape of one row, such as 64; a "
            "table grows, so the number of ids is not part of the shape"
        )
    return sizes


def checked_device(table: str, device: str | torch.device) -> torch.device:
    if torch.device(device).type == "meta":
        raise ValueError(f"table {table!r}: rows on the device 'meta' have no values: use another device")
    if torch.get_default_device().type == "meta":
        raise ValueError(
            f"table {table!r}: made under torch.device('meta'), where tensors have no values: make the table outside, "
            "or under torch.device('cpu'); an empty table takes no memory"
        )
    return torch.device(device)


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or name not in ITEM_BYTES:
        raise ValueError(f"a slot cannot be {dtype!r}; choose one of {', '.join(ITEM_BYTES)}")
    return name


def spec_of(name: str, tensor: Tensor) -> SlotSpec:
    return SlotSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))


def check_slot_name(table: str, name: str) -> None:
    if not name or name in _RESERVED_SLOTS or "@" in name:
        raise ValueError(f"table {table!r}: a slot cannot be named {name!r}; choose another name")


def check_values(table: str, spec: SlotSpec, values: Tensor, n_rows: int) -> None:
    expected = (n_rows, *spec.shape)
    if tuple(values.shape) != expected or values.dtype != getattr(torch, spec.dtype):
        raise ValueError(
            f"table {table!r}, {spec.name!r}: found {values.dtype} {tuple(values.shape)}, expected "
            f"torch.{spec.dtype} {expected}"
        )


def check_owned(table: str, slice_: Slice, ids: Int64s) -> None:
    if slice_.is_everything:
        return
    strangers = ids[~slice_.owns(ids)]
    if len(strangers):
        raise ValueError(
            f"table {table!r} holds {slice_} only; {len(strangers)} of {len(ids)} ids are outside, the first "
            f"is {strangers[0]}: send ids to the rank that owns them"
        )


def checked_move(table: str, dtype: torch.dtype, device: torch.device, fn: Callable[[Tensor], Tensor]) -> torch.device:
    """Return the device to which ``fn``, an argument of ``Module._apply``, moves tensors; refuse other conversions."""
    probe = torch.full((4,), next(_PROBES) % 100 + 1, dtype=dtype, device=device)  # differs from the last probe
    moved = fn(probe)
    if moved.dtype != dtype:
        raise TypeError(
            f"table {table!r} keeps its dtype {dtype} and cannot become {moved.dtype}: make the "
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
            "on the dense modules one by one; ShardedHashTable spreads rows over processes, and "
            "recckpt.CheckpointReader serves rows to other processes"
        )
    return moved.device


def checked_padding(table: str, padding_id: Any) -> int | None:
    if padding_id is None:
        return None
    is_id = isinstance(padding_id, int | np.integer) and not isinstance(padding_id, bool)
    if not is_id or not -(1 << 63) <= padding_id < 1 << 63:
        raise ValueError(f"table {table!r}: padding_id must be an int64 or None, found {padding_id!r:.100}")
    return int(padding_id)


def checked_initial(table: str, spec: SlotSpec, initial: Any) -> float:
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
