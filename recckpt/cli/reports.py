"""``recckpt diff``, ``report`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import math
import os
from contextlib import suppress
from pathlib import Path

from recckpt.cli.arguments import A_CHECKPOINT, AN_OUTPUT_DIR, OVERDUE, argument, natural, page, threads
from recckpt.cli.result import USAGE, CommandError, CommandResult, usage_checked
from recckpt.errors import CheckpointNotFoundError, LoadConfError, RecckptError
from recckpt.text import first_few, one_line


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


_tolerance.__name__ = "number"  # name that argparse prints in "invalid ... value"


def _rate(text: str) -> float:
    number = 0.0
    with suppress(ValueError):
        number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0 such as 0.5 or 3, found {text!r:.100}")
    return number


ARGUMENTS = {
    "diff": (
        argument("before BEFORE", A_CHECKPOINT),
        argument("after AFTER", "the same"),
        argument(
            "--tolerance X",
            "values that differ by no more than this count as equal (default: %(default)s)",
            type=_tolerance,
            default=0.0,
        ),
        argument("--top N", "rows to list: those that moved most (default: %(default)s)", type=natural, default=10),
        page("page to write as well; must not exist"),
    ),
    "report": (
        argument("dir DIR", AN_OUTPUT_DIR),
        page("page to write (default: report.html, none with --json); must not exist"),
        argument("--quick", "read no rows: manifests, sizes and the timeline only", dest="deep", action="store_false"),
        threads("read"),
        OVERDUE,
        argument(
            "--failures-per-day N",
            "how often the run fails, for advice on how often to save, based on past saves",
            type=_rate,
        ),
        argument("--near PATH", "also report what near saves of Near(PATH) on this host could restore now"),
    ),
    "plan": (
        argument("--model-names FILE", "names of the model: lines of Saver.names()", required=True),
        argument("bank BANK.json", "the model bank: a JSON list of entries"),
    ),
}


def run_diff(args: argparse.Namespace) -> CommandResult:
    """Compare two checkpoints. As for diff(1), the exit code is 1 if they differ and 2 after an error."""
    from recckpt.cli.others import diff_of_others
    from recckpt.inspect.diff import diff
    from recckpt.inspect.diff_result import lines_of, verdict
    from recckpt.storage import new_file

    tables = list[str]()  # tables that are not compared
    try:
        try:
            comparison = diff(args.before, args.after, tolerance=args.tolerance, top=args.top)
        except CheckpointNotFoundError:
            of_others = diff_of_others(args.before, args.after, args.tolerance)
            if of_others is None:
                raise
            comparison, tables = of_others
        lines = list(lines_of(comparison))
        if args.out is not None:
            with new_file(args.out) as sink:
                sink.write(comparison.to_html().encode())
            lines.append(f"wrote {one_line(args.out)}")
    except (RecckptError, OSError, ValueError) as error:
        raise CommandError(str(error), USAGE) from error
    problems = [] if comparison.is_equal else [verdict(comparison)]
    if tables:
        problems.append(f"tables are not compared: {first_few(tables)}; import foreign files, then compare")
    return CommandResult({**comparison.to_dict(), "tables_not_compared": tables}, lines, problems)


def run_report(args: argparse.Namespace) -> CommandResult:
    """Report on a run and write a page; with ``--json`` only if ``--out`` is given."""
    from recckpt.errors import needed
    from recckpt.inspect.report import report
    from recckpt.inspect.report_text import lines_of, verdict
    from recckpt.storage import new_file

    path = args.out or (None if args.json else "report.html")
    options = {"deep": args.deep, "threads": args.threads, "overdue_sec": args.overdue}
    options |= {"failures_per_day": args.failures_per_day, "near": args.near}
    with usage_checked():
        if path is None:
            run = report(args.dir, **options)
        else:
            os.environ.pop("MPLBACKEND", None)  # a notebook sets it for `!recckpt`, but its backend may not exist here
            needed("matplotlib", "report")  # fail before reading anything
            with new_file(path) as sink:
                run = report(args.dir, **options)
                sink.write(run.to_html().encode())
    written = [] if path is None else [f"wrote {one_line(path)}"]
    problems = [] if run.is_healthy else [f"{run.url}: {verdict(run)}"]
    return CommandResult(run.to_dict(), [*lines_of(run), *written], problems)


def run_plan(args: argparse.Namespace) -> CommandResult:
    from recckpt.load.inventory import listed_inventory
    from recckpt.load.open_source import opened
    from recckpt.load.plan import plan_load
    from recckpt.load.report import LoadPlan
    from recckpt.load.source import LocatedBank, locate_bank
    from recckpt.output_dir.open_files import first_whole

    model = listed_inventory(_text(args.model_names).split("\n"))
    if not model:
        raise CommandError(f"{args.model_names}: found no names, expected the lines of Saver.names()")
    try:
        bank = json.loads(_text(args.bank))
    except ValueError as error:
        raise CommandError(f"{args.bank}: not JSON: {one_line(str(error))}") from error

    def plan_one(located: LocatedBank) -> LoadPlan:
        with opened(located.sources) as sources:
            return plan_load(model, [source.offer(model) for source in sources], located.problems)

    try:
        planned = first_whole(lambda: locate_bank([bank] if isinstance(bank, dict) else bank), plan_one)
    except RecckptError as error:
        texts = error.problems if isinstance(error, LoadConfError) else [str(error)]
        return CommandResult({"problems": texts}, [], texts)
    return CommandResult(planned.to_dict(), str(planned).splitlines())


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: not UTF-8: {error}") from error
