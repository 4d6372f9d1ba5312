"""A report as a self-contained HTML page without scripts; all names are escaped."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from recckpt.errors import MissingLibraryError, needed
from recckpt.inspect import report_text as text
from recckpt.inspect.report_result import Distribution, RunHealth
from recckpt.inspect.spread import Bars
from recckpt.text import count, escaped, html, one_line, plain, plural, size

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
_MOST_CHECKPOINTS = 100  # most checkpoints to list, newest first
_MOST_FAILED = 10  # most failed saves to list, latest first
_MOST_PLOTTED = 20  # most tables with their own plots, largest first
_MOST_METRICS = 8  # most metrics to draw
_MOST_DRAWN = 1e300  # largest value to draw: axes compute with sums of values
_MOST_GROWN = 6  # most tables whose growth is drawn
_LOOKED_AT = {
    True: "Every byte of the newest checkpoint was read and checked; for older checkpoints, only that their files "
    "exist.",
    False: "Only the existence of files was checked, not their contents: `recckpt report` without --quick reads the "
    "newest.",
}
_NAME = 60  # most characters of a name beside plots

COLOURS = ("#3d7edb", "#e07b39", "#2e9e5b", "#a05bd0", "#d1495b", "#2aa3a3", "#b8902b", "#8a8a8a")  # on light and dark

_INK = "#010203"  # placeholder for the page's text colour
_INCHES = (4.2, 2.3)
_SETTINGS = {
    "svg.fonttype": "none",  # keeps text as text
    "svg.hashsalt": "recckpt",  # same data, same page
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,
}
_MARGINS = (0.15, 0.11, 0.97, 0.96)  # left, bottom, right and top, with room for the text of axes
_TICKS = 4
_LOWEST = 0.6  # lower end of a count axis, so that a bar of 1 is visible

Line = Sequence[float | None]


class RunReport(RunHealth):
    def to_html(self) -> str:
        """Return a self-contained HTML page. Raises MissingLibraryError without matplotlib."""
        return html.page(f"recckpt: {one_line(self.url)}", _body_of(self))

    def _repr_html_(self) -> str | None:
        """Return the page; None without matplotlib, so that a notebook shows the text."""
        try:
            return _body_of(self)
        except MissingLibraryError:
            return None

    def __str__(self) -> str:
        return "\n".join(plain(text.lines_of(self)))

    def __repr__(self) -> str:
        return f"<RunReport {self.url!r}: {text.verdict(self)}>"


def _body_of(run: RunHealth) -> str:
    parts = [f"<h1>{html.text(one_line(run.url))}</h1><p>{html.text(text.verdict(run))}</p>"]
    parts += [*_metrics(run), "<h2>What needs attention</h2>"]
    for finding in run.findings:
        prose = f"<p>{_prose(finding.what)}</p><p>{_prose(finding.remedy)}</p>"
        parts.append(f'<div class="finding {finding.level}">{prose}</div>')
    if not run.findings:
        parts.append('<div class="finding fine"><p>Nothing was found.</p></div>')
    parts.append(_note(_LOOKED_AT[run.deep]))
    return html.body("report", [*parts, *_checkpoints(run), *_saves(run), *_near(run), *_tables(run)], _STYLE)


def _prose(words: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.text(words))


def _note(words: str) -> str:
    return f'<p class="note">{_prose(words)}</p>'


def _metrics(run: RunHealth) -> Iterator[str]:
    metrics = text.metrics_by_save(run.saves)
    yield from html.section("Metrics", text.METRIC_HEAD, text.metric_rows(run.saves), text.NUMBERS)
    if metrics:
        x, along = _along([save.step for save in run.saves if save.error is None], "save")
        drawn = {
            name: [value if isinstance(value, float) and abs(value) < _MOST_DRAWN else None for value in values]
            for name, values in list(metrics.items())[:_MOST_METRICS]
        }
        charts = (_chart(f"{_short(n)}, by {along}", x, [("", v)], short, from_zero=False) for n, v in drawn.items())
        yield _plots(*charts)
        if len(drawn) < len(metrics):
            yield _note(f"the first {len(drawn)} of {plural(len(metrics), 'metric')} are drawn")


def _checkpoints(run: RunHealth) -> Iterator[str]:
    listed = run.checkpoints[-_MOST_CHECKPOINTS:]
    yield from html.section("Checkpoints", text.CHECKPOINT_HEAD, text.checkpoint_rows(listed), text.NUMBERS)
    if len(listed) < len(run.checkpoints):
        yield _note(f"the newest {len(listed)} of {plural(len(run.checkpoints), 'checkpoint')}")
    if any(chain.n_deltas for chain in run.chains):
        yield from html.section("What chains cost", text.CHAIN_HEAD, text.chain_rows(run.chains), text.NUMBERS)
        yield _note(
            "kept: bytes of all files of the chain; to read: what a restore of its newest checkpoint reads, and over "
            "full how many times the bytes of the full one; `recckpt compact` makes one full checkpoint of a chain"
        )
    grown = sorted(run.tables, key=lambda table: -table.rows)[:_MOST_GROWN]
    if len(listed) > 1 and grown:
        x, along = _along([each.step for each in listed], "checkpoint")
        rows = [(_short(table.name), [each.tables.get(table.name) for each in listed]) for table in grown]
        sizes = [
            ("of its own files", [float(each.n_bytes) for each in listed]),
            ("that a restore reads", [float(each.chain_bytes) for each in listed]),
        ]
        yield "<h2>How tables and checkpoints grow</h2>"
        yield _plots(_chart(f"rows, by {along}", x, rows, short), _chart(f"bytes, by {along}", x, sizes, n_bytes))
        if len(grown) < len(run.tables):
            yield _note(f"the {len(grown)} largest of {plural(len(run.tables), 'table')}")


def _saves(run: RunHealth) -> Iterator[str]:
    saves = [save for save in run.saves if save.error is None]
    failed = [save for save in run.saves if save.error is not None][-_MOST_FAILED:]
    rows = [
        (
            escaped(s.ckpt_id or "-"),
            "-" if s.step is None else str(s.step),
            escaped(s.time or "-"),
            one_line(s.error or ""),
        )
        for s in failed
    ]
    yield from html.section("Saves that failed", text.FAILED_HEAD, rows, text.NUMBERS)
    if not saves:
        return
    x, along = _along([save.step for save in saves], "save")
    yield f"<h2>The last {plural(len(saves), 'save')}</h2>"
    if run.advice is not None:
        yield f"<p>{html.text(text.advice_words(run.advice))}</p>"
    seconds = [
        ("pause of training", [save.blocked_sec for save in saves]),
        ("write", [save.write_sec for save in saves]),
        ("commit", [save.commit_sec for save in saves]),
    ]
    yield _plots(
        _chart(f"seconds, by {along}", x, seconds, short),
        _chart(f"bytes written, by {along}", x, [("", [save.n_bytes for save in saves])], n_bytes),
        _chart(f"rows of all tables, by {along}", x, [("", [save.n_rows for save in saves])], short),
    )


def _near(run: RunHealth) -> Iterator[str]:
    if run.near is None and run.near_now is None:
        return
    yield "<h2>Near saves</h2>"
    yield from (f"<p>{html.text(line)}</p>" for line in text.near_lines(run))
    if run.near is None or not run.near.made:
        return
    yield html.table(text.NEAR_HEAD, [list(map(html.text, row)) for row in text.near_rows(run.near)], text.NUMBERS)
    yield _note("averages of the last checkpoints and of the near saves before them, without copies on other hosts")
    entries = [
        (save, near) for save in run.saves if (near := save.near) is not None and save.error is None and near.made
    ]
    x, along = _along([save.step for save, _ in entries], "save")
    sizes: list[tuple[str, Line]] = [
        ("a near save", [None if near.n_bytes is None else near.n_bytes / near.made for _, near in entries]),
        ("the delta after it", [save.n_bytes if save.kind == "delta" else None for save, _ in entries]),
    ]
    became = [
        ("made", [float(near.made) for _, near in entries]),
        ("failed", [float(near.failed) for _, near in entries]),
        ("left out", [float(sum(near.skipped.values())) for _, near in entries]),
    ]
    known = [(name, values) for name, values in sizes if any(value is not None for value in values)]
    yield _plots(_chart(f"bytes, by {along}", x, known, n_bytes), _chart(f"near saves, by {along}", x, became, short))


def _along(steps: Sequence[int | None], what: str) -> tuple[list[float], str]:
    """Return the x values and the name of the axis: steps if they rise, else consecutive numbers."""
    known = [step for step in steps if step is not None]
    if len(known) == len(steps) and len(set(known)) == len(known) and known == sorted(known):
        return [float(step) for step in known], "step"
    return [float(number) for number in range(1, len(steps) + 1)], what


def _tables(run: RunHealth) -> Iterator[str]:
    if run.newest is None or not run.tables:
        return
    title = f"Tables of {escaped(run.newest)}"
    yield from html.section(title, text.TABLE_HEAD, map(text.table_row, run.tables), text.NUMBERS)
    yield _note(
        "norms are Euclidean; not finite: NaN or infinite values, in the slot that has most; dead: all zeros; "
        "exploding: over 100 times the median norm; never trained: all slots of the optimizer are zeros; "
        "80 % of look-ups: the rows that carry them, where the table tracks its counts"
    )
    plotted = sorted((table for table in run.tables if table.norms or table.counts), key=lambda table: -table.rows)
    for table in plotted[:_MOST_PLOTTED]:
        yield f"<h3>{html.text(_short(table.name))}</h3>"
        columns = {
            "norms of embeddings": table.norms,
            "look-ups of each row": table.counts,
            "steps since the last look-up": table.ages_steps,
            "days since the last look-up": table.ages_days,
        }
        drawn = zip(columns.items(), COLOURS, strict=False)
        yield _plots(*(_distribution(what, column, colour) for (what, column), colour in drawn if column))
        if table.largest:
            ids = ", ".join(f"{row.id} ({row.norm:.4g})" for row in table.largest)
            yield _note(f"largest norms, by id: {ids}")
    if len(plotted) > _MOST_PLOTTED:
        yield _note(f"the {_MOST_PLOTTED} largest of {plural(len(plotted), 'table')} are drawn")


def _distribution(what: str, column: Distribution, colour: str) -> tuple[str, str]:
    spread, bars = column.spread, column.bars
    caption = what
    if spread.n:
        ends = {"median": spread.quantiles[0.5], "99 % up to": spread.quantiles[0.99], "most": spread.most}
        caption += ": " + ", ".join(f"{name} {short(value)}" for name, value in ends.items())
    if bars is not None and bars.zeros:
        caption += f"; {count(bars.zeros)} at zero"
    return caption, histogram(bars, colour) if bars is not None and bars.edges else ""


def _chart(
    caption: str,
    x: Sequence[float],
    series: Sequence[tuple[str, Line]],
    unit: Callable[[float, Any], str],
    *,
    from_zero: bool = True,
) -> tuple[str, str]:
    items = (
        f'<span><i style="background:{colour}"></i>{html.text(name)}</span>'
        for (name, _), colour in zip(series, COLOURS, strict=False)
        if name
    )
    key = " ".join(items)
    return caption, lines(x, [line for _, line in series], unit, from_zero=from_zero) + (
        f'<p class="key">{key}</p>' if key else ""
    )


def _plots(*plots: tuple[str, str]) -> str:
    figures = (f"<figure><figcaption>{html.text(caption)}</figcaption>{drawn}</figure>" for caption, drawn in plots)
    return f'<div class="plots">{"".join(figures)}</div>'


def _short(name: str) -> str:
    shown = escaped(name)
    return shown if len(shown) <= _NAME else f"{shown[:_NAME]}…"


def lines(
    x: Sequence[float], series: Sequence[Line], unit: Callable[[float, Any], str], *, from_zero: bool = True
) -> str:
    def draw(axes: Any) -> None:
        marker = "o" if len(x) <= 40 else None
        for values, colour in zip(series, COLOURS, strict=False):
            known = [np.nan if value is None else value for value in values]
            axes.plot(x, known, color=colour, linewidth=1.4, marker=marker, markersize=3)
        if from_zero:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)  # does not cut points at the top
        axes.margins(x=0.03)
        axes.yaxis.set_major_formatter(unit)
        axes.xaxis.set_major_formatter(short)
        axes.locator_params(axis="x", nbins=5, integer=True)
        axes.locator_params(axis="y", nbins=5)

    return _drawn(draw)


def histogram(bars: Bars, colour: str) -> str:
    def draw(axes: Any) -> None:
        edges, counts = np.array(bars.edges), np.array(bars.counts)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.stairs(counts, edges, baseline=_LOWEST, fill=True, color=colour)
        axes.set_ylim(bottom=_LOWEST)
        axes.set_xticks(np.geomspace(edges[0], edges[-1], _TICKS))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(short)
        axes.yaxis.set_major_formatter(short)

    return _drawn(draw)


def short(value: float, _: Any = None) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"


def n_bytes(value: float, _: Any = None) -> str:
    return size(int(value)).replace(".0 ", " ") if value >= 0 else ""  # longer text is cut off at the left


def _drawn(draw: Callable[[Any], None]) -> str:
    """Return a plot as SVG whose text takes the page's colour, light or dark."""
    library, figures = needed("matplotlib", "report"), needed("matplotlib.figure", "report")
    with library.rc_context(_SETTINGS), io.StringIO() as out:
        figure = figures.Figure(figsize=_INCHES)
        figure.subplots_adjust(*_MARGINS)  # a layout that measures text takes twice as long
        axes = figure.add_subplot()
        draw(axes)
        axes.tick_params(colors=_INK, which="both")
        axes.grid(axis="y", color=_INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_facecolor("none")
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_INK)
            spine.set_alpha(0.4)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        svg = out.getvalue()
    # Adapt it to a page instead of a file: no prolog, no names of schemas, as wide as its container.
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r' (?:width|height)="[^"]*"', "", head).replace("<svg", '<svg role="img"') + ">" + rest
