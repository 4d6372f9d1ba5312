"""The command line: parses the arguments, runs a command, prints text or JSON, returns the exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import cast

from recckpt.cli import terminal
from recckpt.cli.commands import parsers
from recckpt.cli.endings import ended_by_signals, written
from recckpt.cli.misspelt import refuse_misspelt
from recckpt.cli.result import PROBLEM, USAGE, CommandError, CommandResult, UsageError
from recckpt.errors import RecckptError
from recckpt.text.bars import ElapsedTime

_MODULES = {"head": "rows", "get": "rows", "import": "import_source"}  # of those that have other names
_FUNCTIONS = {"import": "import_source"}  # of those whose name Python keeps for itself
_COMPLETES = "_ARGCOMPLETE"  # is set where a shell asks how the line may go on


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; ``sys.argv`` where None.

    Returns:
        0 good, 1 a problem was found, 2 wrong usage; 130 and 143 where SIGINT and SIGTERM have ended it.
    """
    try:
        with ended_by_signals():
            code = _main(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:  # by a signal, or because argparse has said what there is to say
        code = end.code if isinstance(end.code, int) else USAGE
    return written(code, lambda: None)


def _main(argv: Sequence[str]) -> int:
    parser, commands = parsers()
    if _COMPLETES in os.environ:
        from recckpt.cli.completion import complete

        complete(parser)
    refuse_misspelt(parser, commands, argv)
    args, others = parser.parse_known_args(argv)
    command = commands[args.command]
    if others:
        command.error(f"unrecognized arguments: {' '.join(others)}; `recckpt {args.command} --help` has examples")
    logging.basicConfig(handlers=[terminal.LogLines()], level=logging.WARNING)
    try:
        with nullcontext() if args.command == "watch" else ElapsedTime(f"recckpt {args.command}"):
            outcome = _run(args)
    except UsageError as error:
        command.print_usage(sys.stderr)
        terminal.complain(str(error))
        return USAGE
    except (RecckptError, CommandError, OSError) as error:
        terminal.complain(str(error))
        return error.code if isinstance(error, CommandError) else PROBLEM
    code = written(outcome.code, lambda: _print(outcome, as_json=args.json))
    for problem in outcome.problems:
        terminal.complain(problem)
    return code


def _print(outcome: CommandResult, *, as_json: bool) -> None:
    if as_json:
        terminal.print_text(outcome.as_json())
    else:
        terminal.print_lines(outcome.lines)


def _run(args: argparse.Namespace) -> CommandResult:
    """Import a command only when it is run: some imports take long."""
    module = import_module(f"recckpt.cli.{_MODULES.get(args.command, args.command)}")
    return cast(CommandResult, getattr(module, _FUNCTIONS.get(args.command, args.command))(args))
