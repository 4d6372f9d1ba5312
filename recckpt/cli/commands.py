"""All commands: help text, examples, and the module that has the arguments and the implementation of each.

For the command ``ls``, ``ARGUMENTS["ls"]`` are the arguments, and ``run_ls(args)`` runs the command. A module is
imported when its command is used, and slow imports happen when it runs: `recckpt --help` and shells do not wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from recckpt.cli.arguments import Argument
from recckpt.cli.result import GOOD

COMMANDS = {  # name -> its module, and what it does
    "ls": ("ls", "list the checkpoints of an output dir, oldest first, or the runs in a directory of output dirs"),
    "show": ("show", "show what a checkpoint holds, or what another program saved"),
    "head": ("rows", "print the first rows of a table"),
    "get": ("rows", "print rows of a table by id, or a dense tensor"),
    "verify": ("verify", "look for damage, down to every byte"),
    "history": ("rows", "show rows of a table over all checkpoints of a run: norm, changes, count, moments"),
    "diff": ("reports", "say what differs between two checkpoints: rows, tensors, training state"),
    "report": ("reports", "look at a run, and write a page: what is unhealthy, checkpoints, saves, rows of tables"),
    "sql": ("rows", "query tables, `checkpoints` and `timeline` by SQL, with duckdb"),
    "watch": ("watch", "show how a run saves, and go on showing it until control-C"),
    "consolidate": ("convert", "write the dense tensors to one model.pt, joined from all ranks"),
    "repair": ("upkeep", "rewrite the index file of an output dir, and list what crashes left"),
    "compact": ("upkeep", "make a full checkpoint of a chain of deltas, beside a trainer or without one"),
    "mirror": ("mirror", "copy what is new in an output dir to another place, checked, beside a trainer"),
    "near": ("ls", "list the near saves on this host, or remove them"),
    "forget": ("upkeep", "remove ids from a table in all files of an output dir; takes the output dir over"),
    "plan": ("reports", "say what a model bank would load, from where, without loading it"),
    "import": ("convert", "make a checkpoint of what another program saved"),
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
recckpt get model.safetensors item.weight 17   # a row, of what another program saved
recckpt verify runs/clicks           # all checkpoints, every byte
recckpt verify runs/clicks/latest --quick
recckpt verify --absent ids.txt --table user runs/clicks s3://backup/clicks /dev/shm/recckpt
recckpt history runs/clicks item 17 -42
recckpt history s3://models/clicks item 17 --json
recckpt diff runs/clicks/latest~1 runs/clicks/latest
recckpt diff runs/clicks/ckpt_300 runs/other/ckpt_300 --tolerance 1e-6 --out diff.html
recckpt report runs/clicks                     # writes report.html
recckpt report s3://models/clicks --out clicks.html --quick
recckpt report runs/clicks --quick --failures-per-day 1   # how often it would best save
recckpt sql runs/clicks "select count(*) from item"
recckpt sql runs/clicks "select step, rows, bytes from checkpoints order by step" --csv
recckpt watch runs/clicks
recckpt watch s3://models/clicks --once --json   # for programs
recckpt watch s3://models --once                 # all runs there
recckpt watch runs/clicks --near /dev/shm/recckpt
recckpt consolidate runs/clicks --out model.pt
recckpt repair runs/clicks --dry-run --clean   # says what would be removed
recckpt repair runs/clicks --clean
recckpt compact runs/clicks             # the trainer adopts it at its next save
recckpt compact runs/clicks --adopt     # where no trainer runs
recckpt compact runs/clicks latest~1 --out runs/whole
recckpt mirror runs/clicks s3://backup/clicks --keep 20
recckpt mirror s3://models/clicks /local/clicks --keep 1 --follow   # a local copy to serve from
recckpt near ls /dev/shm/recckpt
recckpt near clear /dev/shm/recckpt     # such as on a host that was away while ids were forgotten
recckpt forget runs/clicks --table user --ids ids.txt --dry-run   # what it would write again
recckpt forget runs/clicks --table user --ids ids.txt --mirrors s3://backup/clicks /local/clicks
recckpt forget runs/clicks              # ends what was begun earlier
recckpt plan --model-names names.txt bank.json
recckpt import vectors.parquet runs/start --table item --ids item_id --embedding vector
recckpt import model.safetensors runs/start --as-table item.weight --dry-run
recckpt export runs/clicks vectors --to npy --table item
recckpt export runs/clicks changed --to parquet --since latest~1
recckpt export runs/clicks/ckpt_300 whole --to parquet --skip-damaged   # of a damaged checkpoint
"""
_EXIT_CODES = "exit codes: 0 good, 1 a problem was found, 2 wrong usage"
_OWN_EXIT_CODES = {"diff": "exit codes: 0 equal, 1 different, 2 an error"}
_LONGER = {
    "watch": (
        "Show how a run saves: step, last save, pause, chain, errors; and go on showing it until control-C or "
        "SIGTERM. Without a terminal, or without rich, a line whenever something has changed; with --json, a line a "
        "look. Of a directory of output dirs a line for each run."
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
        epilog=f"`recckpt COMMAND --help` says more, with examples\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")
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
            else:  # of these only one is taken
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
