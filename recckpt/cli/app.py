"""The command line: parses the arguments, runs a command, prints text or JSON, returns the exit code."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from recckpt.cli import convert_options, look_options
from recckpt.cli.result import GOOD, PROBLEM, USAGE, CommandError, Outcome, UsageError, leave_stdout
from recckpt.errors import RecckptError
from recckpt.text import one_line

_INTERRUPTED = 130  # as a shell says it
_MODULES = {
    "ls": "ls",
    "show": "show",
    "head": "rows",
    "get": "rows",
    "verify": "verify",
    "salvage": "salvage",
    "consolidate": "consolidate",
    "repair": "repair",
    "compact": "compact",
    "forget": "forget",
    "plan": "plan",
    "diff": "diff",
    "report": "report",
    "sql": "sql",
    "watch": "watch",
    "import": "import_source",
    "export": "export",
}
_FUNCTIONS = {"import": "import_source"}  # of those whose name Python keeps for itself
_ANY_CHECKPOINT = "a checkpoint, or an output dir, whose newest is meant; a path or URL, DIR/latest~1 too"
_IDS = "a text file with an id a line, .npy or .parquet"
_EXIT_CODES = "exit codes: 0 good, 1 a problem was found, 2 wrong usage"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; ``sys.argv`` where None.

    Returns:
        0 good, 1 a problem was found, 2 wrong usage.
    """
    try:
        args = parser_of_commands().parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else USAGE
    logging.basicConfig(format="recckpt: %(message)s", level=logging.WARNING)
    try:
        outcome = _run(args)
    except (RecckptError, CommandError, OSError) as error:
        return _complain(PROBLEM, str(error))
    except UsageError as error:
        return _complain(USAGE, str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    for problem in outcome.problems:
        _complain(PROBLEM, problem)
    _print(outcome.text(as_json=args.json))
    return outcome.code


def _run(args: argparse.Namespace) -> Outcome:
    """Import a command only when it is run: some imports take long."""
    module = import_module(f"recckpt.cli.{_MODULES[args.command]}")
    return cast(Outcome, getattr(module, _FUNCTIONS.get(args.command, args.command))(args))


def _complain(code: int, message: str) -> int:
    print(f"recckpt: {one_line(message)}", file=sys.stderr)
    return code


def _print(text: str) -> None:
    """Write to stdout, whose reader may close it early, and whose encoding may lack characters."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        leave_stdout()


def parser_of_commands() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="recckpt", description="Look into checkpoints, without torch and without the model.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=what, description=what, epilog=_EXIT_CODES)

    ls = command("ls", "list the checkpoints of an output dir, oldest first")
    ls.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    show = command("show", "show what a checkpoint holds")
    show.add_argument("--files", action="store_true", help="list the files too, and name those of each table")
    head = command("head", "print the first rows of a table")
    head.add_argument("-n", type=_natural, default=10, metavar="N", help="number of rows (default: %(default)s)")
    get = command("get", "print rows of a table by id")
    for with_checkpoint in (show, head, get):
        with_checkpoint.add_argument("checkpoint", metavar="CKPT", help=_ANY_CHECKPOINT)
    for with_table in (head, get):
        with_table.add_argument("table", metavar="TABLE")
        with_table.add_argument("--columns", metavar="A,B", help="slots to print, separated by commas (default: all)")
    get.add_argument("ids", metavar="ID", nargs="+", type=_id, help="any int64, negative ones too")
    verify = command("verify", "look for damage, down to every byte")
    verify.add_argument("path", metavar="CKPT|DIR", help="a checkpoint, or an output dir, of which all are checked")
    depth = verify.add_mutually_exclusive_group()
    depth.add_argument("--deep", action="store_true", default=True, help="read every byte (the default)")
    depth.add_argument("--quick", dest="deep", action="store_false", help="look at manifests and file sizes only")
    threads_help = "files to read at once (default: 8, locally at most one a core)"
    verify.add_argument("--threads", type=_positive, metavar="N", help=threads_help)
    absent_help = f"look for these ids instead, in every file that is there, and list what holds them; {_IDS}"
    verify.add_argument("--absent", metavar="FILE", help=absent_help)
    verify.add_argument("--table", metavar="TABLE", help="with --absent: the table that is meant (default: all)")
    verify.add_argument("--print-ids", action="store_true", help="with --absent: print the ids that were found")
    look_options.add_diff(command)
    look_options.add_report(command)
    look_options.add_sql(command)
    look_options.add_watch(command)
    _add_mending(command)
    convert_options.add_import(command)
    convert_options.add_export(command)
    return parser


def _add_mending(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands that write something, and the one that says what a load would do."""
    salvage = command("salvage", "write the rows of a table that are whole to an Arrow file, and list what is lost")
    salvage.add_argument("checkpoint", metavar="CKPT", help="a checkpoint; a path or URL")
    salvage.add_argument("table", metavar="TABLE")
    salvage.add_argument("--out", metavar="FILE.arrow", required=True, help="the file to write; must not exist")
    unverified_help = "take rows too that no checksum vouches for, where a catalog cannot be read"
    salvage.add_argument("--unverified", action="store_true", help=unverified_help)
    consolidate = command("consolidate", "write the dense tensors to one model.pt, those of several ranks put together")
    consolidate.add_argument("checkpoint", metavar="CKPT", help=_ANY_CHECKPOINT)
    out_help = "the file to write (default: %(default)s); must not exist"
    consolidate.add_argument("--out", metavar="FILE", default="model.pt", help=out_help)
    repair = command("repair", "make the index file of an output dir anew, and list what crashes left")
    repair.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    repair.add_argument("--clean", action="store_true", help="remove what no writer can still be writing")
    repair.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    _add_compact(command)
    forget = command("forget", "remove ids from a table in all that lies in an output dir; takes it over")
    forget.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    forget.add_argument("--table", metavar="TABLE", help="without it and --ids, end what was begun earlier")
    forget.add_argument("--ids", metavar="FILE", help=_IDS)
    plan = command("plan", "say what a model bank would load, from where, without loading it")
    plan.add_argument("--model-names", metavar="FILE", required=True, help="names of the model: lines of Saver.names()")
    plan.add_argument("bank", metavar="BANK.json", help="the model bank: a JSON list of entries")


def _add_compact(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    compact = command("compact", "make a full checkpoint of a chain of deltas, beside a trainer or without one")
    compact.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    compact.add_argument("ckpt", metavar="CKPT", nargs="?", help="id of the checkpoint (default: the newest)")
    compact.add_argument("--out", metavar="OTHER", help="another output dir, to which the checkpoint is written")
    adopt_help = "take the output dir over and commit what was made; without it the trainer does, at its next save"
    compact.add_argument("--adopt", action="store_true", help=adopt_help)
    workers_help = "threads that work (default: %(default)s, locally at most one a core)"
    compact.add_argument("--workers", type=_positive, default=4, metavar="N", help=workers_help)
    budget_help = "memory to use, such as 512MB or 1GiB (default: 256MiB)"
    compact.add_argument("--budget", type=_size, default=256 << 20, metavar="SIZE", help=budget_help)


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})([kMGT]?)(i?)B?", text, re.ASCII)
    if found is None or not int(found[1]) or (found[3] and not found[2]):
        raise ValueError(text)
    return int(found[1]) * int((1024 if found[3] else 1000) ** " kMGT".index(found[2] or " "))


def _id(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an int64")
    return number


_natural.__name__ = _positive.__name__ = "count"  # as argparse calls it in "invalid ... value"
_id.__name__ = "id"
_size.__name__ = "size"


class _Version(argparse.Action):
    """Looks the version up only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        from recckpt.format.manifest import VERSION

        try:
            installed = version("recckpt")
        except PackageNotFoundError:
            installed = "(not installed)"
        print(f"recckpt {installed}, format version {VERSION}")
        parser.exit(GOOD)
