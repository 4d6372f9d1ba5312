"""Checkpoint a plain PyTorch model while it trains, with a state dict and nothing else.

    python examples/state_dict.py
    python examples/state_dict.py --crash-at 150   # then again without: it resumes and ends with the same bits

Every few steps the model, its optimizer and the step go to one file, over the older one. The save only waits for the
copy; another process writes. Run it again and it resumes. At the end, a server takes the weights alone out of the file.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.checkpointer import make_async_checkpointer, make_sync_checkpointer
from recckpt.errors import CheckpointNotFoundError


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the data of a step; the same in every run."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return values, values[:, :8].clamp(min=0).sum(dim=1, keepdim=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def train(n_steps: int, save_interval: int, path: Path, crash_at: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with make_async_checkpointer() as checkpointer:  # leaving it waits for the save in flight
        step = resume(checkpointer.load, model, optimizer, path)
        while step < n_steps:
            features, target = batch(step)
            loss = nn.functional.mse_loss(model(features), target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            optimizer.step()
            step += 1
            if step % save_interval == 0 or step == n_steps:
                began = time.perf_counter()
                checkpointer.save(state_of(model, optimizer, step), path)
                pause_ms = 1e3 * (time.perf_counter() - began)
                print(f"step {step}: loss {loss.item():.4f}, training waited {pause_ms:.1f} ms for the save")
            if step == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)


def resume(load: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    """Load what was saved, if anything was, and return its step."""
    # The weights are filled where they are. The optimizer has no moments before its first step, so nothing to fill:
    # what is None in a template is taken whole.
    template = {"model": model.state_dict(), "optimizer": None, "step": None}
    try:
        state = load(path, template, strict=True)
    except CheckpointNotFoundError:
        return 0
    optimizer.load_state_dict(state["optimizer"])
    print(f"resuming at step {state['step']}")
    return int(state["step"])


def serve(path: Path) -> None:
    """Take the weights out of the file; the moments, twice as large, are not read."""
    with make_sync_checkpointer() as checkpointer:
        state = checkpointer.load(path, {"model": None, "step": None})
    n_values = sum(tensor.numel() for tensor in state["model"].values())
    print(f"serving {n_values:,} weights of step {state['step']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-interval", type=int, default=20)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/state_dict"))
    parser.add_argument("--crash-at", type=int, default=0, help="a step after which the process kills itself")
    options = parser.parse_args()
    train(options.steps, options.save_interval, options.output_dir, options.crash_at)
    serve(options.output_dir)


if __name__ == "__main__":
    main()
