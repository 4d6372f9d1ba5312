"""What people see of a run: names and values, or one line of log; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from recckpt.inspect.watch.near import near_facts, words_of_failed
from recckpt.inspect.watch.status import Failure, LastSave, Status
from recckpt.output_dir.claims import Claim
from recckpt.text import count, duration, escaped, one_line, plural, size, sparkline

_MOST_PROBLEMS = 3  # that are shown
Mood = Literal["plain", "good", "doubtful", "bad"]


class Fact(NamedTuple):
    """One thing that is shown."""

    name: str
    text: str
    mood: Mood = "plain"


def facts(status: Status) -> Iterator[Fact]:
    """Yield what is shown of a run, the most important first."""
    last = status.last
    if last is None:
        yield Fact("waits", one_line(status.why_empty), "doubtful")
    else:
        yield Fact("step", "-" if last.step is None else count(last.step))
        yield Fact("last save", _last_save(last), "doubtful" if status.is_overdue else "good")
    if status.is_overdue and status.overdue_sec is not None:
        yield Fact("overdue", f"expected a save within {duration(status.overdue_sec)}: does it run?", "doubtful")
    if status.failed:
        n_failed, newest = len(status.failed), status.failed[-1]
        since = f"{plural(n_failed, 'save')} failed since, the last one " if n_failed > 1 else ""
        yield Fact("failed", f"{since}{_ago(newest.age_sec)}: {_what_failed(newest)}", "bad")
    yield from _near(status)
    for attempt in status.attempts:
        of_step = "" if attempt.step is None else f"step {count(attempt.step)}, "
        yield Fact("under way", f"{escaped(attempt.directory)} ({of_step}unless its writer died)")
    if last is not None:
        yield Fact("chain", plural(last.n_links, "link"))
    if status.pause is not None:
        pause = status.pause
        usual = f"; of {pause.n_saves} the median {duration(pause.median_sec)}, the most {duration(pause.max_sec)}"
        yield Fact("pause", duration(pause.last_sec) + (usual if pause.n_saves > 1 else ""))
    if len(status.pauses) > 1:
        largest = max((n_bytes for n_bytes in status.sizes if n_bytes is not None), default=0)
        yield Fact("pauses", f"{sparkline(status.pauses)} of the last {len(status.pauses)} saves, the newest last")
        yield Fact("bytes", f"{sparkline(status.sizes)} at most {size(int(largest))}")
    if status.every_sec is not None and status.saves_per_hour is not None:
        yield Fact("saves", f"{_rate(status.saves_per_hour)} an hour, every {duration(status.every_sec)}")
    if status.n_checkpoints:
        yield Fact("kept", f"{plural(status.n_checkpoints, 'checkpoint')}, {size(status.n_bytes)}")
    if status.writer is not None:
        yield from _writer(status.writer)
    for problem in few(status.problems):
        yield Fact("problem", problem, "bad")


def _near(status: Status) -> Iterator[Fact]:
    last = status.last
    if last is not None and last.near is not None and last.near.failed:
        yield Fact("near failed", words_of_failed(last.near, last.ckpt_id), "doubtful")
    if status.near is not None:
        yield from (Fact(name, text) for name, text in near_facts(status.near))


def _writer(writer: Claim) -> Iterator[Fact]:
    by = f" (`{one_line(writer.purpose)}`)" if writer.purpose else ""
    yield Fact("writer", f"process {writer.pid} on {escaped(writer.host)}{by}, since {escaped(writer.time)}")
    if writer.mirror_of is not None:
        yield Fact("mirror of", escaped(writer.mirror_of.url))
    if writer.continues is not None:
        yield Fact("continues", f"{escaped(writer.continues.url)}, of which it was a mirror")


def line(status: Status) -> str:
    """Return the line of a log for one look."""
    parts = [f"waits: {one_line(status.why_empty)}"] if status.last is None else [*_in_short(status.last)]
    if status.pause is not None and status.last is not None:
        parts.append(f"pause {duration(status.pause.last_sec)}")
    if status.last is not None and status.saves_per_hour is not None:
        parts.append(f"{_rate(status.saves_per_hour)} saves an hour")
    parts += [f"{name} {text}" for name, text, _ in _near(status)]
    if status.is_overdue:
        parts.append("OVERDUE")
    parts += [f"under way {escaped(attempt.directory)}" for attempt in status.attempts]
    if status.failed:
        parts.append(f"{len(status.failed)} FAILED since, the last {_what_failed(status.failed[-1])}")
    parts += [f"PROBLEM {problem}" for problem in few(status.problems)]
    return f"{status.time.strftime('%Y-%m-%dT%H:%M:%SZ')} {', '.join(parts)}"


def few(problems: Sequence[str]) -> list[str]:
    """Return the first problems, a line each: one damaged link is a problem of all that stand on it."""
    more = len(problems) - _MOST_PROBLEMS
    first = [one_line(problem) for problem in problems[:_MOST_PROBLEMS]]
    return [*first, f"and {count(more)} more: `recckpt ls` lists all"] if more > 0 else first


def _last_save(last: LastSave) -> str:
    what = f"{escaped(last.ckpt_id)}, {last.kind}, {plural(last.rows, 'row')}, {size(last.n_bytes)}"
    took = "" if last.total_sec is None else f", took {duration(last.total_sec)}"
    return f"{_ago(last.age_sec)}: {what}{took}"


def _in_short(last: LastSave) -> Iterator[str]:
    if last.step is not None:
        yield f"step {last.step}"
    yield f"{escaped(last.ckpt_id)} of {escaped(last.time)}"
    yield last.kind
    yield plural(last.rows, "row")
    yield size(last.n_bytes)
    yield f"chain of {last.n_links}"


def _what_failed(failed: Failure) -> str:
    return f"{'a save' if failed.ckpt_id is None else escaped(failed.ckpt_id)}: {one_line(failed.error)}"


def _ago(seconds: float | None) -> str:
    return "at an unknown time" if seconds is None else f"{duration(seconds)} ago"


def _rate(per_hour: float) -> str:
    return count(round(per_hour)) if per_hour >= 10 else f"{per_hour:.2g}"
