"""What torch may not look into: compilers break their graphs at a table, tracers and transforms are refused there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _asked(name: str, of: Any = torch._C) -> Callable[..., Any]:
    """Return a function of torch that is not public; where a version lacks it, one that says no."""
    function: Callable[..., Any] = getattr(of, name, lambda *_: False)
    return function


_is_exporting = _asked("is_exporting", torch.compiler)  # torch 2.6 lacks it
_is_tracing = _asked("_is_tracing")  # by torch.jit.trace, and by torch.onnx.export with dynamo=False
_is_transformed = _asked("_are_functorch_transforms_active")
_interpreter = _asked("peek_interpreter_stack", getattr(torch._C, "_functorch", None))
_n_modes = _asked("_len_torch_dispatch_stack")
_mode = _asked("_get_dispatch_mode")
_MODES: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_PRE_DISPATCH: Any = getattr(torch._C.DispatchKey, "PreDispatch", None)  # where make_fx(pre_dispatch=True) has its mode
_is_pre_dispatch = functools.partial(_asked("_dispatch_tls_is_dispatch_key_included"), _PRE_DISPATCH)

_FAKE = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())

_NOT_IN_PROGRAM = (
    "a table cannot be part of a program of {}: its rows are found by numba, and the program would have those of its "
    "examples as constants. Export or trace the dense part, with the rows as its input, and serve these by "
    "recckpt.CheckpointReader; or, where ids are small, put nn.Embedding in the table's place, with the matrix that "
    "`recckpt export --to embedding` writes"
)
_NOT_TRANSFORMED = (
    "a table cannot be called inside {0}: its rows are found by numba, and trained by backward passes alone. Call it "
    "before, with ids of any shape, and give the rows to the function that is transformed{1}"
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
    "a table cannot be called inside FakeTensorMode, where ids have no values by which its rows are found: call it "
    "outside, or stand in for its rows with torch.empty(*ids.shape, *table.embedding_shape)"
)


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``torch.compile`` break its graph at a function, and compile nothing that it calls.

    Ids and rows are looked up by numba, and the compiler of numba is no code that a graph can hold. So what makes
    programs or other functions of those that it runs (``torch.jit.trace``, ``make_fx``, ``torch.func``) is refused,
    before the function has begun.
    """
    uncompiled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _is_tracing() or _is_transformed() or _n_modes() or _is_pre_dispatch():
            _check_modes()
        return function(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Where nothing is compiled, the import of what compiles would take seconds. A compiler does not get to see
        # sys.modules: it would go through all of it, at each call that it compiles.
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            if _is_tracing() or _is_transformed() or _n_modes() or _is_pre_dispatch():  # not by run: look-ups are short
                _check_modes()
            return function(*args, **kwargs)
        if _is_exporting():
            _refuse_program("torch.export")
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(run))  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling():
            return uncompiled[0](*args, **kwargs)
        try:  # which no compiler sees: it does not break graphs inside
            return uncompiled[0](*args, **kwargs)
        except Exception as error:
            raise error.with_traceback(_from(function, error.__traceback__))  # noqa: B904  # it is the same error

    code: Any = call
    code.__code__ = code.__code__.replace(co_name=function.__name__)  # its own: the compiler keeps its books by code
    return call


def _from(function: Callable[..., Any], trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in a function: what compilers have put around it says nothing."""
    code, part = getattr(function, "__code__", None), trace
    while part is not None and part.tb_frame.f_code is not code:
        part = part.tb_next
    return part or trace


def check_has_values(ids: Tensor) -> None:
    """Raise ValueError for ids that have no values."""
    if ids.is_meta or (type(ids) is not Tensor and isinstance(ids, _FAKE)):
        kind = "on the device 'meta'" if ids.is_meta else "of FakeTensorMode"
        raise ValueError(
            f"ids {kind} have no values, by which rows are found: give real ids, or stand in for the rows with "
            "torch.empty(*ids.shape, *table.embedding_shape)"
        )


def check_proxy(ids: object) -> None:
    """Raise RuntimeError for what ``torch.fx.symbolic_trace`` gives in place of ids."""
    if isinstance(ids, torch.fx.Proxy):
        _refuse_program("torch.fx.symbolic_trace")


def refuse_export() -> None:
    """Raise RuntimeError where the old ``torch.onnx.export`` asks for the state of a model."""
    if torch.onnx.is_in_onnx_export():
        _refuse_program("torch.onnx.export")


def _check_modes() -> None:
    """Raise RuntimeError where a call is traced, transformed, or made without values; other modes may watch it."""
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
