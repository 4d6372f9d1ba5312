"""``recckpt first``: the first checkpoint of a run in which a condition holds."""

from __future__ import annotations

import argparse

from recckpt.cli.result import GOOD, PROBLEM, USAGE, CommandError, CommandResult
from recckpt.errors import RecckptError
from recckpt.inspect.over_time.first import first as search
from recckpt.inspect.over_time.first_match import lines_of
from recckpt.text import plural


def first(args: argparse.Namespace) -> CommandResult:
    """Search; as of ``grep``, the exit code is 0 where it was found, 1 where it was not and 2 after an error."""
    try:
        match = search(args.dir, args.where)
    except (RecckptError, OSError, ValueError) as error:
        raise CommandError(str(error), USAGE) from error
    n_damaged = len(match.damage)
    problems = [f"{match.url}: passed over {plural(n_damaged, 'damaged checkpoint')}"] if n_damaged else []
    return _Searched(match.to_dict(), lines_of(match), problems)


class _Searched(CommandResult):
    """The result of a search, which is good where something was found, whatever was passed over."""

    @property
    def code(self) -> int:
        """The exit code."""
        return GOOD if self.data["found"] else PROBLEM
