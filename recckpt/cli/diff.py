"""``recckpt diff``: what differs between two checkpoints."""

from __future__ import annotations

import argparse

from recckpt.cli.result import USAGE, CommandError, CommandResult
from recckpt.errors import RecckptError
from recckpt.inspect.diff.diff import diff as compare
from recckpt.inspect.diff.lines import lines_of, verdict
from recckpt.storage import new_file
from recckpt.text import one_line


def diff(args: argparse.Namespace) -> CommandResult:
    """Compare two checkpoints; like that of files, the exit code is 1 where they differ and 2 after an error."""
    try:
        comparison = compare(args.before, args.after, tolerance=args.tolerance, top=args.top)
        lines = list(lines_of(comparison))
        if args.out is not None:
            with new_file(args.out) as sink:
                sink.write(comparison.to_html().encode())
            lines.append(f"wrote {one_line(args.out)}")
    except (RecckptError, OSError, ValueError) as error:
        raise CommandError(str(error), USAGE) from error
    return CommandResult(comparison.to_dict(), lines, [] if comparison.is_equal else [verdict(comparison)])
