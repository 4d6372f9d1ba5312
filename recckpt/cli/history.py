"""``recckpt history``: rows over all checkpoints of a run."""

from __future__ import annotations

import argparse

from recckpt.cli.result import CommandError, CommandResult, usage_checked
from recckpt.inspect.over_time.history import history as history_of
from recckpt.inspect.over_time.printed import lines_of
from recckpt.text import escaped, plural


def history(args: argparse.Namespace) -> CommandResult:
    """Show rows by id, in the order asked for; ids that no checkpoint has, and damage, are problems."""
    with usage_checked():
        try:
            rows = history_of(args.dir, args.table, args.ids)
        except KeyError as error:
            raise CommandError(error.args[0]) from error
    missing = ", ".join(str(row.id) for row in rows.rows if not row.is_known)
    problems = (
        [f"{rows.url}: no checkpoint has a row of id {missing} in table {escaped(args.table)}"] if missing else []
    )
    if rows.damage:
        problems.append(f"{rows.url}: found damage in {plural(len(rows.damage), 'place')}; `recckpt verify` shows all")
    return CommandResult(rows.to_dict(), lines_of(rows), problems)
