"""Calls that do not fit are answered with the line to write, above all those of other checkpoint managers."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from recckpt.manager.habits import INSTEAD, advice, unknown_option
from recckpt.saver import Saver
from recckpt.text import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MADE_BY_ATTACH = "CheckpointManager.attach(model, optimizers, output_dir=..., save_interval=...) makes one"


def answers(line: str, instead: Mapping[str, str] = INSTEAD) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator of what answers arguments that it does not take with the line to write.

    Args:
        line: a call that would do.
        instead: what to write in place of arguments of other managers.
    """

    def decorated(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(call)
        def answering(*args: _P.args, **options: _P.kwargs) -> _R:
            try:
                return call(*args, **options)
            except TypeError:
                problem = _misfit(inspect.signature(call), args, options, instead)
                if problem is None:
                    raise
            name = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            raise TypeError(f"{name}(): {problem}; a call that would do is {line}")

        return answering

    return decorated


def _misfit(
    signature: inspect.Signature, args: tuple[Any, ...], options: Mapping[str, Any], instead: Mapping[str, str]
) -> str | None:
    """Say why a function cannot be called with these, None where it can."""
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        advised: dict[str, list[str]] = {}
        for name in options:
            if name not in signature.parameters and name in instead:
                advised.setdefault(advice(instead[name]), []).append(repr(name))
        answered = [f"{', '.join(names)}: {what}" for what, names in advised.items()]
        unknown = [name for name in options if name not in signature.parameters]
        return "; ".join(answered) or f"{error}{nearest(unknown[0], signature.parameters) if unknown else ''}"
    return None


def answers_habits(init: Callable[_P, None]) -> Callable[_P, None]:
    """Return a constructor that answers the calls of the managers of others with what to write instead."""
    signature = inspect.signature(init)
    known = signature.parameters.keys()

    @functools.wraps(init)
    def answering(*args: _P.args, **options: _P.kwargs) -> None:
        if unknown := sorted(options.keys() - known):
            raise TypeError("; ".join([*(_wrong(name, known) for name in unknown), _MADE_BY_ATTACH]))
        saver = args[1] if len(args) > 1 else options.get("saver")
        if not isinstance(saver, Saver):
            raise TypeError(_no_saver(saver))
        if problem := _misfit(signature, args, options, {}):
            raise TypeError(f"{problem}; a call that would do is CheckpointManager(saver, save_interval=100)")
        init(*args, **options)

    return answering


def _no_saver(value: object) -> str:
    where = f"{value!r:.200}" if isinstance(value, str | os.PathLike) else "..."
    what = where if where != "..." else "None" if value is None else f"a {type(value).__name__}"
    line = f"CheckpointManager.attach(model, optimizers, output_dir={where}, save_interval=100)"
    return f"saver must be a recckpt.Saver, found {what}: {line} makes one, and is the manager"


def _wrong(name: str, known: Collection[str]) -> str:
    is_of_saver = name in inspect.signature(Saver).parameters
    return f"{name!r} is an option of Saver: give it there" if is_of_saver else unknown_option(name, known)
