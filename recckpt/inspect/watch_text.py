"""The status of a run as text: names and values, or one log line; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from recckpt.inspect.status import Failure, Loss, NearNow, Status
from recckpt.text import count, duration, escaped, one_line, plural, size, sparkline

_MOST_PROBLEMS = 3  # most problems to show
Mood = Literal["plain", "good", "doubtful", "bad"]


class Fact(NamedTuple):
    name: str
    text: str
    mood: Mood = "plain"


def facts(status: Status) -> Iterator[Fact]:
    last = status.last
    if last is None:
        yield Fact("waits", one_line(status.why_empty), "doubtful")
    else:
        what = f"{escaped(last.ckpt_id)}, {last.kind}, {plural(last.rows, 'row')}, {size(last.n_bytes)}"
        took = "" if last.total_sec is None else f", took {duration(last.total_sec)}"
        yield Fact("step", "-" if last.step is None else count(last.step))
        yield Fact("last save", f"{_ago(last.age_sec)}: {what}{took}", "doubtful" if status.is_overdue else "good")
    yield from _ended(status)
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
    if (pause := status.pause) is not None:
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
    if (writer := status.writer) is not None:
        by = f" (`{one_line(writer.purpose)}`)" if writer.purpose else ""
        yield Fact("writer", f"process {writer.pid} on {escaped(writer.host)}{by}, since {escaped(writer.time)}")
    for problem in few(status.problems):
        yield Fact("problem", problem, "bad")


def _ended(status: Status) -> Iterator[Fact]:
    if status.ended is not None:
        yield Fact("ended", f"well, {escaped(status.ended)}", "good")
    elif status.is_overdue and status.overdue_sec is not None:
        yield Fact("overdue", f"expected a save within {duration(status.overdue_sec)}: does it run?", "doubtful")


def line(status: Status) -> str:
    if (last := status.last) is None:
        parts = [f"waits: {one_line(status.why_empty)}"]
    else:
        parts = [] if last.step is None else [f"step {last.step}"]
        parts += [f"{escaped(last.ckpt_id)} of {escaped(last.time)}", last.kind, plural(last.rows, "row")]
        parts += [size(last.n_bytes), f"chain of {last.n_links}"]
        if status.pause is not None:
            parts.append(f"pause {duration(status.pause.last_sec)}")
        if status.saves_per_hour is not None:
            parts.append(f"{_rate(status.saves_per_hour)} saves an hour")
    parts += [f"{name} {text}" for name, text, _ in _near(status)]
    parts += ["OVERDUE"] if status.is_overdue else [] if status.ended is None else ["ended well"]
    parts += [f"under way {escaped(attempt.directory)}" for attempt in status.attempts]
    if status.failed:
        parts.append(f"{len(status.failed)} FAILED since, the last {_what_failed(status.failed[-1])}")
    parts += [f"PROBLEM {problem}" for problem in few(status.problems)]
    return f"{status.time.strftime('%Y-%m-%dT%H:%M:%SZ')} {', '.join(parts)}"


def few(problems: Sequence[str]) -> list[str]:
    more = len(problems) - _MOST_PROBLEMS
    first = [one_line(problem) for problem in problems[:_MOST_PROBLEMS]]
    return [*first, f"and {count(more)} more: `recckpt ls` lists all"] if more > 0 else first


def _near(status: Status) -> Iterator[Fact]:
    last = status.last
    if last is not None and last.near is not None and last.near.failed:
        why = "" if last.near.error is None else f", the last: {one_line(last.near.error)}"
        text = f"{count(last.near.failed)} of {count(last.near.n_due)} before {escaped(last.ckpt_id)}{why}"
        yield Fact("near failed", text, "doubtful")
    if status.near is not None:
        yield from (Fact(name, text) for name, text in near_facts(status.near))


def near_facts(near: NearNow) -> Iterator[tuple[str, str]]:
    if (newest := near.newest) is None:
        yield "near", "no near save that counts"
    else:
        step = "" if newest.step is None else f"step {count(newest.step)}, "
        base = "" if newest.base is None else f" on {escaped(newest.base)}"
        part = f", {newest.shards_here} of {plural(newest.shards, 'shard')} here"
        what = f"{plural(newest.rows, 'row')}, {size(newest.n_bytes)}{base}"
        what += part if newest.shards_here < newest.shards else ""
        yield "near", f"{_ago(newest.age_sec)}: {step}{what}; {count(near.n_saves)} kept"
    ended = ", nothing if the run has ended" if near.is_overdue else ""
    lost = f"{_lost(near.with_processes)} if its processes die, {_lost(near.with_host)} if the host does"
    yield "lost now", f"{lost}{ended}"


def _lost(loss: Loss) -> str:
    if loss.sec is None:
        return "all"
    return f"{duration(loss.sec)} of training" if loss.steps is None else f"about {plural(loss.steps, 'step')}"


def _what_failed(failed: Failure) -> str:
    return f"{'a save' if failed.ckpt_id is None else escaped(failed.ckpt_id)}: {one_line(failed.error)}"


def _ago(seconds: float | None) -> str:
    return "at an unknown time" if seconds is None else f"{duration(seconds)} ago"


def _rate(per_hour: float) -> str:
    return count(round(per_hour)) if per_hour >= 10 else f"{per_hour:.2g}"
