"""A report as text: table rows and lines, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from recckpt.inspect.report_result import ChainCost, CheckpointSize, IntervalAdvice, NearHealth, RunHealth, TableHealth
from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.watch_text import near_facts
from recckpt.text import Line, Table, count, duration, escaped, plural, size, sparkline

CHECKPOINT_HEAD = ("CHECKPOINT", "STEP", "KIND", "TIME", "ROWS", "SIZE", "LINKS", "TO READ", "MARKS")
TABLE_HEAD = (
    *("TABLE", "ROWS", "SIZE", "MEDIAN NORM", "LARGEST", "NOT FINITE", "DEAD", "EXPLODING", "NEVER TRAINED"),
    "80 % OF LOOK-UPS",
)
CHAIN_HEAD = ("FULL CHECKPOINT", "NEWEST ON IT", "DELTAS", "KEPT", "KEPT IN DELTAS", "LINKS", "TO READ", "OVER FULL")
METRIC_HEAD = ("METRIC", "NEWEST", "BEFORE", "LEAST", "GREATEST", "LAST SAVES")
FAILED_HEAD = ("SAVE", "STEP", "TIME", "ERROR")
NEAR_HEAD = ("SAVE", "PAUSE", "UNTIL IT COUNTS", "SIZE")
NUMBERS = frozenset(
    {*METRIC_HEAD[1:5], *TABLE_HEAD[1:], *CHAIN_HEAD[2:], *NEAR_HEAD[1:], "STEP", "ROWS", "SIZE", "LINKS", "TO READ"}
)
WHY_SKIPPED = {  # why a near save was skipped: word in the timeline -> text for people
    "under_way": "one was under way",
    "too_much_changed": "too much had changed",
    "stopped": "there are no more in this process",
}


def lines_of(run: RunHealth) -> list[Line]:
    near: list[Line] = [*near_lines(run)]
    if run.near is not None and run.near.made:
        near.append(Table(NEAR_HEAD, list(near_rows(run.near)), NUMBERS))
    metrics = list(metric_rows(run.saves))
    blocks: list[list[Line]] = [
        [Table(METRIC_HEAD, metrics, NUMBERS)] if metrics else [],
        [line for each in run.findings for line in (f"{each.level}: {each.what}", f"  {each.remedy}")],
        [Table(TABLE_HEAD, [table_row(table) for table in run.tables], NUMBERS)] if run.tables else [],
        near,
        [] if run.advice is None else [advice_words(run.advice)],
    ]
    return [*(line for block in blocks if block for line in (*block, "")), verdict(run)]


def verdict(run: RunHealth) -> str:
    n_problems = sum(finding.level == "problem" for finding in run.findings)
    n_warnings = len(run.findings) - n_problems
    counted = [plural(n, what) for n, what in ((n_problems, "problem"), (n_warnings, "warning")) if n]
    newest = f", the newest {escaped(run.newest)}" if run.newest is not None else ""
    return f"{' and '.join(counted) or 'healthy'}: {plural(len(run.checkpoints), 'checkpoint')}{newest}"


def metrics_by_save(saves: Iterable[SaveTimes]) -> dict[str, list[float | str | None]]:
    """Return the values of each metric, then of each learning rate, per committed save; None for a missing value."""
    saves = [save for save in saves if save.error is None]
    names = dict.fromkeys(name for save in saves for name in save.metrics)
    in_order = sorted(names, key=lambda name: name.startswith("sparse_lr_"))
    return {name: [save.metrics.get(name) for save in saves] for name in in_order}


def metric_rows(saves: Iterable[SaveTimes]) -> Iterator[Sequence[str]]:
    for name, values in metrics_by_save(saves).items():
        *_, before, newest = [None, *(value for value in values if value is not None)]
        finite = [value for value in values if isinstance(value, float)]
        ends = (min(finite), max(finite)) if finite else (None, None)
        # halves, because the difference of two large values may overflow
        heights = sparkline([value / 2 - min(finite) / 2 if isinstance(value, float) else None for value in values])
        yield escaped(name), *map(_number, (newest, before, *ends)), heights


def _number(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def checkpoint_rows(checkpoints: Iterable[CheckpointSize]) -> Iterator[Sequence[str]]:
    for each in checkpoints:
        marks = [mark for mark, holds in (("pinned", each.pinned), ("ephemeral", each.ephemeral)) if holds]
        yield (
            escaped(each.ckpt_id),
            "-" if each.step is None else str(each.step),
            each.kind if len(each.links) == 1 else f"{each.kind} on {escaped(each.links[1])}",
            escaped(each.time or "-"),
            count(each.rows),
            size(each.n_bytes),
            str(len(each.links)),
            size(each.chain_bytes),
            ", ".join(marks),
        )


def chain_rows(chains: Iterable[ChainCost]) -> Iterator[Sequence[str]]:
    for chain in chains:
        yield (
            escaped(chain.base),
            "itself" if chain.newest == chain.base else escaped(chain.newest),
            count(chain.n_deltas),
            size(chain.kept_bytes),
            size(chain.kept_bytes - chain.base_bytes),
            str(chain.n_links),
            size(chain.read_bytes),
            f"{chain.read_bytes / max(1, chain.base_bytes):.3g} x",
        )


def table_row(table: TableHealth) -> Sequence[str]:
    norms = table.norms.spread if table.norms else None
    return (
        escaped(table.name),
        count(table.rows),
        size(table.rows * table.row_bytes),
        f"{norms.quantiles[0.5]:.4g}" if norms and norms.n else "-",
        f"{norms.most:.4g}" if norms and norms.n else "-",
        "-" if table.not_finite is None else count(max(table.not_finite.values(), default=0)),
        *("-" if n is None else count(n) for n in (table.dead, table.exploding, table.untrained)),
        "-" if table.busy is None else f"{100 * table.busy / max(1, table.rows_read):.3g} % of rows",
    )


def near_rows(near: NearHealth) -> Iterator[Sequence[str]]:
    for what, cost in (("near save", near.near), ("delta", near.delta)):
        if cost is not None:
            seconds = ("-" if sec is None else duration(sec) for sec in (cost.pause_sec, cost.total_sec))
            yield what, *seconds, "-" if cost.n_bytes is None else size(int(cost.n_bytes))


def near_lines(run: RunHealth) -> Iterator[str]:
    if (near := run.near) is not None:
        every = "" if near.every_steps is None else f" every {near.every_steps:.3g} steps"
        every = " every step" if near.every_steps == 1 else every
        left = [f"{count(n)} left out, since {WHY_SKIPPED.get(w) or escaped(w)}" for w, n in near.skipped.items() if n]
        left += [f"{count(near.failed)} failed"] if near.failed else []
        left += [] if near.copies is None else [f"each file on {plural(near.copies + 1, 'host')}"]
        yield "; ".join([f"near saves: {count(near.made)} made of {count(near.due)} that were due{every}", *left])
        if near.process_steps is not None:
            host = "all since the newest checkpoint" if near.host_steps is None else plural(near.host_steps, "step")
            host = "the same" if near.copies else host
            by_processes = plural(near.process_steps, "step")
            yield f"lost at most, about: {by_processes} if its processes die, {host} if a host does"
    if run.near_now is not None:
        yield from (f"{name}: {text}" for name, text in near_facts(run.near_now))


def advice_words(advice: IntervalAdvice) -> str:
    failures = "one failure" if advice.failures_per_day == 1 else f"{advice.failures_per_day:g} failures"
    best = f"saving every {duration(advice.best_sec)} would cost {100 * advice.best_share:.2g} % of the time"
    usual = ""
    if advice.every_sec is not None and advice.every_share is not None:
        usual = f"; you save every {duration(advice.every_sec)}, which costs {100 * advice.every_share:.2g} %"
    measured = f"a save holds training up for {duration(advice.pause_sec)} and takes {duration(advice.total_sec)}"
    return f"at {failures} a day, {best}{usual} ({measured})"
