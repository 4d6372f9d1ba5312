"""Judges a run: finds problems, suggests remedies, and advises how often to save."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise

from recckpt.format.codec import time_of
from recckpt.inspect.report_result import (
    EXPLODING,
    Finding,
    IntervalAdvice,
    Level,
    NearHealth,
    RunHealth,
    SaveCost,
    TableHealth,
)
from recckpt.inspect.report_text import WHY_SKIPPED
from recckpt.inspect.save_times import History, SaveTimes
from recckpt.inspect.status import steps_per_sec
from recckpt.policies.schedule import best_interval, lost_share
from recckpt.text import count, duration, escaped, one_line, plural

_LONG_CHAIN = 40  # links: twice what `Deltas` lets a chain grow to by default
_LARGE_CHAIN = 3.0  # multiple of the bytes of the full checkpoint
_MANY_DEAD = 0.01  # share of all rows
_MANY_UNTRAINED = 0.5
_UNTRAINED = "look ids up with `admit=False` where nothing is trained, or let ids wait with `admit=MinCount(...)`"
_UNTRAINED_IN_LIVE = "a table of fewer rows would do, unless their ids are still to come"
_FEW_SAVES = 5  # number of saves needed before one is called slow
_LAST_SAVES = 10  # number of last saves in which to look for slow and failed ones
_SLOW = 3.0  # multiple of the median
_SLOW_SEC = 1.0  # least excess over the median
_NAMED = 3
_DAY_SEC = 86400.0

# State of a directory -> level, meaning and remedy.
_OF_LEFTOVERS: Mapping[str, tuple[Level, str, str]] = {
    "damaged": (
        "problem",
        "is damaged, and a restore passes it over",
        "`recckpt verify DIR` lists all that is wrong; put the files back from a copy, or get the rows that are whole "
        "with `recckpt export --skip-damaged`.",
    ),
    "newer": ("problem", "is of a newer recckpt, and no restore goes past it", "Install that version."),
    "older": ("problem", "is of an older, unreleased form, and no restore goes past it", "Begin a new run elsewhere."),
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
_SECONDS = (  # attribute of a save, its problem when it is slow, and what to do
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
_REMEDIES = {  # why near saves were skipped -> what to do
    "under_way": "They take longer than `Near(interval=...)`: choose a longer interval.",
    "too_much_changed": "Save checkpoints more often, or give `Deltas(max_dirty=...)` a larger share.",
    "stopped": "A rank did not answer within `Near(timeout_sec=...)`: the log says which. They begin again with the "
    "next start of the job.",
}


def findings_of(run: RunHealth, now: datetime, overdue_sec: float | None = None) -> list[Finding]:
    """Return the findings, problems first.

    ``overdue_sec`` is the age of the newest checkpoint above which a missing save is a problem; None for the default.
    """
    findings = [*_of_dir(run)]
    if run.checkpoints:
        findings += [*_of_newest(run), *_of_age(run, now, overdue_sec)]
    findings += [*_of_saves(run.saves), *near_findings(run.saves)]
    return sorted(findings, key=lambda finding: finding.level != "problem")


def _of_dir(run: RunHealth) -> Iterator[Finding]:
    where = one_line(run.url)
    if not run.checkpoints:
        remedy = f"See what is there with `recckpt ls {where}`; if checkpoints were moved or removed, put them back."
        yield Finding("problem", "No checkpoint here can be used.", remedy)
    for left in run.leftovers:
        level, what, remedy = _OF_LEFTOVERS[left.what if not left.is_dead else f"dead {left.what}"]
        name, reason = escaped(left.directory), one_line(left.reason)
        yield Finding(level, f"{name} {what}: {reason}", remedy.replace("DIR", where))


def _of_newest(run: RunHealth) -> Iterator[Finding]:
    newest = run.checkpoints[-1]
    where = one_line(f"{run.url.removesuffix('/')}/{newest.directory}")
    if run.damage:
        yield Finding(
            "problem",
            f"the newest checkpoint is damaged: {_first_of(run.damage)}",
            "A restore passes it over and takes the one before. Put its files back from another copy before a job "
            f"starts: `recckpt verify {where}` names all that are damaged.",
        )
    if run.lacks:
        yield Finding(
            "warning",
            f"the newest checkpoint lacks {one_line(' and '.join(run.lacks))}",
            "A resume starts that from scratch. Register each dense optimizer by `register_for_checkpointing`, and "
            "give that of the tables to `Saver(model, sparse_optim)`; what is only looked up needs neither.",
        )
    for table in run.tables:
        yield from _of_table(where, table)
    n_links, deltas = len(newest.links), newest.chain_bytes - newest.full_bytes
    if n_links > _LONG_CHAIN or (n_links > 1 and deltas > _LARGE_CHAIN * newest.full_bytes):
        times = f"{newest.chain_bytes / max(1, newest.full_bytes):.1f}"
        yield Finding(
            "warning",
            f"{escaped(newest.ckpt_id)} is a chain of {n_links} links, {times} times the bytes of its full checkpoint, "
            "all of which a restore reads",
            f"`recckpt compact {one_line(run.url)}` makes one full checkpoint of it; `Deltas(full_every=...)` keeps "
            "chains short.",
        )


def _of_table(where: str, table: TableHealth) -> Iterator[Finding]:
    name = f"table {escaped(table.name)}"

    def rows_of(n_rows: int) -> str:
        return f"{count(n_rows)} of {plural(table.rows, 'row')}"

    if table.damage:
        yield Finding(
            "problem",
            f"{name} is damaged, {rows_of(table.rows_read)} are whole: {_first_of(table.damage)}",
            "A restore passes the checkpoint over and takes the one before. Put its files back from another copy; "
            f"without one, `recckpt export {where} OUT --to parquet --skip-damaged` gets the rows that are whole.",
        )
    if table.not_finite:
        ids = ", ".join(map(str, table.not_finite_ids[:_NAMED]))
        slots = ", ".join(f"{escaped(slot)} of {rows_of(n)}" for slot, n in table.not_finite.items())
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
            f"{name}: the norm of {rows_of(table.exploding)} is over {EXPLODING} times the median; the largest: {ids}",
            "Look at what these ids are: often one that stands for 'unknown', or a bot. Clip gradients, or add weight "
            "decay.",
        )
    if table.dead and table.dead > _MANY_DEAD * table.rows_read:
        yield Finding(
            "warning",
            f"{name}: {rows_of(table.dead)} are all zeros",
            "Where rows start at zeros these are rows that nobody has trained; otherwise look for a mask, a multiplier "
            "or weight decay that drives rows to zero.",
        )
    if table.untrained and table.untrained > _MANY_UNTRAINED * table.rows_read:
        yield Finding(
            "warning",
            f"{name}: {rows_of(table.untrained)} were never trained: their slots of the optimizer are zeros",
            f"They cost memory and bytes of each full save: {_UNTRAINED_IN_LIVE if table.is_live else _UNTRAINED}.",
        )


def _first_of(damage: Sequence[str]) -> str:
    more = f" (and {count(len(damage) - 1)} more)" if len(damage) > 1 else ""
    return one_line(damage[0]) + more


def _of_age(run: RunHealth, now: datetime, overdue_sec: float | None) -> Iterator[Finding]:
    """Yield a finding if a save is missing: a problem if the caller set the limit or reads no rows, else a warning."""
    if run.ended is not None:
        return
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
    committed = [save for save in saves if save.error is None]
    for attribute, what, remedy in _SECONDS:
        known = [(save, seconds) for save in committed if (seconds := getattr(save, attribute)) is not None]
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


def advice_of(saves: Sequence[SaveTimes], failures_per_day: float) -> IntervalAdvice | None:
    """Return how often to save; None if the timeline does not say how long saves take."""
    history = History.of_committed(saves)
    pauses = [save.blocked_sec for save in history.last if save.blocked_sec is not None]
    totals = [save.total_sec for save in history.last if save.total_sec is not None]
    if not pauses or not totals or not statistics.median(pauses):
        return None
    pause_sec, total_sec = statistics.median(pauses), statistics.median(totals)
    failure_sec = _DAY_SEC / failures_per_day
    best_sec, every_sec = max(best_interval(pause_sec, failure_sec), total_sec), history.every_sec
    return IntervalAdvice(
        failures_per_day=failures_per_day,
        pause_sec=pause_sec,
        total_sec=total_sec,
        best_sec=best_sec,
        best_share=lost_share(best_sec, pause_sec, total_sec, failure_sec),
        every_sec=every_sec,
        every_share=None if every_sec is None else lost_share(every_sec, pause_sec, total_sec, failure_sec),
    )


def near_health(saves: Sequence[SaveTimes]) -> NearHealth | None:
    """Return how the near saves before the last checkpoints went; None if there were none."""
    history = History.of_committed(saves)
    entries = [save.near for save in history.last if save.near is not None and save.near.n_due]
    if not entries:
        return None
    deltas = [save for save in history.last if save.kind == "delta"]
    made = sum(each.made for each in entries)
    costs = ("blocked_sec", "total_sec", "n_bytes")
    near = SaveCost(*(_mean(entries, name, made) for name in costs))
    between = [(each.steps[1] - each.steps[0], each.n_due - 1) for each in entries if each.steps and each.n_due > 1]
    steps = [save.step for save in history.last if save.step is not None]
    apart = [after - before for before, after in pairwise(steps) if after > before]
    gaps = [each.gap_steps for each in entries if each.gap_steps is not None]
    by_processes = _lost(gaps, near.total_sec, history)
    copies = entries[-1].copies
    return NearHealth(
        due=sum(each.n_due for each in entries),
        made=made,
        failed=sum(each.failed for each in entries),
        skipped=dict(sum((Counter(each.skipped) for each in entries), Counter())),
        every_steps=sum(n_steps for n_steps, _ in between) / sum(n for _, n in between) if between else None,
        near=near,
        delta=SaveCost(*(_mean(deltas, name) for name in costs)) if deltas else None,
        hosts=entries[-1].hosts,
        copies=copies,
        process_steps=by_processes,
        host_steps=by_processes if copies else _lost(apart, _mean(history.last, "total_sec"), history),
    )


def _mean(lines: Iterable[object], name: str, n: int | None = None) -> float | None:
    """Return the mean of an attribute over the items that have it; with ``n``, the sum divided by ``n``."""
    values = [value for line in lines if (value := getattr(line, name)) is not None]
    n = len(values) if n is None else n
    return sum(values) / n if values and n else None


def _lost(gaps_steps: Sequence[int], total_sec: float | None, history: History) -> int | None:
    """Return the most steps that can be lost: those between two saves, plus those trained until a save is complete."""
    pace = steps_per_sec([], history)
    return None if not gaps_steps or total_sec is None or pace is None else round(max(gaps_steps) + total_sec * pace)


def near_findings(saves: Sequence[SaveTimes]) -> Iterator[Finding]:
    committed = [save for save in saves if save.error is None]
    last = committed[-1].near if committed else None
    if last is None:
        return
    of = f"of the {plural(last.n_due, 'near save')} before the newest checkpoint"
    if last.failed:
        yield Finding(
            "warning",
            f"{count(last.failed)} {of} failed" + ("" if last.error is None else f", the last: {one_line(last.error)}"),
            "Those that are there stay; what one host cannot do, such as use its near dir, fails near saves of all.",
        )
    for why, remedy in _REMEDIES.items():
        n_skipped = last.skipped.get(why, 0)
        if n_skipped > (last.n_due / 2 if why == "under_way" else 0):
            yield Finding("warning", f"{count(n_skipped)} {of} were left out: {WHY_SKIPPED[why]}", remedy)
