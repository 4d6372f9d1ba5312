"""Where the tensors of a test lie: on the CPU and, where there is one, on a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, optim

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
DEVICES = ["cpu", CUDA]

_here = torch.device("cpu")


def here() -> torch.device:
    """Return where models of tests are made now."""
    return _here


@contextmanager
def on(device: str) -> Iterator[torch.device]:
    """Let models of tests be made on a device; on CUDA kernels add up in the same order each time."""
    global _here
    before, was_deterministic = _here, torch.are_deterministic_algorithms_enabled()
    _here = torch.device(device)
    torch.use_deterministic_algorithms(_here.type == "cuda", warn_only=True)
    try:
        yield _here
    finally:
        _here = before
        torch.use_deterministic_algorithms(was_deterministic)


def ids(*numbers: int | list[int]) -> Tensor:
    """Return ids where models are made now."""
    return torch.tensor(numbers, device=_here)


def skip_without_kernel(optimizer: optim.Optimizer) -> None:
    """Skip a test whose fused optimizer has no kernel in this torch for where its parameters lie."""
    group = optimizer.param_groups[0]
    if not group.get("fused") or group["params"][0].device.type == "cpu":
        return
    weight = torch.nn.Parameter(torch.zeros(2, 2, device=group["params"][0].device))
    weight.grad = torch.ones_like(weight)
    try:
        type(optimizer)([weight], fused=True).step()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no kernel: {error!s:.100}")
