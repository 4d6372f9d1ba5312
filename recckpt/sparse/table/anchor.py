"""The parameter that stands for the rows of a table wherever torch walks parameters, such as to freeze a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recckpt.types import flag

_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)


class AnchoredModule(nn.Module):
    """A module without dense parameters whose rows are frozen and thawed as parameters are.

    Attributes:
        anchor: empty, and the input of torch's graph from which the rows come. It never has a gradient: those of the
            rows are kept by id. A walk over the parameters of a model finds it under the name of the table.
    """

    anchor: nn.Parameter

    def _add_anchor(self, dtype: torch.dtype, device: torch.device) -> None:
        is_float = dtype.is_floating_point  # others cannot require a gradient
        with torch.inference_mode(False):  # a table that is made there can be trained later
            self.anchor = nn.Parameter(torch.empty(0, dtype=dtype if is_float else torch.float32, device=device))

    @property
    def requires_grad(self) -> bool:
        """Whether the rows are trained; False for a frozen table, which training leaves as it is.

        Set it, call ``requires_grad_`` of the table or of a model around it, or set that of all its parameters.
        """
        return self._parameters["anchor"].requires_grad  # type: ignore[union-attr]  # a tenth of the time of self.anchor

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.anchor.requires_grad_(requires_grad)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the anchor, but not where ``recurse`` is False.

        So FSDP asks each module for what it is to manage, and would wait for a gradient of the anchor. A walk from a
        module above does not call this, and finds it.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the anchor."""
        return (parameter for _, parameter in super().named_parameters(recurse=recurse))

    def inserts(self, admit: bool | None) -> bool:
        """Return whether a training look-up with this ``admit`` inserts and counts: by default in a trained table."""
        return self.requires_grad if admit is None else flag("admit", admit)


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
        anchors = {id(each.anchor) for each in module.modules() if isinstance(each, AnchoredModule)}
        if anchors:
            names = {name for name, parameter in module.named_parameters() if id(parameter) in anchors}
            others: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            self._set_params_and_buffers_to_ignore_for_model(module, names.union(others))  # type: ignore[no-untyped-call]
        init(self, module, *args, **kwargs)

    return leaving_out


DistributedDataParallel.__init__ = _leave_anchors_out(DistributedDataParallel.__init__)  # type: ignore[method-assign]
