"""The anchors of tables in backward passes, and in models that DistributedDataParallel manages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recckpt.sparse.table.nn_module import TableModule

_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)


def captured(node: Any) -> Tensor | None:
    """Return the empty gradient of an anchor that ``torch.autograd.grad`` asks for, which adds up nothing; else None.

    Args:
        node: of the anchor, in the graph whose backward pass is under way.
    """
    try:
        _will_execute(node)
    except RuntimeError as error:  # which says so of leaves alone
        if "autograd.grad" in str(error):
            return torch.empty_like(node.variable)
    return None


def is_reached(node: Any) -> bool:
    """Return whether the backward pass under way, which may be one for some ``inputs`` alone, goes on to an anchor.

    Args:
        node: as of :func:`captured`.
    """
    try:
        return _will_execute(node)
    except RuntimeError:  # it is asked for, or no engine runs this
        return True


def _leave_anchors_out(init: Callable[..., None]) -> Callable[..., None]:
    """Let DistributedDataParallel manage the other parameters of a model.

    It looks at all names before it asks the modules: tables may lie on the CPU beside dense layers on a GPU, and with
    nothing but anchors it would crash. The list of what it ignores is read from the outermost module alone.
    """

    @functools.wraps(init)
    def leaving_out(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        anchors = {id(each.anchor) for each in module.modules() if isinstance(each, TableModule)}
        if anchors:
            names = {name for name, parameter in module.named_parameters() if id(parameter) in anchors}
            others: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            self._set_params_and_buffers_to_ignore_for_model(module, names.union(others))  # type: ignore[no-untyped-call]
        init(self, module, *args, **kwargs)

    return leaving_out


DistributedDataParallel.__init__ = _leave_anchors_out(DistributedDataParallel.__init__)  # type: ignore[method-assign]
