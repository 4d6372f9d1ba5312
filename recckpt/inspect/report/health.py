"""What is unhealthy in a run, and what to do: pure judgement of what was found (no torch here)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from recckpt.format.moments import time_of
from recckpt.inspect.report.near import near_findings
from recckpt.inspect.report.result import CheckpointSize, Finding, Level, RunHealth, TableHealth, UnusableDirectory
from recckpt.inspect.report.row_counts import EXPLODING
from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.watch.history import History
from recckpt.text import count, duration, escaped, one_line, plural

_LONG_CHAIN = 40  # links: twice what `Deltas` lets a chain grow to by default
_LARGE_CHAIN = 3.0  # times the bytes of the full checkpoint
_MANY_DEAD = 0.01  # of the rows
_MANY_UNTRAINED = 0.5
_UNTRAINED = "look ids up with `admit=False` where nothing is trained, or let ids wait with `admit=MinCount(...)`"
_UNTRAINED_IN_LIVE = "a table of fewer rows would do, unless their ids are still to come"
_FEW_SAVES = 5  # needed before one is called slow
_LAST_SAVES = 10  # in which slow and failed ones are looked for
_SLOW = 3.0  # times the median
_SLOW_SEC = 1.0  # longer than the median at least
_NAMED = 3


def findings_of(run: RunHealth, now: datetime, overdue_sec: float | None = None) -> list[Finding]:
    """Return what is unhealthy, problems first; the findings that it has already do not count.

    Args:
        run: the run.
        now: the time.
        overdue_sec: the age of the newest checkpoint from which on a missing save is a problem; None for the usual.
    """
    findings = [*_of_dir(run.url, run.checkpoints, run.leftovers)]
    if run.checkpoints:
        newest = f"{run.url.removesuffix('/')}/{run.checkpoints[-1].directory}"
        findings += _of_files(newest, run.damage)
        findings += _of_unsaved(run)
        for table in run.tables:
            findings += _of_table(newest, table)
        findings += _of_chain(run.url, run.checkpoints[-1])
        findings += _of_age(run, now, overdue_sec)
    findings += [*_of_saves(run.saves), *near_findings(run.saves)]
    return sorted(findings, key=lambda finding: finding.level != "problem")


def _of_dir(
    url: str, checkpoints: Sequence[CheckpointSize], leftovers: Sequence[UnusableDirectory]
) -> Iterator[Finding]:
    where = one_line(url)
    if not checkpoints:
        remedy = f"See what is there with `recckpt ls {where}`; if checkpoints were moved or removed, put them back."
        yield Finding("problem", "No checkpoint here can be used.", remedy)
    for left in leftovers:
        level, what, remedy = _OF_LEFTOVERS[left.what if not left.is_dead else f"dead {left.what}"]
        name, reason = escaped(left.directory), one_line(left.reason)
        yield Finding(level, f"{name} {what}: {reason}", remedy.replace("DIR", where))


# What a directory is -> how bad that is, what it means, and what to do.
_OF_LEFTOVERS: Mapping[str, tuple[Level, str, str]] = {
    "damaged": (
        "problem",
        "is damaged, and a restore passes it over",
        "`recckpt verify DIR` lists all that is wrong; put the files back from a copy, or get the rows that are whole "
        "with `recckpt salvage`.",
    ),
    "newer": ("problem", "is of a newer recckpt, and no restore goes past it", "Install that version."),
    "unreadable": ("problem", "cannot be read", "Let the owner of the files grant access."),
    "dead fenced": (
        "warning",
        "came too late and is not used",
        "Two jobs wrote here: end the older one. `recckpt repair --clean DIR` removes what it left.",
    ),
    "dead unfinished": (
        "warning",
        "is no checkpoint: its save died, or it is half removed",
        "The log of that job says why; `recckpt repair --clean DIR` removes it.",
    ),
    "unfinished": (
        "warning",
        "is no checkpoint",
        "If no save runs now, it died: the log of its job says why, `recckpt repair --dry-run DIR` if it may go.",
    ),
}


def _of_files(newest: str, damage: Sequence[str]) -> Iterator[Finding]:
    if damage:
        yield Finding(
            "problem",
            f"the newest checkpoint is damaged: {_first_of(damage)}",
            "A restore passes it over and takes the one before. Put its files back from another copy before a job "
            f"starts: `recckpt verify {one_line(newest)}` names all that are damaged.",
        )


def _of_unsaved(run: RunHealth) -> Iterator[Finding]:
    if run.lacks:
        yield Finding(
            "warning",
            f"the newest checkpoint lacks {one_line(' and '.join(run.lacks))}",
            "A resume starts that from scratch. Register each dense optimizer by `register_for_checkpointing`, and "
            "give that of the tables to `Saver(model, sparse_optim)`; what is only looked up needs neither.",
        )


def _of_table(newest: str, table: TableHealth) -> Iterator[Finding]:
    name, where = f"table {escaped(table.name)}", one_line(newest)
    if table.damage:
        yield Finding(
            "problem",
            f"{name} is damaged, {_rows_of(table.rows_read, table)} are whole: {_first_of(table.damage)}",
            "A restore passes the checkpoint over and takes the one before. Put its files back from another copy; "
            f"without one, `recckpt salvage {where}` gets the rows that are whole.",
        )
    if table.not_finite:
        ids = ", ".join(map(str, table.not_finite_ids[:_NAMED]))
        slots = ", ".join(f"{escaped(slot)} of {_rows_of(n, table)}" for slot, n in table.not_finite.items())
        yield Finding(
            "problem",
            f"{name}: NaN or infinity in {slots}, such as those of ids {ids}",
            "Find the first checkpoint that has them (`recckpt diff` of older ones), go on from the one before, and "
            "clip gradients or lower the learning rate.",
        )
    if table.exploding and table.largest:
        ids = ", ".join(f"{row.id} ({row.norm:.3g})" for row in table.largest[:_NAMED])
        yield Finding(
            "warning",
            f"{name}: the norm of {_rows_of(table.exploding, table)} is over {EXPLODING} times the median; "
            f"the largest: {ids}",
            "Look at what these ids are: often one that stands for 'unknown', or a bot. Clip gradients, or add weight "
            "decay.",
        )
    if table.dead and table.dead > _MANY_DEAD * table.rows_read:
        yield Finding(
            "warning",
            f"{name}: {_rows_of(table.dead, table)} are all zeros",
            "Where rows start at zeros these are rows that nobody has trained; otherwise look for a mask, a multiplier "
            "or weight decay that drives rows to zero.",
        )
    if table.untrained and table.untrained > _MANY_UNTRAINED * table.rows_read:
        yield Finding(
            "warning",
            f"{name}: {_rows_of(table.untrained, table)} were never trained: their slots of the optimizer are zeros",
            f"They cost memory and bytes of each full save: {_UNTRAINED_IN_LIVE if table.is_live else _UNTRAINED}.",
        )


def _first_of(damage: Sequence[str]) -> str:
    """Name the first thing that is damaged, and say how many more are."""
    more = f" (and {count(len(damage) - 1)} more)" if len(damage) > 1 else ""
    return one_line(damage[0]) + more


def _rows_of(n_rows: int, table: TableHealth) -> str:
    """Say how many rows of a table are meant."""
    return f"{count(n_rows)} of {plural(table.rows, 'row')}"


def _of_chain(url: str, newest: CheckpointSize) -> Iterator[Finding]:
    n_links = len(newest.links)
    deltas = newest.chain_bytes - newest.full_bytes
    if n_links > _LONG_CHAIN or (n_links > 1 and deltas > _LARGE_CHAIN * newest.full_bytes):
        times = f"{newest.chain_bytes / max(1, newest.full_bytes):.1f}"
        yield Finding(
            "warning",
            f"{escaped(newest.ckpt_id)} is a chain of {n_links} links, {times} times the bytes of its full checkpoint, "
            "all of which a restore reads",
            f"`recckpt compact {one_line(url)}` makes one full checkpoint of it; `Deltas(full_every=...)` keeps chains "
            "short.",
        )


def _of_age(run: RunHealth, now: datetime, overdue_sec: float | None) -> Iterator[Finding]:
    """Yield a missing save: a problem where the caller set the limit or reads no rows; else the run may have ended."""
    newest = run.checkpoints[-1]
    usual_sec = History.of_committed(run.saves).overdue_sec
    limit_sec, time = overdue_sec or usual_sec, time_of(newest.time)
    if limit_sec is not None and time is not None and (now - time).total_seconds() > limit_sec:
        yield Finding(
            "warning" if run.deep and overdue_sec is None else "problem",
            f"no save since {escaped(newest.ckpt_id)} of {escaped(newest.time)}: expected one within "
            f"{duration(limit_sec)}",
            "The run has ended, hangs, or its saves fail: look at its log and at `recckpt watch`.",
        )


def _of_saves(saves: Sequence[SaveTimes]) -> Iterator[Finding]:
    last = saves[-_LAST_SAVES:]
    failed = [save for save in last if save.error is not None]
    if failed:
        yield Finding(
            "problem" if last[-1].error is not None else "warning",
            f"{len(failed)} of the last {plural(len(last), 'save')} failed, the last of them "
            f"{escaped(failed[-1].ckpt_id or '?')}: {one_line(failed[-1].error or '')}",
            "Mend what the error names; what training has done since the newest checkpoint is in none.",
        )
    yield from _of_slow([save for save in saves if save.error is None])


def _of_slow(saves: Sequence[SaveTimes]) -> Iterator[Finding]:
    for attribute, what, remedy in _SECONDS:
        known = [(save, seconds) for save in saves if (seconds := getattr(save, attribute)) is not None]
        if len(known) < _FEW_SAVES:
            continue
        median = statistics.median(seconds for _, seconds in known)
        slow = [(save, s) for save, s in known[-_LAST_SAVES:] if s > max(_SLOW * median, median + _SLOW_SEC)]
        if slow:
            worst, seconds = max(slow, key=lambda pair: pair[1])
            yield Finding(
                "warning",
                f"{len(slow)} of the last {min(len(known), _LAST_SAVES)} saves {what} over {_SLOW:g} times as long as "
                f"usual: {escaped(worst.ckpt_id or '?')} {seconds:.1f} s, the median is {median:.2g} s",
                remedy,
            )


_SECONDS = (
    (
        "blocked_sec",
        "held training up",
        "Save in the background (`async_save=True`), and less often where a save waits for the one before.",
    ),
    (
        "total_sec",
        "took",
        "See in the line of `timeline.jsonl` whether `write_sec`, `agree_sec` or `commit_sec` grew: a busy disk or "
        "network, a slow rank, or a storage that throttles.",
    ),
)
