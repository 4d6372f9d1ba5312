"""``recckpt report``: how a run is, as a page."""

from __future__ import annotations

import argparse
import os

from recckpt.cli.result import CommandResult, usage_checked
from recckpt.inspect.libraries import needed
from recckpt.inspect.report.lines import lines_of, verdict
from recckpt.inspect.report.report import report as look
from recckpt.storage import new_file
from recckpt.text import one_line


def report(args: argparse.Namespace) -> CommandResult:
    """Look at a run and write a page; with ``--json`` the page is written only where it is asked for."""
    path = args.out or (None if args.json else "report.html")
    options = {"deep": args.deep, "threads": args.threads, "overdue_sec": args.overdue}
    options |= {"failures_per_day": args.failures_per_day, "near": args.near}
    with usage_checked():
        if path is None:
            run = look(args.dir, **options)
        else:
            os.environ.pop("MPLBACKEND", None)  # a notebook sets it for `!recckpt`, and its backend need not be here
            needed("matplotlib", "report")  # before anything is read
            with new_file(path) as sink:
                run = look(args.dir, **options)
                sink.write(run.to_html().encode())
    written = [] if path is None else [f"wrote {one_line(path)}"]
    problems = [] if run.is_healthy else [f"{run.url}: {verdict(run)}"]
    return CommandResult(run.to_dict(), [*lines_of(run), *written], problems)
