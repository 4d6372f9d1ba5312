"""``recckpt consolidate``: the model of a checkpoint in one file."""

from __future__ import annotations

import argparse

from recckpt.cli.result import CommandResult, usage_checked
from recckpt.inspect.consolidate import consolidate as write_model
from recckpt.text import escaped, one_line, plural, size


def consolidate(args: argparse.Namespace) -> CommandResult:
    """Write all dense tensors to one file, those of several ranks put together."""
    with usage_checked():
        done = write_model(args.checkpoint, args.out)
    tensors, sharded = plural(len(done.names), "tensor"), len(done.sharded)
    line = f"{escaped(done.ckpt_id)}: wrote {tensors} to {one_line(args.out)}, {size(done.n_bytes)}, {sharded} sharded"
    data = {
        "id": done.ckpt_id,
        "out": args.out,
        "tensors": list(done.names),
        "sharded": list(done.sharded),
        "bytes": done.n_bytes,
    }
    return CommandResult(data, [line])
