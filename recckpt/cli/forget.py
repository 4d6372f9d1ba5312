"""``recckpt forget``: the rows of some ids go from an output dir."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from recckpt.cli.behind import lines_to_reach, problems_behind, urls_of
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.forgetting.forget import finish
from recckpt.forgetting.forget import forget as forget_ids
from recckpt.forgetting.forgetting import Forgotten
from recckpt.forgetting.plan import ForgetPlan, plan_forget
from recckpt.format import layout
from recckpt.inspect.ids_file import read_ids
from recckpt.inspect.save_times import saves_of, seconds_to_write
from recckpt.output_dir.known_mirrors import mirrors_behind, mirrors_below
from recckpt.output_dir.near_hosts import hosts_behind, noted_hosts
from recckpt.storage import open_storage
from recckpt.text import duration, escaped, one_line, plural, size


def forget(args: argparse.Namespace) -> CommandResult:
    """Forget ids, or end what an earlier call has begun."""
    if (args.table is None) != (args.ids is None):
        raise UsageError("--table and --ids go together; without both, what was begun earlier is ended")
    if args.dry_run:
        return _dry_run(args)
    with usage_checked():
        if args.table is None:
            done = finish(args.dir)
        else:
            done = forget_ids(args.dir, args.table, read_ids(args.ids), by="recckpt forget")
    url = one_line(args.dir)
    lines = [line for each in done for line in _lines(each)] or [f"{url}: nothing was begun that is not ended"]
    if done:
        lines.append(f"{url}: noted in {layout.FORGOTTEN}; `recckpt verify {url} --absent FILE` proves it")
    storage = open_storage(args.dir)
    mirrors, hosts = mirrors_behind(storage), hosts_behind(storage)
    data = {"output_dir": args.dir, "requests": [_data(each) for each in done], "mirrors_behind": urls_of(mirrors)}
    data |= {"hosts_behind": [each.as_data for each in hosts]}
    return CommandResult(data, lines, problems_behind(url, mirrors, hosts))


def _dry_run(args: argparse.Namespace) -> CommandResult:
    """Say what would be done, and how long that takes at the pace of the last saves."""
    with usage_checked():
        plans = plan_forget(args.dir, args.table, None if args.ids is None else read_ids(args.ids))
        storage = open_storage(args.dir)
        saves = saves_of(storage)
    n_bytes, n_checkpoints = sum(plan.n_bytes for plan in plans), sum(len(plan.rewritten) for plan in plans)
    sec = seconds_to_write(saves, n_bytes, n_checkpoints)
    lines = [line for plan in plans for line in _planned(plan)] or [f"{one_line(args.dir)}: nothing is to be forgotten"]
    if n_bytes:
        how_long = "" if sec is None else f", in about {duration(sec)} at the pace of the last saves"
        lines.append(f"it would read and write {size(n_bytes)}{how_long}, and fence a trainer off that saves there")
    mirrors = [mirror for _, mirror in mirrors_below(storage)] if plans else mirrors_behind(storage)
    hosts = noted_hosts(storage) if plans else hosts_behind(storage)
    requests = [{**asdict(plan), "bytes": plan.n_bytes} for plan in plans]
    data = {"output_dir": args.dir, "dry_run": True, "requests": requests, "bytes": n_bytes, "seconds": sec}
    data |= {"mirrors": urls_of(mirrors), "hosts": [host.as_data for host in hosts]}
    return CommandResult(data, [*lines, *lines_to_reach(mirrors, hosts)])


def _planned(plan: ForgetPlan) -> Iterator[str]:
    earlier = ", as was asked earlier" if plan.is_pending else ""
    what = f"{plural(plan.n_ids, 'id')} of table {escaped(plan.table)}{earlier}"
    yield f"would forget {what}: {plural(len(plan.rewritten), 'checkpoint')} to write again"
    yield from (f"  {escaped(c.ckpt_id)}: {plural(c.n_rows, 'row')}, {size(c.n_bytes)}" for c in plan.rewritten)
    if plan.removed:
        yield f"  removed too: {', '.join(map(escaped, plan.removed))}"


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
