"""What became of near saves, what one costs beside a delta, and what a death costs, by the timeline (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import mean

from recckpt.inspect.report.near_health import NearHealth, SaveCost
from recckpt.inspect.report.result import Finding, RunHealth
from recckpt.inspect.save_times import NearTimes, SaveTimes
from recckpt.inspect.watch.history import History
from recckpt.inspect.watch.near import near_facts, steps_per_sec
from recckpt.text import count, duration, escaped, one_line, plural, size

NEAR_HEAD = ("SAVE", "PAUSE", "UNTIL IT COUNTS", "SIZE")
_WHY = {  # as the timeline says it -> as people read it
    "under_way": "one was under way",
    "too_much_changed": "too much had changed",
    "stopped": "there are no more in this process",
}


def near_health(saves: Sequence[SaveTimes]) -> NearHealth | None:
    """Return what became of the near saves before the last checkpoints; None where there were none.

    Args:
        saves: the last ones, oldest first, those that failed too.
    """
    history = History.of_committed(saves)
    entries = [save.near for save in history.last if save.near is not None and save.near.n_due]
    if not entries:
        return None
    deltas = [save for save in history.last if save.kind == "delta"]
    made = sum(each.made for each in entries)
    near = SaveCost(*(_each(entries, made, name) for name in ("blocked_sec", "total_sec", "n_bytes")))
    every_steps, copies = _every_steps(entries), entries[-1].copies
    gaps = [each.gap_steps for each in entries if each.gap_steps is not None]
    by_processes = _lost(max(gaps, default=None), near.total_sec, history)
    by_host = _lost(_checkpoint_steps(history), _mean(history.last, "total_sec"), history)
    return NearHealth(
        due=sum(each.n_due for each in entries),
        made=made,
        failed=sum(each.failed for each in entries),
        skipped=dict(sum((Counter(each.skipped) for each in entries), Counter())),
        every_steps=every_steps,
        near=near,
        delta=SaveCost(*(_mean(deltas, name) for name in ("blocked_sec", "total_sec", "n_bytes"))) if deltas else None,
        hosts=entries[-1].hosts,
        copies=copies,
        process_steps=by_processes,
        host_steps=by_processes if copies else by_host,
    )


def near_lines(run: RunHealth) -> Iterator[str]:
    """Yield what people read of near saves, but for what one costs."""
    if run.near is not None:
        yield _words_of(run.near)
        if run.near.process_steps is not None:
            yield _lost_words(run.near)
    if run.near_now is not None:
        yield from (f"{name}: {text}" for name, text in near_facts(run.near_now))


def near_rows(near: NearHealth) -> Iterator[Sequence[str]]:
    """Yield what a near save costs, and a delta."""
    costs = {"near save": near.near} | ({} if near.delta is None else {"delta": near.delta})
    for what, cost in costs.items():
        yield (
            what,
            *("-" if seconds is None else duration(seconds) for seconds in (cost.pause_sec, cost.total_sec)),
            "-" if cost.n_bytes is None else size(int(cost.n_bytes)),
        )


def near_findings(saves: Sequence[SaveTimes]) -> Iterator[Finding]:
    """Yield what is unhealthy in the near saves before the newest checkpoint."""
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
            yield Finding("warning", f"{count(n_skipped)} {of} were left out: {_WHY[why]}", remedy)


_REMEDIES = {
    "under_way": "They take longer than `near_interval`, which may be longer.",
    "too_much_changed": "Save checkpoints more often, or give `Deltas(max_dirty=...)` a larger share.",
    "stopped": "A rank did not answer within `Near(timeout_sec=...)`: the log says which. They begin again with the "
    "next start of the job.",
}


def _words_of(near: NearHealth) -> str:
    every = "" if near.every_steps is None else f" {_rate(near.every_steps)}"
    left = [f"{count(n)} left out, since {_WHY.get(why) or escaped(why)}" for why, n in near.skipped.items() if n]
    left += [f"{count(near.failed)} failed"] if near.failed else []
    left += [] if near.copies is None else [f"each file on {plural(near.copies + 1, 'host')}"]
    return "; ".join([f"near saves: {count(near.made)} made of {count(near.due)} that were due{every}", *left])


def _rate(every_steps: float) -> str:
    return "every step" if every_steps == 1 else f"every {every_steps:.3g} steps"


def _lost_words(near: NearHealth) -> str:
    if near.copies:
        host = "the same"
    elif near.host_steps is None:
        host = "all since the newest checkpoint"
    else:
        host = plural(near.host_steps, "step")
    by_processes = plural(near.process_steps or 0, "step")
    return f"lost at most, about: {by_processes} if its processes die, {host} if a host does"


def _each(entries: Iterable[NearTimes], made: int, name: str) -> float | None:
    """Return the average of the sums that lines have."""
    sums = [value for each in entries if (value := getattr(each, name)) is not None]
    return sum(sums) / made if sums and made else None


def _mean(saves: Iterable[SaveTimes], name: str) -> float | None:
    values = [value for save in saves if (value := getattr(save, name)) is not None]
    return mean(values) if values else None


def _every_steps(entries: Iterable[NearTimes]) -> float | None:
    between = [(each.steps[1] - each.steps[0], each.n_due - 1) for each in entries if each.steps and each.n_due > 1]
    return sum(steps for steps, _ in between) / sum(n for _, n in between) if between else None


def _checkpoint_steps(history: History) -> float | None:
    steps = [save.step for save in history.last if save.step is not None]
    between = [after - before for before, after in pairwise(steps) if after > before]
    return max(between, default=None)


def _lost(gap_steps: float | None, total_sec: float | None, history: History) -> int | None:
    """Return how many steps there are at most from what a save has until the next one counts."""
    pace = steps_per_sec([], history)
    if gap_steps is None or total_sec is None or pace is None:
        return None
    return round(gap_steps + total_sec * pace)
