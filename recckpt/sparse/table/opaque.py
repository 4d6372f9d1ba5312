"""What ``torch.compile`` calls as it is, and does not look into."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let ``torch.compile`` break its graph at a function, and compile nothing that it calls.

    Ids and rows are looked up by numba, and the compiler of numba is no code that a graph can hold.
    """
    uncompiled: list[Callable[_P, _R]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import would take seconds
            return function(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return uncompiled[0](*args, **kwargs)

    code: Any = call
    code.__code__ = code.__code__.replace(co_name=function.__name__)  # its own: the compiler keeps its books by code
    return call
