"""``recckpt repair``, ``compact`` and ``forget``: changes to an output dir's files, beside training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from recckpt.cli.arguments import A_FILE_OF_IDS, AN_OUTPUT_DIR, argument, n_bytes, positive
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.format import layout, near_seal
from recckpt.text import Line, Table, duration, escaped, one_line, plural, size

if TYPE_CHECKING:
    from recckpt.inspect.repair import Leftover, Repaired
    from recckpt.output_dir.forget_requests import Forgotten
    from recckpt.output_dir.notes import NearHost
    from recckpt.rewrite.compaction import Compacted
    from recckpt.rewrite.forgetting import ForgetPlan

ARGUMENTS = {
    "repair": (
        argument("dir DIR", AN_OUTPUT_DIR),
        argument("--clean", "remove leftovers that no writer can still be writing"),
        argument("--dry-run", "change nothing, and show what would be done"),
    ),
    "compact": (
        argument("dir DIR", AN_OUTPUT_DIR),
        argument("ckpt CKPT", "id of the checkpoint (default: the newest)", nargs="?"),
        argument("--out OTHER", "write the checkpoint to this other output dir"),
        argument(
            "--adopt",
            "take over the output dir and commit the result; otherwise the trainer does so at its next save",
        ),
        argument(
            "--workers N",
            "number of threads (default: %(default)s, locally at most one per core)",
            type=positive,
            default=4,
        ),
        argument(
            "--budget SIZE", "memory to use, such as 512MB or 1GiB (default: 256MiB)", type=n_bytes, default=256 << 20
        ),
    ),
    "forget": (
        argument("dir DIR", AN_OUTPUT_DIR),
        argument("--table TABLE", "without --table and --ids, complete earlier requests"),
        argument("--ids FILE", A_FILE_OF_IDS),
        argument("--dry-run", "change nothing; show what would be rewritten and removed, and about how long it takes"),
        argument(
            "--mirrors URL",
            "all mirrors of DIR, paths or URLs; each gets a pass; others keep the ids until their next pass",
            nargs="+",
            default=[],
        ),
    ),
}


def run_repair(args: argparse.Namespace) -> CommandResult:
    from recckpt.inspect.repair import repair

    with usage_checked():
        done = repair(args.dir, clean=args.clean, dry_run=args.dry_run)
    total, made = plural(len(done.checkpoints), "checkpoint"), "would be rewritten" if args.dry_run else "rewritten"
    was = f"was {done.index_problem}; {made}" if done.index_problem else "is right"
    lines: list[Line] = [f"{escaped(done.url)}: the index file {was}, {total}"]
    rows = [(escaped(left.path), _state(left, done, args), one_line(left.what)) for left in done.leftovers]
    if rows:
        lines += ["", Table(("LEFTOVER", "STATE", "WHAT"), rows, tones=dict.fromkeys(range(len(rows)), "unsure"))]
    for directory, reason in done.damaged.items():
        lines += ["", f"{escaped(directory)} is damaged, and is kept: {one_line(reason)}"]
    problems, url = [], escaped(done.url)
    if args.clean and done.failed:
        problems.append(f"{url}: could not remove {', '.join(map(escaped, done.failed))}")
    if done.damaged:
        problems.append(f"{url}: {plural(len(done.damaged), 'damaged checkpoint')} kept; run `recckpt verify`")
    data = {
        "output_dir": done.url,
        "dry_run": args.dry_run,
        "index": {"problem": done.index_problem or None, "checkpoints": list(done.checkpoints)},
        "leftovers": [{"path": left.path, "what": left.what, "dead": left.is_dead} for left in done.leftovers],
        "removed": list(done.removed),
        "damaged": done.damaged,
    }
    return CommandResult(data, lines, problems)


def _state(left: Leftover, done: Repaired, args: argparse.Namespace) -> str:
    if not left.is_dead:
        return "left alone"
    if not args.clean:
        return "--clean removes it"
    if left.path not in done.removed:
        return "still there"
    return "would be removed" if args.dry_run else "removed"


def run_compact(args: argparse.Namespace) -> CommandResult:
    from recckpt.rewrite.compaction import compact

    if args.out is not None and args.adopt:
        raise UsageError("--adopt applies to an offer in DIR; with --out the checkpoint is committed already")
    how = {"out": args.out, "adopt": args.adopt, "budget_bytes": args.budget, "threads": args.workers}
    with usage_checked():
        done = compact(args.dir, args.ckpt, **how)
    notes = [] if args.out is None else passed_by(args.out, done.ckpt_id, None)
    lines = [_compacted(done), *notes]
    if done.removed:
        lines.append(f"{one_line(done.url)}: removed {plural(len(done.removed), 'delta')} replaced by it")
    data = {
        "id": done.ckpt_id,
        "output_dir": done.url,
        "directory": done.directory,
        "reason": done.reason or None,
        "links": done.n_links,
        "rows": done.n_rows,
        "bytes": done.n_bytes,
        "committed": done.is_committed,
        "removed": list(done.removed),
        "notes": notes,
    }
    return CommandResult(data, lines)


def _compacted(done: Compacted) -> str:
    name, where = escaped(done.ckpt_id), one_line(f"{done.url}/{done.directory}")
    what = f"{plural(done.n_rows, 'row')} of {plural(done.n_links, 'link')}, {size(done.n_bytes)}"
    if done.directory is None:
        return f"{name}: {done.reason}; nothing to do"
    if done.is_committed:
        return f"{name}: wrote {what}, to {where}"
    return f"{name}: offered {what}, in {where}; the trainer adopts it at its next save, or --adopt without one"


def passed_by(output_dir: str, ckpt_id: str, planned_step: int | None) -> list[str]:
    """Return a note if ``restore()`` will use this checkpoint although another checkpoint has a later step."""
    from recckpt.output_dir.listing import list_checkpoints
    from recckpt.storage import open_storage

    listing = list_checkpoints(open_storage(output_dir))
    own = listing.find(ckpt_id)
    step = own.manifest.step if own is not None else planned_step
    others = {c.manifest.step: c.ckpt_id for c in listing.current if c.manifest.step is not None}
    latest = max(others, default=0)
    if step is None or latest <= step:
        return []
    newer = f"{escaped(others[latest])} has a later step, which restore({latest}) uses"
    return [f"restore() will use {escaped(ckpt_id)}, the newest once it is written, though {newer}"]


def run_forget(args: argparse.Namespace) -> CommandResult:
    from recckpt.inspect.absent import read_ids
    from recckpt.output_dir.notes import noted_hosts
    from recckpt.rewrite.forgetting import checked_mirrors, finish, forget, forget_in_mirrors
    from recckpt.storage import open_storage

    if (args.table is None) != (args.ids is None):
        raise UsageError("--table and --ids go together; without both, earlier requests are completed")
    if args.dry_run:
        return _forget_dry_run(args)
    with usage_checked():
        mirrors = checked_mirrors(args.dir, args.mirrors)
        if args.table is None:
            done = finish(args.dir)
        else:
            done = forget(args.dir, args.table, read_ids(args.ids), by="recckpt forget")
    url = one_line(args.dir)
    lines = [line for each in done for line in _forgotten(each)] or [f"{url}: no request is unfinished"]
    if done:
        lines.append(f"{url}: recorded in {layout.FORGOTTEN}; `recckpt verify {url} --absent FILE` proves it")
    left = forget_in_mirrors(args.dir, mirrors)
    hosts = noted_hosts(open_storage(args.dir)) if done else []
    lines += [f"{one_line(each)}: forgotten in this mirror, too" for each in mirrors if each not in left]
    problems = [f"the mirror {one_line(place)} may still have the ids: {one_line(why)}" for place, why in left.items()]
    problems += [f"{url}: {_may_have_forgotten(host)}" for host in hosts]
    requests = [
        {
            "table": each.table,
            "n_ids": each.n_ids,
            "resumed": each.is_resumed,
            "rewritten": each.rewritten,
            "rows": each.n_rows,
            "removed": list(each.removed),
        }
        for each in done
    ]
    data = {"output_dir": args.dir, "requests": requests, "mirrors_left": left}
    return CommandResult(data | {"near_hosts": [each.as_data for each in hosts]}, lines, problems)


def _forget_dry_run(args: argparse.Namespace) -> CommandResult:
    """Report what would be done, and how long it would take at the pace of the last saves."""
    from recckpt.inspect.absent import read_ids
    from recckpt.inspect.save_times import saves_of, seconds_to_write, timeline_of
    from recckpt.output_dir.notes import noted_hosts
    from recckpt.rewrite.forgetting import checked_mirrors, plan_forget
    from recckpt.storage import open_storage

    with usage_checked():
        mirrors = checked_mirrors(args.dir, args.mirrors)
        plans = plan_forget(args.dir, args.table, None if args.ids is None else read_ids(args.ids))
        storage = open_storage(args.dir)
        saves = saves_of(timeline_of(storage))
    total, n_checkpoints = sum(plan.n_bytes for plan in plans), sum(len(plan.rewritten) for plan in plans)
    sec = seconds_to_write(saves, total, n_checkpoints)
    lines = [line for plan in plans for line in _planned(plan)] or [f"{one_line(args.dir)}: nothing to forget"]
    if total:
        how_long = "" if sec is None else f", in about {duration(sec)} at the pace of the last saves"
        lines.append(f"would read and write {size(total)}{how_long}, and fence off a trainer that saves there")
    lines += [f"would make a pass over the mirror {one_line(each)}" for each in mirrors]
    hosts = noted_hosts(storage) if plans else []
    requests = [{**asdict(plan), "bytes": plan.n_bytes} for plan in plans]
    data = {"output_dir": args.dir, "dry_run": True, "requests": requests, "bytes": total, "seconds": sec}
    data |= {"mirrors": mirrors, "near_hosts": [host.as_data for host in hosts]}
    lines += [f"would leave near saves on {escaped(host.shown)} to `recckpt near clear` there" for host in hosts]
    return CommandResult(data, lines)


def _planned(plan: ForgetPlan) -> Iterator[str]:
    earlier = ", requested earlier" if plan.is_pending else ""
    what = f"{plural(plan.n_ids, 'id')} of table {escaped(plan.table)}{earlier}"
    yield f"would forget {what}: {plural(len(plan.rewritten), 'checkpoint')} to rewrite"
    yield from (f"  {escaped(c.ckpt_id)}: {plural(c.n_rows, 'row')}, {size(c.n_bytes)}" for c in plan.rewritten)
    if plan.removed:
        yield f"  also removed: {', '.join(map(escaped, plan.removed))}"


def _forgotten(done: Forgotten) -> Iterator[str]:
    resumed = ", requested earlier" if done.is_resumed else ""
    what = f"{plural(done.n_ids, 'id')} of table {escaped(done.table)}{resumed}"
    yield f"forgot {what}: {plural(len(done.rewritten), 'checkpoint')} rewritten"
    yield from (f"  {escaped(ckpt_id)}: {plural(n_rows, 'row')}" for ckpt_id, n_rows in done.n_rows.items())
    if others := [escaped(name) for name in done.removed if name not in done.rewritten]:
        yield f"  also removed: {', '.join(others)}"


def _may_have_forgotten(host: NearHost) -> str:
    if host.damage:
        return f"near saves of a host may have forgotten ids, and the host's record is damaged: {one_line(host.damage)}"
    path = escaped(host.path)
    where = f"near saves on {escaped(host.name)} in {path} may have forgotten ids"
    note = near_seal.host_note(host.host)
    return f"{where}: run `recckpt near clear {path}` there; if that host is gone with them, remove {note}"
