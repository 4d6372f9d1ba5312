"""A report as text for people: cells that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recckpt.inspect.report.intervals import words_of
from recckpt.inspect.report.near import NEAR_HEAD, near_lines, near_rows
from recckpt.inspect.report.result import ChainCost, CheckpointSize, CountBin, RunHealth, TableHealth
from recckpt.inspect.save_times import SaveTimes
from recckpt.text import Line, Table, count, escaped, one_line, plural, size

CHECKPOINT_HEAD = ("CHECKPOINT", "STEP", "KIND", "TIME", "ROWS", "SIZE", "LINKS", "TO READ", "MARKS")
TABLE_HEAD = (
    *("TABLE", "ROWS", "SIZE", "MEDIAN NORM", "LARGEST", "NOT FINITE", "DEAD", "EXPLODING", "NEVER TRAINED"),
    "80 % OF LOOK-UPS",
)
CHAIN_HEAD = ("FULL CHECKPOINT", "NEWEST ON IT", "DELTAS", "KEPT", "KEPT IN DELTAS", "LINKS", "TO READ", "OVER FULL")
COUNT_HEAD = ("LOOK-UPS", "ROWS", "NORM, 10 %", "MEDIAN", "90 %", "NEVER TRAINED")
FAILED_HEAD = ("SAVE", "STEP", "TIME", "ERROR")
NUMBERS = frozenset(
    {*TABLE_HEAD[1:], *CHAIN_HEAD[2:], *COUNT_HEAD[1:], *NEAR_HEAD[1:], "STEP", "ROWS", "SIZE", "LINKS", "TO READ"}
)


def lines_of(run: RunHealth) -> list[Line]:
    """Return the lines that ``recckpt report`` prints."""
    lines: list[Line] = []
    for finding in run.findings:
        lines += [f"{finding.level}: {finding.what}", f"  {finding.remedy}"]
    if run.tables:
        lines += [*_gap(lines), Table(TABLE_HEAD, [table_row(table) for table in run.tables], NUMBERS)]
    if run.near is not None or run.near_now is not None:
        lines += [*_gap(lines), *near_lines(run)]
    if run.near is not None and run.near.made:
        lines += [Table(NEAR_HEAD, list(near_rows(run.near)), NUMBERS)]
    if run.advice is not None:
        lines += [*_gap(lines), words_of(run.advice)]
    return [*lines, *_gap(lines), verdict(run)]


def _gap(lines: Sequence[Line]) -> Sequence[Line]:
    return [""] if lines else []


def verdict(run: RunHealth) -> str:
    """Return in one line how a run is."""
    n_problems = sum(finding.level == "problem" for finding in run.findings)
    n_warnings = len(run.findings) - n_problems
    counted = [plural(n, what) for n, what in ((n_problems, "problem"), (n_warnings, "warning")) if n]
    newest = f", the newest {escaped(run.newest)}" if run.newest is not None else ""
    return f"{' and '.join(counted) or 'healthy'}: {plural(len(run.checkpoints), 'checkpoint')}{newest}"


def checkpoint_rows(checkpoints: Iterable[CheckpointSize]) -> Iterable[Sequence[str]]:
    """Yield a row for each checkpoint."""
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


def chain_rows(chains: Iterable[ChainCost]) -> Iterable[Sequence[str]]:
    """Yield a row for each chain: what it costs to keep, and to restore its newest checkpoint."""
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


def count_rows(bins: Iterable[CountBin]) -> Iterable[Sequence[str]]:
    """Yield a row for the rows of a table that were looked up about as often."""
    for each in bins:
        ends = count(each.least) if each.least == each.most else f"{count(each.least)} to {count(each.most)}"
        norms = each.norms.quantiles if each.norms else {}
        spread = (f"{norms[share]:.4g}" if share in norms else "-" for share in (0.1, 0.5, 0.9))
        yield ends, count(each.rows), *spread, "-" if each.untrained is None else count(each.untrained)


def failed_rows(saves: Iterable[SaveTimes]) -> Iterable[Sequence[str]]:
    """Yield a row for each save that failed."""
    for save in saves:
        step = "-" if save.step is None else str(save.step)
        yield escaped(save.ckpt_id or "-"), step, escaped(save.time or "-"), one_line(save.error or "")


def table_row(table: TableHealth) -> Sequence[str]:
    """Return how the rows of a table are; "-" for what is not known, as where they were not read."""
    norms = table.norms.spread if table.norms else None
    return (
        escaped(table.name),
        count(table.rows),
        size(table.rows * table.row_bytes),
        f"{norms.quantiles[0.5]:.4g}" if norms and norms.n else "-",
        f"{norms.most:.4g}" if norms and norms.n else "-",
        "-" if table.not_finite is None else count(max(table.not_finite.values(), default=0)),
        *("-" if n is None else count(n) for n in (table.dead, table.exploding, table.untrained)),
        "-" if table.busy is None else f"{share_of(table.busy, table.rows_read)} of rows",
    )


def share_of(part: int, whole: int) -> str:
    """Return a share as text."""
    return f"{100 * part / max(1, whole):.3g} %"


def place_of(run: RunHealth) -> str:
    """Return where the run lies, in one line."""
    return one_line(run.url)
