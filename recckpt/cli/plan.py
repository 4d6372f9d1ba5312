"""``recckpt plan``: what a model bank would load, without the model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recckpt.cli.result import CommandError, CommandResult
from recckpt.errors import LoadConfError, RecckptError
from recckpt.load.inventory import listed_inventory
from recckpt.load.open_source import opened
from recckpt.load.plan import plan_load
from recckpt.load.report import LoadPlan
from recckpt.load.source import LocatedBank, locate_bank
from recckpt.output_dir.first_whole import first_whole
from recckpt.text import one_line


def plan(args: argparse.Namespace) -> CommandResult:
    """Print where each name of a model would come from, or all that is wrong with the bank."""
    model = listed_inventory(_text(args.model_names).split("\n"))
    if not model:
        raise CommandError(f"{args.model_names}: found no names, expected the lines of Saver.names()")
    bank = _bank(args.bank)

    def plan_one(located: LocatedBank) -> LoadPlan:
        with opened(located.sources) as sources:
            return plan_load(model, [source.offer(model) for source in sources], located.problems)

    try:
        planned = first_whole(lambda: locate_bank(bank), plan_one)
    except RecckptError as error:
        texts = error.problems if isinstance(error, LoadConfError) else [str(error)]
        return CommandResult({"problems": texts}, [], texts)
    return CommandResult(planned.to_dict(), str(planned).splitlines())


def _bank(path: str) -> Any:
    try:
        bank = json.loads(_text(path))
    except ValueError as error:
        raise CommandError(f"{path}: not JSON: {one_line(str(error))}") from error
    return [bank] if isinstance(bank, dict) else bank


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path}: not UTF-8: {error}") from error
