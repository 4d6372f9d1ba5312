"""The command line: parses the arguments, runs a command, prints text or JSON, returns the exit code."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import cast

from recckpt.cli import terminal
from recckpt.cli.commands import module_of, parsers
from recckpt.cli.result import PROBLEM, USAGE, CommandError, CommandResult, UsageError, leave_stdout
from recckpt.errors import RecckptError
from recckpt.text import nearest
from recckpt.text.bars import ElapsedTime
from recckpt.text.foreign_words import write_instead

_COMPLETES = "_ARGCOMPLETE"  # set by a shell that asks for completions
_INTERRUPTED, _TERMINATED = 130, 143  # exit codes by shell convention
_OPTION = re.compile(r"--[a-z][a-z-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 if all is good, 1 for a problem, 2 for wrong usage, 130 or 143 after a signal."""
    try:
        with _ended_by_signals():
            code = _main(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:  # from a signal, or from argparse, which has printed its message
        code = end.code if isinstance(end.code, int) else USAGE
    return _written(code, lambda: None)


def _main(argv: Sequence[str]) -> int:
    if _COMPLETES in os.environ:
        from recckpt.cli.completion import complete

        complete(parsers()[0])
    place = next((place for place, word in enumerate(argv) if not word.startswith("-")), len(argv))
    parser, commands = parsers("".join(argv[place : place + 1]))
    _refuse_misspelt(parser, commands, argv[place:])
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

    def write() -> None:
        if args.json:
            terminal.print_text(outcome.as_json())
        else:
            terminal.print_lines(outcome.lines)

    code = _written(outcome.code, write)
    for problem in outcome.problems:
        terminal.complain(problem)
    return code


def _run(args: argparse.Namespace) -> CommandResult:
    return cast(CommandResult, getattr(module_of(args.command), f"run_{args.command}")(args))


def _refuse_misspelt(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], words: Sequence[str]
) -> None:
    """Exit with a usage error if the command or a long option does not exist, and suggest a correction.

    argparse also reports this, but only after it has misread the option's value.
    """
    if not words:
        return
    name = words[0]
    if name not in commands:
        hint = write_instead(name, in_shell=True) or nearest(name, commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {name!r}{hint}")
    known = set(_OPTION.findall(commands[name].format_help().partition("\nexamples:\n")[0]))
    for word in words[1:]:
        if word == "--":
            return
        option = word.partition("=")[0]
        if word.startswith("--") and " " not in word and not any(each.startswith(option) for each in known):
            hint = write_instead(option, in_shell=True) or nearest(option, sorted(known))
            commands[name].error(f"there is no option {option!r}{hint}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the block by SystemExit at SIGTERM and SIGINT, so that half-written files are removed.

    This also works for process 1 of a container, for which the kernel drops signals without a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal does not wait for the cleanup
        raise SystemExit(_TERMINATED)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGTERM] is signal.SIG_DFL:  # keep the handler of a program that runs commands
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _written(code: int, write: Callable[[], object]) -> int:
    """Write to stdout and return the exit code; a closed pipe is not an error, a full disk is."""
    if sys.stdout is None or sys.stdout.closed:
        return code
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        leave_stdout()
    except OSError as error:
        leave_stdout()
        terminal.complain(f"the output cannot be written: {error}")
        return code or PROBLEM
    return code
