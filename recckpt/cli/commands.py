"""All commands: help text, examples, and the module with the arguments and code of each command.

For the command ``ls``, ``ARGUMENTS["ls"]`` has the arguments, and ``run_ls(args)`` runs the command. A module is
imported when its command is used, and imports slow libraries when it runs, so `recckpt --help` and shells do not wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from recckpt.cli.arguments import Argument
from recckpt.cli.result import GOOD

COMMANDS = {  # name -> module, and what the command does
    "ls": ("ls", "list the checkpoints of an output dir, oldest first, or the runs in a directory of output dirs"),
    "show": ("show", "show the contents of a checkpoint, or of files of another program"),
    "head": ("rows", "print the first rows of a table"),
    "get": ("rows", "print rows of a table by id, or a dense tensor"),
    "verify": ("verify", "check every byte for damage"),
    "history": ("rows", "show rows of a table over all checkpoints of a run: norm, changes, count, moments"),
    "diff": ("reports", "compare two checkpoints: rows, tensors, training state"),
    "report": ("reports", "write a page about a run: problems, checkpoints, saves, rows of tables"),
    "sql": ("rows", "query tables, `checkpoints` and `timeline` by SQL, with duckdb"),
    "watch": ("watch", "show how a run saves, until control-C"),
    "consolidate": ("convert", "write the dense tensors to one model.pt, joined from all ranks"),
    "repair": ("upkeep", "rewrite the index file of an output dir, and list leftovers of crashes"),
    "compact": ("upkeep", "make a full checkpoint from a chain of deltas, beside a trainer or without one"),
    "mirror": ("mirror", "copy new checkpoints of an output dir to another place and check them, beside a trainer"),
    "near": ("ls", "list the near saves on this host, or remove them"),
    "forget": ("upkeep", "remove ids from a table in all files of an output dir; takes over the output dir"),
    "plan": ("reports", "show what a model bank would load, and from where, without loading it"),
    "import": ("convert", "make a checkpoint from files of another program"),
    "export": ("convert", "write tables and tensors of a checkpoint in another format"),
}
_EXAMPLES = """\
recckpt ls runs/clicks
recckpt ls s3://models/clicks --json
recckpt ls runs                          # a line for each run
recckpt show runs/clicks                    # the newest checkpoint of an output dir
recckpt show runs/clicks/latest~1 --files   # the one before, with its files
recckpt head runs/clicks item -n 3
recckpt head runs/clicks/ckpt_300 item --columns embedding
recckpt get runs/clicks item 17 -42
recckpt get runs/clicks top.weight all      # a dense tensor
recckpt get model.safetensors item.weight 17   # a row from a file of another program
recckpt verify runs/clicks           # all checkpoints, every byte
recckpt verify runs/clicks/latest --quick
recckpt verify --absent ids.txt --table user runs/clicks s3://backup/clicks /dev/shm/recckpt
recckpt history runs/clicks item 17 -42
recckpt history s3://models/clicks item 17 --json
recckpt diff runs/clicks/latest~1 runs/clicks/latest
recckpt diff runs/clicks/ckpt_300 runs/other/ckpt_300 --tolerance 1e-6 --out diff.html
recckpt report runs/clicks                     # writes report.html
recckpt report s3://models/clicks --out clicks.html --quick
recckpt report runs/clicks --quick --failures-per-day 1   # also advises how often to save
recckpt sql runs/clicks "select count(*) from item"
recckpt sql runs/clicks "select step, rows, bytes from checkpoints order by step" --csv
recckpt watch runs/clicks
recckpt watch s3://models/clicks --once --json   # for programs
recckpt watch s3://models --once                 # all runs there
recckpt watch runs/clicks --near /dev/shm/recckpt
recckpt consolidate runs/clicks --out model.pt
recckpt repair runs/clicks --dry-run --clean   # lists what would be removed
recckpt repair runs/clicks --clean
recckpt compact runs/clicks             # the trainer adopts the result at its next save
recckpt compact runs/clicks --adopt     # if no trainer runs
recckpt compact runs/clicks latest~1 --out runs/whole
recckpt mirror runs/clicks s3://backup/clicks --keep 20
recckpt mirror s3://models/clicks /local/clicks --keep 1 --follow   # a local copy to serve from
recckpt near ls /dev/shm/recckpt
recckpt near clear /dev/shm/recckpt     # such as on a host that was off while ids were forgotten
recckpt forget runs/clicks --table user --ids ids.txt --dry-run   # what would be rewritten
recckpt forget runs/clicks --table user --ids ids.txt --mirrors s3://backup/clicks /local/clicks
recckpt forget runs/clicks              # completes earlier requests
recckpt plan --model-names names.txt bank.json
recckpt import vectors.parquet runs/start --table item --ids item_id --embedding vector
recckpt import model.safetensors runs/start --as-table item.weight --dry-run
recckpt export runs/clicks vectors --to npy --table item
recckpt export runs/clicks changed --to parquet --since latest~1
recckpt export runs/clicks/ckpt_300 whole --to parquet --skip-damaged   # the undamaged rows
"""
_EXIT_CODES = "exit codes: 0 good, 1 a problem was found, 2 wrong usage"
_OWN_EXIT_CODES = {"diff": "exit codes: 0 equal, 1 different, 2 an error"}
_LONGER = {
    "watch": (
        "Show how a run saves: step, last save, pause, chain, errors; until control-C or SIGTERM. Without a terminal, "
        "or without rich, prints a line after each change; with --json, a line per poll. For a directory of output "
        "dirs, shows a line per run."
    )
}


def examples_of(command: str) -> list[str]:
    return [line for line in _EXAMPLES.splitlines() if line.startswith(f"recckpt {command} ")]


def module_of(command: str) -> ModuleType:
    return import_module(f"recckpt.cli.{COMMANDS[command][0]}")


def parsers(only: str | None = None) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the main parser and one parser per command; if ``only`` is given, only that command gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="recckpt",
        description="Look into checkpoints, without torch and without the model.",
        epilog=f"`recckpt COMMAND --help` has details and examples\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON; NaN and infinities as strings")
    for name, (_, what) in COMMANDS.items():
        examples = "".join(f"  {line}\n" for line in examples_of(name))
        command = subparsers.add_parser(
            name,
            parents=[common],
            help=what,
            description=_LONGER.get(name, what),
            epilog=f"examples:\n{examples}\n{_OWN_EXIT_CODES.get(name, _EXIT_CODES)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for each in module_of(name).ARGUMENTS[name] if only in (None, name) else ():
            if isinstance(each, Argument):
                command.add_argument(*each.names, **each.options)
            else:  # options that exclude each other
                group = command.add_mutually_exclusive_group()
                for names, options in each:
                    group.add_argument(*names, **options)
    return parser, subparsers.choices


class _Version(argparse.Action):
    """Looks up the version only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        from recckpt.format.manifest import KIND
        from recckpt.output_dir.commit import WRITER

        print(f"recckpt {WRITER.get('recckpt', '(not installed)')}, format version {KIND.version}")
        parser.exit(GOOD)
