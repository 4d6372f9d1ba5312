"""``recckpt verify``: checks that checkpoints are whole."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.absent import absent
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.inspect.verify import Report, find_checkpoints, verify_found
from recckpt.text import Heading, Line, Table, count, escaped, one_line, plural, size
from recckpt.text.columns import Tone

_HEAD = ("CHECKPOINT", "ROWS", "SIZE", "FILES", "RESULT")


def verify(args: argparse.Namespace) -> CommandResult:
    """Check one checkpoint, or all of an output dir, and list all that is wrong; or look for ids there."""
    if args.absent is not None:
        return absent(args)
    if args.table is not None or args.print_ids:
        raise UsageError("--table and --print-ids go with --absent")
    with usage_checked():
        place = find_checkpoints(args.path)
    url, reports = place.storage.url, sorted(verify_found(place, deep=args.deep, threads=args.threads), key=_age)
    damaged = [report for report in reports if report.problems]
    tones: dict[int, Tone] = {n: "damaged" if report.problems else "good" for n, report in enumerate(reports)}
    lines: list[Line] = [Table(_HEAD, [_row(report) for report in reports], ("ROWS", "SIZE", "FILES"), tones)]
    for report in damaged:
        lines += ["", Heading(f"{escaped(report.directory)}:"), *(f"  {one_line(str(p))}" for p in report.problems)]
    for report in (report for report in reports if report.absent_deletes):
        what = f"{plural(report.absent_deletes, 'delete')} of ids that are not there, which means nothing"
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


def _age(report: Report) -> tuple[bool, tuple[int, int], str]:
    """Sort oldest first; those without a readable manifest last."""
    return report.manifest is None, report.manifest.place if report.manifest else (0, 0), report.directory


def _row(report: Report) -> tuple[str, ...]:
    result = plural(len(report.problems), "problem") if report.problems else "good"
    manifest = report.manifest
    if manifest is None:
        return escaped(report.directory), "-", "-", "-", result
    return escaped(manifest.ckpt_id), count(manifest.rows), size(manifest.n_bytes), count(len(manifest.files)), result


def _lacks(report: Report) -> list[str]:
    """Return what its writer knew to be missing, in words: no damage, and a resume starts it from scratch."""
    return [] if report.manifest is None else report.manifest.training.unsaved.descriptions


def _data(report: Report) -> dict[str, Any]:
    manifest = report.manifest
    return {
        "id": manifest.ckpt_id if manifest else None,
        "directory": report.directory,
        "good": not report.problems,
        "absent_deletes": report.absent_deletes,
        "lacks": _lacks(report),
        "problems": [
            {"file": p.file, "where": p.where, "found": p.found, "expected": p.expected} for p in report.problems
        ],
    }
