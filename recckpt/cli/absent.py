"""``recckpt verify --absent``: whether ids are anywhere in an output dir; says which only where asked."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.behind import problems_behind, urls_of
from recckpt.cli.result import CommandResult, usage_checked
from recckpt.format.distinct import distinct
from recckpt.inspect.absent import Absence, Holding, look_for
from recckpt.inspect.ids_file import read_ids
from recckpt.text import Line, Table, count, escaped, one_line, plural

_HEAD = ("DIRECTORY", "CHECKPOINT", "TABLE", "ROWS", "DELETES")


def absent(args: argparse.Namespace) -> CommandResult:
    """List which checkpoints and leftovers still hold any of the ids."""
    with usage_checked():
        ids = distinct(read_ids(args.absent))
        absence = look_for(args.path, ids, args.table)
    url, where = one_line(absence.url), "any table" if args.table is None else f"table {escaped(args.table)}"
    table = Table(_HEAD, [_row(each) for each in absence.holding], ("ROWS", "DELETES"))
    lines: list[Line] = [table] if absence.holding else []
    if args.print_ids:
        lines += [f"{escaped(each.directory) or '.'}, {escaped(each.table)}: {_ids(each)}" for each in absence.holding]
    problems = _problems(absence, len(ids), where)
    if not problems:
        lines.append(f"{url}: none of {plural(len(ids), 'id')} is in {where} of {plural(absence.n_parts, 'file')}")
    if absence.n_asked:
        lines.append(f"{url}: {absence.n_asked} of them were asked to be forgotten, by the audit")
    problems += problems_behind(url, absence.mirrors_behind, absence.hosts_behind)
    return CommandResult(_data(absence, len(ids), args, is_absent=not problems), lines, problems)


def _row(each: Holding) -> tuple[str, ...]:
    name = "-" if each.ckpt_id is None else escaped(each.ckpt_id)
    return escaped(each.directory or "."), name, escaped(each.table), count(each.n_rows), count(each.n_deletes)


def _problems(absence: Absence, n_ids: int, where: str) -> list[str]:
    problems = []
    if absence.holding:
        n_places = len({each.directory for each in absence.holding})
        what = "1 directory holds" if n_places == 1 else f"{n_places} directories hold"
        problems.append(f"{absence.url}: {what} some of {plural(n_ids, 'id')} in {where}")
    for path, why in absence.unread.items():
        problems.append(f"{absence.url}/{path}: found {why}, so nobody can say what it holds: `recckpt verify`")
    for table, n_named in absence.pending.items():
        what = f"a request to forget ids of table {table!r}, {n_named} of these among them, is not ended"
        problems.append(f"{absence.url}: {what}: `recckpt forget DIR` goes on")
    return problems


def _ids(each: Holding) -> str:
    return ", ".join(map(str, distinct(*each.ids)))


def _data(absence: Absence, n_ids: int, args: argparse.Namespace, *, is_absent: bool) -> dict[str, Any]:
    holding = []
    for each in absence.holding:
        entry: dict[str, Any] = {"directory": each.directory, "id": each.ckpt_id, "table": each.table}
        entry |= {"rows": each.n_rows, "deletes": each.n_deletes}
        if args.print_ids:
            entry["ids"] = distinct(*each.ids).tolist()
        holding.append(entry)
    return {
        "url": absence.url,
        "table": args.table,
        "n_ids": n_ids,
        "absent": is_absent,
        "holding": holding,
        "unread": absence.unread,
        "pending": absence.pending,
        "files": absence.n_parts,
        "asked": absence.n_asked,
        "mirrors_behind": urls_of(absence.mirrors_behind),
        "hosts_behind": [each.as_data for each in absence.hosts_behind],
    }
