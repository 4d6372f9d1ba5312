"""All commands, and their arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from recckpt.cli import convert_options, look_options, run_options
from recckpt.cli.examples import EXAMPLES
from recckpt.cli.look_options import natural, positive
from recckpt.cli.result import GOOD

_ANY_CHECKPOINT = "a checkpoint, or an output dir, whose newest is meant; a path or URL, DIR/latest~1 too"
_IDS = "a text file with an id a line, .npy or .parquet"
_KEEP = (
    "a number of the newest, all, every=STEPS, best=METRIC, least=METRIC, days=N, one-per-days=N, bytes=SIZE; some of "
    "them, by commas"
)
_EXIT_CODES = "exit codes: 0 good, 1 a problem was found, 2 wrong usage"
_OWN_EXIT_CODES = {
    "diff": "exit codes: 0 equal, 1 different, 2 an error",
    "first": "exit codes: 0 found, 1 not found, 2 an error",
}

Command = Callable[[str, str], argparse.ArgumentParser]  # adds one: its name, and what it does


def parser_of_commands() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    return parsers()[0]


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of all commands, and that of each."""
    parser = argparse.ArgumentParser(
        prog="recckpt",
        description="Look into checkpoints, without torch and without the model.",
        epilog=f"`recckpt COMMAND --help` says more, with examples\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            parents=[common],
            help=what,
            description=what,
            epilog=_epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    _add_looking(command)
    run_options.add_history(command, _id)
    run_options.add_first(command)
    look_options.add_diff(command)
    look_options.add_report(command)
    look_options.add_sql(command)
    look_options.add_watch(command)
    _add_mending(command)
    convert_options.add_import(command)
    convert_options.add_export(command)
    return parser, commands.choices


def _add_looking(command: Command) -> None:
    """Add the commands that only read."""
    ls = command("ls", "list the checkpoints of an output dir, oldest first, or the runs in a directory of output dirs")
    ls.add_argument("dir", metavar="DIR", help="output dir, or a directory of output dirs; a path or URL")
    ls.add_argument("--near", metavar="PATH", help="list the near saves too that a restore with Near(PATH) may take")
    show = command("show", "show what a checkpoint holds")
    show.add_argument("--files", action="store_true", help="list the files too, and name those of each table")
    head = command("head", "print the first rows of a table")
    head.add_argument("-n", type=natural, default=10, metavar="N", help="number of rows (default: %(default)s)")
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
    verify.add_argument("--threads", type=positive, metavar="N", help=threads_help)
    absent_help = f"look for these ids instead, in every file that is there, and list what holds them; {_IDS}"
    verify.add_argument("--absent", metavar="FILE", help=absent_help)
    verify.add_argument("--table", metavar="TABLE", help="with --absent: the table that is meant (default: all)")
    verify.add_argument("--print-ids", action="store_true", help="with --absent: print the ids that were found")


def _epilog(name: str) -> str:
    """Return examples, and what the exit codes mean."""
    examples = "".join(f"  {line}\n" for line in EXAMPLES[name])
    return f"examples:\n{examples}\n{_OWN_EXIT_CODES.get(name, _EXIT_CODES)}"


def _add_mending(command: Command) -> None:
    """Add the commands that write something, and the one that says what a load would do."""
    salvage = command("salvage", "write the rows of a table that are whole to an Arrow file, and list what is lost")
    salvage.add_argument("checkpoint", metavar="CKPT", help=f"{_ANY_CHECKPOINT}; it may be damaged")
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
    _add_mirror(command)
    near = command("near", "list the near saves on this host, or remove them")
    near.add_argument("what", choices=("ls", "clear"), help="list them, of all output dirs, or remove all")
    near.add_argument("path", metavar="PATH", help="as of Near(PATH)")
    forget = command("forget", "remove ids from a table in all that lies in an output dir; takes it over")
    forget.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    forget.add_argument("--table", metavar="TABLE", help="without it and --ids, end what was begun earlier")
    forget.add_argument("--ids", metavar="FILE", help=_IDS)
    dry_help = "change nothing; say what would be written again and removed, and about how long it takes"
    forget.add_argument("--dry-run", action="store_true", help=dry_help)
    plan = command("plan", "say what a model bank would load, from where, without loading it")
    plan.add_argument("--model-names", metavar="FILE", required=True, help="names of the model: lines of Saver.names()")
    plan.add_argument("bank", metavar="BANK.json", help="the model bank: a JSON list of entries")


def _add_compact(command: Command) -> None:
    compact = command("compact", "make a full checkpoint of a chain of deltas, beside a trainer or without one")
    compact.add_argument("dir", metavar="DIR", help="output dir; a path or URL")
    compact.add_argument("ckpt", metavar="CKPT", nargs="?", help="id of the checkpoint (default: the newest)")
    compact.add_argument("--out", metavar="OTHER", help="another output dir, to which the checkpoint is written")
    adopt_help = "take the output dir over and commit what was made; without it the trainer does, at its next save"
    compact.add_argument("--adopt", action="store_true", help=adopt_help)
    workers_help = "threads that work (default: %(default)s, locally at most one a core)"
    compact.add_argument("--workers", type=positive, default=4, metavar="N", help=workers_help)
    budget_help = "memory to use, such as 512MB or 1GiB (default: 256MiB)"
    compact.add_argument("--budget", type=_size, default=256 << 20, metavar="SIZE", help=budget_help)


def _add_mirror(command: Command) -> None:
    mirror = command("mirror", "copy what is new in an output dir to another place, checked, beside a trainer")
    mirror.add_argument("run", metavar="RUN", help="output dir; a path or URL")
    mirror.add_argument("to", metavar="TO", help="an empty place, or a mirror of RUN; a path or URL")
    mirror.add_argument("--follow", action="store_true", help="go on as the run goes on, until control-C")
    interval_help = "with --follow: from one look to the next (default: 5)"
    mirror.add_argument("--interval", type=look_options.seconds, metavar="SECONDS", help=interval_help)
    mirror.add_argument("--keep", metavar="POLICY", help=f"what to have there (default: what RUN has): {_KEEP}")
    rate_help = "bytes a second, such as 50MB, over all processes of this host that write there"
    mirror.add_argument("--max-upload-rate", type=_size, metavar="SIZE", help=rate_help)
    threads_help = "files to copy at once (default: %(default)s, locally at most one a core)"
    mirror.add_argument("--threads", type=positive, default=4, metavar="N", help=threads_help)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([kMGT]?)(i?)B?", text, re.ASCII)
    if match is None or not int(match[1]) or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 500000 or 50MB, found {text!r:.100}")
    return int(match[1]) * int((1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


def _id(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an int64")
    return number


_id.__name__ = "id"  # as argparse calls it in "invalid ... value"


class _Version(argparse.Action):
    """Looks the version up only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from recckpt.format.manifest import VERSION
        from recckpt.output_dir.writer import WRITER

        print(f"recckpt {WRITER.get('recckpt', '(not installed)')}, format version {VERSION}")
        parser.exit(GOOD)
