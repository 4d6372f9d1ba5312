"""``recckpt forget``: the rows of some ids go from an output dir."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.forgetting.forget import finish
from recckpt.forgetting.forget import forget as forget_ids
from recckpt.forgetting.forgetting import Forgotten
from recckpt.format import layout
from recckpt.inspect.ids_file import read_ids
from recckpt.output_dir.known_mirrors import mirrors_behind
from recckpt.storage import open_storage
from recckpt.text import escaped, one_line, plural


def forget(args: argparse.Namespace) -> CommandResult:
    """Forget ids, or end what an earlier call has begun."""
    if (args.table is None) != (args.ids is None):
        raise UsageError("--table and --ids go together; without both, what was begun earlier is ended")
    with usage_checked():
        if args.table is None:
            done = finish(args.dir)
        else:
            done = forget_ids(args.dir, args.table, read_ids(args.ids), by="recckpt forget")
    url = one_line(args.dir)
    lines = [line for each in done for line in _lines(each)] or [f"{url}: nothing was begun that is not ended"]
    if done:
        lines.append(f"{url}: noted in {layout.FORGOTTEN}; `recckpt verify {url} --absent FILE` proves it")
    behind = [one_line(mirror.url) for mirror in mirrors_behind(open_storage(args.dir))]
    problems = [f"{url}: the mirror {each} may still have ids: `recckpt mirror {url} {each}`" for each in behind]
    data = {"output_dir": args.dir, "requests": [_data(each) for each in done], "mirrors_behind": behind}
    return CommandResult(data, lines, problems)


def _lines(done: Forgotten) -> list[str]:
    resumed = ", which was begun earlier" if done.is_resumed else ""
    what = f"{plural(done.n_ids, 'id')} of table {escaped(done.table)}{resumed}"
    lines = [f"forgot {what}: {plural(len(done.revised), 'checkpoint')} written again"]
    for ckpt_id, n_rows in done.n_rows.items():
        lines.append(f"  {escaped(ckpt_id)}: {plural(n_rows, 'row')}")
    replaced = set(done.revised)
    others = [escaped(name) for name in done.removed if name not in replaced]
    return [*lines, *([f"  removed too: {', '.join(others)}"] if others else [])]


def _data(done: Forgotten) -> dict[str, Any]:
    return {
        "table": done.table,
        "n_ids": done.n_ids,
        "resumed": done.is_resumed,
        "revised": done.revised,
        "rows": done.n_rows,
        "removed": list(done.removed),
    }
