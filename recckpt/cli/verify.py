"""``recckpt verify``: checks checkpoints; with ``--absent``, checks that ids are nowhere in directories."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recckpt.cli.arguments import A_FILE_OF_IDS, argument, threads
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.errors import CheckpointNotFoundError
from recckpt.text import Heading, Line, Table, count, escaped, one_line, plural, size
from recckpt.text.columns import Tone

if TYPE_CHECKING:
    from recckpt.inspect.absent import Absence
    from recckpt.inspect.verify import Report

_HEAD = ("CHECKPOINT", "ROWS", "SIZE", "FILES", "RESULT")
_ABSENT_HEAD = ("DIRECTORY", "CHECKPOINT", "TABLE", "ROWS", "DELETES")

ARGUMENTS = {
    "verify": (
        argument(
            "path CKPT|DIR",
            "a checkpoint, or an output dir to check all its checkpoints; with --absent several, also near dirs",
            nargs="+",
        ),
        (
            argument("--deep", "read every byte (the default)", default=True),
            argument("--quick", "check only manifests and file sizes", dest="deep", action="store_false"),
        ),
        threads("read"),
        argument(
            "--absent FILE",
            "instead, search all files for these ids, and list the directories that have them; " + A_FILE_OF_IDS,
        ),
        argument("--table TABLE", "with --absent: search only this table (default: all)"),
        argument("--print-ids", "with --absent: print the ids that were found"),
    )
}


def run_verify(args: argparse.Namespace) -> CommandResult:
    from recckpt.cli.others import source_at, verified
    from recckpt.inspect.verify import find_checkpoints, verify_found

    if args.absent is not None:
        return _absent(args)
    if args.table is not None or args.print_ids:
        raise UsageError("--table and --print-ids need --absent")
    if len(args.path) > 1:
        raise UsageError(f"several places need --absent, found {' '.join(args.path)}")
    try:
        with usage_checked():
            place = find_checkpoints(args.path[0])
    except CheckpointNotFoundError:
        if (source := source_at(args.path[0])) is None:
            raise
        return verified(source, deep=args.deep)
    url, reports = place.storage.url, sorted(verify_found(place, deep=args.deep, threads=args.threads), key=_age)
    tones: dict[int, Tone] = {n: "damaged" if report.problems else "good" for n, report in enumerate(reports)}
    lines: list[Line] = [Table(_HEAD, [_row(report) for report in reports], ("ROWS", "SIZE", "FILES"), tones)]
    for report in (report for report in reports if report.problems):
        lines += ["", Heading(f"{escaped(report.directory)}:"), *(f"  {one_line(str(p))}" for p in report.problems)]
    for report in (report for report in reports if report.absent_deletes):
        what = f"{plural(report.absent_deletes, 'delete')} of absent ids, which is harmless"
        lines += ["", f"{escaped(report.directory)}: {what}"]
    for report in (report for report in reports if _lacks(report)):
        lines += ["", f"{escaped(report.directory)}: lacks {one_line(' and '.join(_lacks(report)))}"]
    n_problems = sum(len(report.problems) for report in reports)
    checkpoints = [report for report in reports if report.is_checkpoint]
    others = [escaped(report.directory) for report in reports if not report.is_checkpoint]
    where = f"{len([r for r in checkpoints if r.problems])} of {plural(len(checkpoints), 'checkpoint')}"
    where += f" and in {', '.join(others)}" if others else ""
    problems = [f"{url}: found {plural(n_problems, 'problem')} in {where}"] if n_problems else []
    data = {"url": url, "deep": args.deep, "checkpoints": [_data(report) for report in reports]}
    return CommandResult(data, lines, problems)


def _age(report: Report) -> tuple[bool, tuple[int, int], str]:  # sorts oldest first, without a manifest last
    return report.manifest is None, report.manifest.place if report.manifest else (0, 0), report.directory


def _row(report: Report) -> tuple[str, ...]:
    result = plural(len(report.problems), "problem") if report.problems else "good"
    manifest = report.manifest
    if manifest is None:
        return escaped(report.directory), "-", "-", "-", result
    return escaped(manifest.ckpt_id), count(manifest.rows), size(manifest.n_bytes), count(len(manifest.files)), result


def _lacks(report: Report) -> list[str]:
    """Return the state that was missing when the checkpoint was written: not damage, but a resume starts it afresh."""
    return [] if report.manifest is None else report.manifest.training.unsaved.descriptions


def _data(report: Report) -> dict[str, Any]:
    return {
        "id": report.manifest.ckpt_id if report.manifest else None,
        "directory": report.directory,
        "good": not report.problems,
        "absent_deletes": report.absent_deletes,
        "lacks": _lacks(report),
        "problems": [
            {"file": p.file, "where": p.where, "found": p.found, "expected": p.expected} for p in report.problems
        ],
    }


def _absent(args: argparse.Namespace) -> CommandResult:
    """List the places that still have any of the ids, and unreadable files; print ids only on request."""
    from recckpt.format.buckets import distinct
    from recckpt.inspect.absent import look_for, read_ids

    with usage_checked():
        ids = distinct(read_ids(args.absent))
        places = [look_for(path, ids, args.table) for path in args.path]
    where = "any table" if args.table is None else f"table {escaped(args.table)}"
    lines, problems, data = list[Line](), list[str](), list[dict[str, Any]]()
    for place in places:
        url, wrong, rows, entries = one_line(place.url), list(_unsure(place, len(ids), where)), [], []
        for each in place.holding:
            name = "-" if each.ckpt_id is None else escaped(each.ckpt_id)
            counts = count(each.n_rows), count(each.n_deletes)
            rows.append((escaped(each.directory or "."), name, escaped(each.table), *counts))
            entry: dict[str, Any] = {"directory": each.directory, "id": each.ckpt_id, "table": each.table}
            entry |= {"rows": each.n_rows, "deletes": each.n_deletes}
            entries.append(entry | ({"ids": distinct(*each.ids).tolist()} if args.print_ids else {}))
        lines += [f"{url}:"] if len(places) > 1 and rows else []
        lines += [Table(_ABSENT_HEAD, rows, ("ROWS", "DELETES"))] if rows else []
        for each in place.holding if args.print_ids else ():
            listed = ", ".join(map(str, distinct(*each.ids)))
            lines.append(f"{escaped(each.directory) or '.'}, {escaped(each.table)}: {listed}")
        if not wrong:
            lines.append(f"{url}: none of {plural(len(ids), 'id')} is in {where} of {plural(place.n_parts, 'file')}")
        if place.n_asked:
            lines.append(f"{url}: {place.n_asked} of them were requested to be forgotten, by the audit")
        problems += wrong
        own = {"url": place.url, "holding": entries, "unread": place.unread, "pending": place.pending}
        data.append(own | {"files": place.n_parts, "asked": place.n_asked})
    answer = {"table": args.table, "n_ids": len(ids), "absent": not problems, "places": data}
    return CommandResult(answer, lines, problems)


def _unsure(place: Absence, n_ids: int, where: str) -> Iterator[str]:
    if place.holding:
        n_places = len({each.directory for each in place.holding})
        what = "1 directory holds" if n_places == 1 else f"{n_places} directories hold"
        yield f"{place.url}: {what} some of {plural(n_ids, 'id')} in {where}"
    for path, why in place.unread.items():
        yield f"{place.url}/{path}: found {why}, so its contents are unknown: run `recckpt verify`"
    for table, n_named in place.pending.items():
        what = f"a request to forget ids of table {table!r}, including {n_named} of these, is unfinished"
        yield f"{place.url}: {what}: `recckpt forget DIR` continues it"
