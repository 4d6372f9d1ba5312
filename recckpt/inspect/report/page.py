"""A report as a page that needs no other file, no network and no script; every name in it is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from recckpt.inspect.report import lines, plots
from recckpt.inspect.report.intervals import words_of
from recckpt.inspect.report.near import NEAR_HEAD, near_lines, near_rows
from recckpt.inspect.report.result import Distribution, Finding, RunHealth, TableHealth
from recckpt.text import count, escaped, html, plural

_STYLE = """
.recckpt.report .finding { border-left: .3em solid #e09f3e; padding: .3em .8em; margin: .6em 0; background: #8881; }
.recckpt.report .problem { border-color: #d1495b; } .recckpt.report .fine { border-color: #2e9e5b; }
.recckpt.report code { font-size: .92em; background: #8883; border-radius: .2em; padding: 0 .25em; }
.recckpt.report h3 { font-size: 1em; margin: 1.4em 0 .2em; }
.recckpt.report .plots { display: grid; gap: .8em; margin: 0 0 .8em; }
.recckpt.report .plots { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22em), 1fr)); }
.recckpt.report figure { margin: 0; min-width: 0; } .recckpt.report figcaption { font-size: .92em; }
.recckpt.report svg { display: block; width: 100%; height: auto; }
.recckpt.report .key { overflow-wrap: anywhere; }
.recckpt.report .key i { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin: 0 .3em 0 0; }
.recckpt.report .key span { margin-right: 1em; }
.recckpt.report .note { opacity: .75; font-size: .92em; }
"""
_MOST_CHECKPOINTS = 100  # newest ones that are listed
_MOST_FAILED = 10  # last ones that are listed
_MOST_PLOTTED = 20  # tables with plots of their own, those with most rows
_MOST_GROWN = 6  # tables whose growth is drawn
_LOOKED_AT = {
    True: "Every byte of the newest checkpoint was read and checked; of older ones, that their files are there.",
    False: "That files are there was checked, not what is in them: `recckpt report` without --quick reads the newest.",
}
_NAME = 60  # characters of a name beside plots


def page_of(run: RunHealth) -> str:
    """Return a whole page."""
    return html.page(f"recckpt: {lines.place_of(run)}", body_of(run))


def body_of(run: RunHealth) -> str:
    """Return what a notebook shows, in its own colours."""
    return html.body("report", _parts(run), _STYLE)


def _parts(run: RunHealth) -> Iterator[str]:
    yield f"<h1>{html.text(lines.place_of(run))}</h1><p>{html.text(lines.verdict(run))}</p>"
    yield "<h2>What needs attention</h2>"
    yield from map(_finding, run.findings)
    if not run.findings:
        yield '<div class="finding fine"><p>Nothing was found.</p></div>'
    yield _note(_LOOKED_AT[run.deep])
    yield from _checkpoints(run)
    yield from _saves(run)
    yield from _near(run)
    yield from _tables(run)


def _finding(finding: Finding) -> str:
    return f'<div class="finding {finding.level}"><p>{_prose(finding.what)}</p><p>{_prose(finding.remedy)}</p></div>'


def _prose(text: str) -> str:
    """Return text in which commands stand between backticks."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.text(text))


def _checkpoints(run: RunHealth) -> Iterator[str]:
    listed = run.checkpoints[-_MOST_CHECKPOINTS:]
    yield from html.section("Checkpoints", lines.CHECKPOINT_HEAD, lines.checkpoint_rows(listed), lines.NUMBERS)
    if len(listed) < len(run.checkpoints):
        yield _note(f"the newest {len(listed)} of {plural(len(run.checkpoints), 'checkpoint')}")
    if any(chain.n_deltas for chain in run.chains):
        yield from html.section("What chains cost", lines.CHAIN_HEAD, lines.chain_rows(run.chains), lines.NUMBERS)
        yield _note(
            "kept: bytes of all files of the chain; to read: what a restore of its newest checkpoint reads, and over "
            "full how many times the bytes of the full one; `recckpt compact` makes one full checkpoint of a chain"
        )
    grown = sorted(run.tables, key=lambda table: -table.rows)[:_MOST_GROWN]
    if len(listed) > 1 and grown:
        x, along = _along([each.step for each in listed], "checkpoint")
        series = [[each.tables.get(table.name) for each in listed] for table in grown]
        yield "<h2>How tables and checkpoints grow</h2>"
        names = _key([_short(table.name) for table in grown])
        sizes = [[float(each.n_bytes) for each in listed], [float(each.chain_bytes) for each in listed]]
        kinds = _key(["of its own files", "that a restore reads"])
        yield _plots(
            [
                _figure(f"rows, by {along}", plots.lines(x, series, plots.short), names),
                _figure(f"bytes, by {along}", plots.lines(x, sizes, plots.n_bytes), kinds),
            ]
        )
        if len(grown) < len(run.tables):
            yield _note(f"the {len(grown)} largest of {plural(len(run.tables), 'table')}")


def _saves(run: RunHealth) -> Iterator[str]:
    saves = [save for save in run.saves if save.error is None]
    failed = [save for save in run.saves if save.error is not None][-_MOST_FAILED:]
    yield from html.section("Saves that failed", lines.FAILED_HEAD, lines.failed_rows(failed), lines.NUMBERS)
    if not saves:
        return
    x, along = _along([save.step for save in saves], "save")
    yield f"<h2>The last {plural(len(saves), 'save')}</h2>"
    if run.advice is not None:
        yield f"<p>{html.text(words_of(run.advice))}</p>"
    seconds = {
        "pause of training": [save.blocked_sec for save in saves],
        "write": [save.write_sec for save in saves],
        "commit": [save.commit_sec for save in saves],
    }
    yield _plots(
        [
            _figure(f"seconds, by {along}", plots.lines(x, list(seconds.values()), plots.short), _key(list(seconds))),
            _figure(f"bytes written, by {along}", plots.lines(x, [[save.n_bytes for save in saves]], plots.n_bytes)),
            _figure(f"rows of all tables, by {along}", plots.lines(x, [[save.n_rows for save in saves]], plots.short)),
        ]
    )


def _near(run: RunHealth) -> Iterator[str]:
    """Yield what became of near saves, and what one costs beside a delta."""
    if run.near is None and run.near_now is None:
        return
    yield "<h2>Near saves</h2>"
    yield from (f"<p>{html.text(line)}</p>" for line in near_lines(run))
    if run.near is None or not run.near.made:
        return
    yield html.table(NEAR_HEAD, [list(map(html.text, row)) for row in near_rows(run.near)], lines.NUMBERS)
    yield _note("averages of the last checkpoints and of the near saves before them, without copies on other hosts")
    entries = [
        (save, near) for save in run.saves if (near := save.near) is not None and save.error is None and near.made
    ]
    x, along = _along([save.step for save, _ in entries], "save")
    of_each: dict[str, list[float | None]] = {
        "a near save": [None if near.n_bytes is None else near.n_bytes / near.made for _, near in entries],
        "the delta after it": [save.n_bytes if save.kind == "delta" else None for save, _ in entries],
    }
    n_bytes = {name: values for name, values in of_each.items() if any(value is not None for value in values)}
    became = {
        "made": [float(near.made) for _, near in entries],
        "failed": [float(near.failed) for _, near in entries],
        "left out": [float(sum(near.skipped.values())) for _, near in entries],
    }
    yield _plots(
        [
            _figure(f"bytes, by {along}", plots.lines(x, list(n_bytes.values()), plots.n_bytes), _key(list(n_bytes))),
            _figure(f"near saves, by {along}", plots.lines(x, list(became.values()), plots.short), _key(list(became))),
        ]
    )


def _along(steps: Sequence[int | None], what: str) -> tuple[list[float], str]:
    """Return where things stand in a plot: at their steps, if these rise, or one beside the other."""
    known = [step for step in steps if step is not None]
    if len(known) == len(steps) and len(set(known)) == len(known) and known == sorted(known):
        return [float(step) for step in known], "step"
    return [float(number) for number in range(1, len(steps) + 1)], what


def _tables(run: RunHealth) -> Iterator[str]:
    if run.newest is None or not run.tables:
        return
    title = f"Tables of {escaped(run.newest)}"
    yield from html.section(title, lines.TABLE_HEAD, map(lines.table_row, run.tables), lines.NUMBERS)
    yield _note(
        "norms are Euclidean; not finite: NaN or infinite values, in the slot that has most; dead: all zeros; "
        "exploding: over 100 times the median norm; never trained: all slots of the optimizer are zeros; "
        "80 % of look-ups: the rows that carry them, where the table tracks its counts"
    )
    plotted = sorted((table for table in run.tables if table.norms or table.counts), key=lambda table: -table.rows)
    for table in plotted[:_MOST_PLOTTED]:
        yield from _table(table)
    if len(plotted) > _MOST_PLOTTED:
        yield _note(f"the {_MOST_PLOTTED} largest of {plural(len(plotted), 'table')} are drawn")


def _table(table: TableHealth) -> Iterator[str]:
    columns = {
        "norms of embeddings": table.norms,
        "look-ups of each row": table.counts,
        "steps since the last look-up": table.ages_steps,
        "days since the last look-up": table.ages_days,
    }
    yield f"<h3>{html.text(_short(table.name))}</h3>"
    drawn = zip(columns.items(), plots.COLOURS, strict=False)
    yield _plots([_distribution(what, column, colour) for (what, column), colour in drawn if column])
    if table.by_count:
        yield from _learning(table)
    if table.largest:
        ids = ", ".join(f"{row.id} ({row.norm:.4g})" for row in table.largest)
        yield _note(f"largest norms, by id: {ids}")


def _learning(table: TableHealth) -> Iterator[str]:
    """Yield norms against look-ups: rows that are looked up often and stay small never learn."""
    known = [(each.least or 0.5, each.norms.quantiles) for each in table.by_count if each.norms and each.norms.n]
    if len(known) > 1:
        low, middle, high = ([quantiles[share] for _, quantiles in known] for share in (0.1, 0.5, 0.9))
        what = "norms, by look-ups (0.5: never): the median, and from 10 to 90 % of the rows"
        yield _plots([_figure(what, plots.bands([x for x, _ in known], low, middle, high))])
    cells = [list(map(html.text, row)) for row in lines.count_rows(table.by_count)]
    yield html.table(lines.COUNT_HEAD, cells, lines.NUMBERS)
    yield _note("rows that were looked up often and never trained, or stay as small as new ones, do not learn")


def _distribution(what: str, column: Distribution, colour: str) -> str:
    """Return how numbers are spread, as a plot and in words."""
    spread, bars = column.spread, column.bars
    caption = what
    if spread.n:
        ends = {"median": spread.quantiles[0.5], "99 % up to": spread.quantiles[0.99], "most": spread.most}
        caption += ": " + ", ".join(f"{name} {plots.short(value)}" for name, value in ends.items())
    if bars is not None and bars.zeros:
        caption += f"; {count(bars.zeros)} at zero"
    return _figure(caption, plots.histogram(bars, colour) if bars is not None and bars.edges else "")


def _figure(caption: str, svg: str, key: str = "") -> str:
    return f"<figure><figcaption>{html.text(caption)}</figcaption>{svg}{key}</figure>"


def _plots(figures: Iterable[str]) -> str:
    return f'<div class="plots">{"".join(figures)}</div>'


def _key(names: Sequence[str]) -> str:
    items = (
        f'<span><i style="background:{colour}"></i>{html.text(name)}</span>'
        for name, colour in zip(names, plots.COLOURS, strict=False)
    )
    return f'<p class="key">{" ".join(items)}</p>'


def _short(name: str) -> str:
    """Return a name as it is shown over and under plots; the table of all tables has it whole."""
    shown = escaped(name)
    return shown if len(shown) <= _NAME else f"{shown[:_NAME]}…"


def _note(text: str) -> str:
    return f'<p class="note">{_prose(text)}</p>'
