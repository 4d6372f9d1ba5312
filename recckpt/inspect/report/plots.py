"""Plots as SVG that stands in a page: in the colours of the page, light or dark, without names of other people's."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recckpt.inspect.libraries import needed
from recckpt.inspect.spread import Bars
from recckpt.text import size

COLOURS = ("#3d7edb", "#e07b39", "#2e9e5b", "#a05bd0", "#d1495b", "#2aa3a3", "#b8902b", "#8a8a8a")  # on light and dark

_INK = "#010203"  # stands for the colour of text, which a page alone knows
_INCHES = (4.2, 2.3)
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "recckpt",  # the same page of the same data
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,
}
_MARGINS = (0.15, 0.11, 0.97, 0.96)  # left, bottom, right and top: room for the text of axes
_TICKS = 4
_LOWEST = 0.6  # counts: a bar of 1 is seen

Line = Sequence[float | None]


def lines(x: Sequence[float], series: Sequence[Line], unit: Callable[[float, Any], str]) -> str:
    """Return lines from zero up, one a colour; None is a gap."""

    def draw(axes: Any) -> None:
        marker = "o" if len(x) <= 40 else None
        for values, colour in zip(series, COLOURS, strict=False):
            known = [np.nan if value is None else value for value in values]
            axes.plot(x, known, color=colour, linewidth=1.4, marker=marker, markersize=3)
        axes.set_ylim(0, 1.05 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)  # points at the top are whole
        axes.margins(x=0.03)
        axes.yaxis.set_major_formatter(unit)
        axes.xaxis.set_major_formatter(short)
        axes.locator_params(axis="x", nbins=5, integer=True)
        axes.locator_params(axis="y", nbins=5)

    return _drawn(draw)


def bands(x: Sequence[float], low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> str:
    """Return a line in a band from low to high, over a scale of logarithms."""

    def draw(axes: Any) -> None:
        axes.set_xscale("log")
        axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.plot(x, middle, color=COLOURS[0], linewidth=1.4, marker="o", markersize=3)
        axes.set_ylim(0, 1.05 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)
        axes.set_xticks(np.geomspace(x[0], x[-1], min(len(x), _TICKS + 1)))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(short)
        axes.yaxis.set_major_formatter(short)
        axes.locator_params(axis="y", nbins=5)

    return _drawn(draw)


def histogram(bars: Bars, colour: str) -> str:
    """Return bars over a scale of logarithms, as high as the logarithms of their counts."""

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
    """Return a number of an axis in few characters."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"


def n_bytes(value: float, _: Any = None) -> str:
    """Return bytes of an axis."""
    return size(int(value)).replace(".0 ", " ") if value >= 0 else ""  # what is longer is cut off at the left


def _drawn(draw: Callable[[Any], None]) -> str:
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
        return _inline(out.getvalue())


def _inline(svg: str) -> str:
    """Return the SVG of a file as that of a page: no prolog, no names of schemas, as wide as its place."""
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r' (?:width|height)="[^"]*"', "", head).replace("<svg", '<svg role="img"') + ">" + rest
