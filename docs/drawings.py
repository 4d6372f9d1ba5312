"""Draws the pictures of the documentation as SVG, light or dark as the reader's screen: ``python docs/drawings.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "drawings"
_STYLE = """
    svg { --paper: #ffffff; --ink: #1f2933; --faint: #66727f; --line: #8a96a3; --sparse: #d8ecff; --dense: #e6e4fb;
          --plain: #f1f3f5; --done: #d9f2dd; --gone: #ffffff }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #1b2127; --ink: #e6eaee; --faint: #a3aeb9; --line: #76828e; --sparse: #1d4262; --dense: #3b3768;
            --plain: #2c343c; --done: #23502c; --gone: #1b2127 }
    }
    .paper { fill: var(--paper) } .sparse { fill: var(--sparse) } .dense { fill: var(--dense) }
    .plain { fill: var(--plain) } .done { fill: var(--done) } .gone { fill: var(--gone); stroke-dasharray: 5 4 }
    rect { stroke: var(--line); stroke-width: 1.2 } .paper { stroke: none }
    path { stroke: var(--line); stroke-width: 1.6; fill: none } .head { fill: var(--line); stroke: none }
    text { font: 15px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); text-anchor: middle }
    .small { font-size: 13px; fill: var(--faint) } .left { text-anchor: start } .bold { font-weight: 600 }
"""
_LINE = 18  # from one line of a text to the next


class Drawing:
    """A picture of boxes, texts and arrows."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" aria-labelledby="title desc">\n'
            f'  <title id="title">{escape(title)}</title>\n  <desc id="desc">{escape(description)}</desc>\n'
            f"  <style>{_STYLE}  </style>\n"
        )
        self._parts = [f'<rect class="paper" width="{width}" height="{height}" rx="10"/>']

    def text(self, x: float, y: float, lines: str, kind: str = "") -> None:
        """Write lines; ``x`` is their middle, or with the kind "left" their beginning, ``y`` the first base line."""
        for number, line in enumerate(lines.split("\n")):
            style = f' class="{kind}"' if kind else ""
            self._parts.append(f'<text x="{x:g}" y="{y + number * _LINE:g}"{style}>{escape(line)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: str = "", *, kind: str = "plain") -> None:
        """Draw a box with lines of text in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>')
        if lines:
            first = y + height / 2 + 5 - _LINE * lines.count("\n") / 2
            self.text(x + width / 2, first, lines)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points, the last two of which lie on a row or a column, with a head at its end."""
        (before_x, before_y), (x, y) = points[-2:]
        across, down = _sign(x - before_x), _sign(y - before_y)
        back_x, back_y = x - 9 * across, y - 9 * down
        corners = (x, y), (back_x - 5 * down, back_y - 5 * across), (back_x + 5 * down, back_y + 5 * across)
        head = f"M {_joined(corners)} Z"
        self._parts += [f'<path d="M {_joined(points)}"/>', f'<path class="head" d="{head}"/>']

    def line(self, *points: tuple[float, float]) -> None:
        """Draw a line through points."""
        self._parts.append(f'<path d="M {_joined(points)}"/>')

    def svg(self) -> str:
        """Return the file."""
        return self._head + "".join(f"  {part}\n" for part in self._parts) + "</svg>\n"


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return " L ".join(f"{x:g} {y:g}" for x, y in points)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _stations(drawing: Drawing, y: float, stations: Sequence[tuple[float, float, str]], height: float = 64) -> None:
    """Draw boxes in a row, each a place, a width and a text, and an arrow from each to the next."""
    for x, width, lines in stations:
        drawing.box(x, y, width, height, lines)
    for (x, width, _), (next_x, _, _) in pairwise(stations):
        drawing.arrow((x + width, y + height / 2), (next_x, y + height / 2))


def two_ways() -> Drawing:
    """Draw what a save and a load do, one after the other."""
    drawing = Drawing(
        "The two ways: a save and a load",
        "A save goes from the state dict of the model to a split into tables and dense tensors, to staging, to files "
        "of tables, dense tensors and positions, which are written at the same time, to the commit, which writes "
        "manifest.json last, and to rotation. A load locates a checkpoint by listing the output dir, selects what "
        "comes from where, reads and checks the files, and applies them to the model.",
        760,
        430,
    )
    drawing.text(24, 38, "Save", "left bold")
    drawing.text(391, 36, "write, at the same time", "small")
    _stations(drawing, 86, [(24, 74, "state\ndict"), (118, 64, "split"), (202, 74, "stage")])
    for row, (kind, name) in enumerate((("sparse", "tables"), ("dense", "dense tensors"), ("plain", "positions"))):
        y = 46 + 51 * row
        drawing.arrow((276, 118), (292, 118), (292, y + 21), (316, y + 21))
        drawing.box(316, y, 150, 42, name, kind=kind)
        drawing.line((466, y + 21), (482, y + 21), (482, 118))
    _stations(drawing, 86, [(508, 98, "commit"), (640, 96, "rotate")])
    drawing.arrow((482, 118), (508, 118))
    drawing.text(222, 172, "in the background,\ntraining goes on", "small")
    drawing.arrow((518, 150), (518, 222))
    drawing.text(572, 172, "manifest.json,\nwritten last", "small")
    drawing.text(688, 172, "old ones\nare removed", "small")
    drawing.box(24, 222, 712, 42, "output dir: a checkpoint counts once its manifest.json is there", kind="done")
    drawing.text(24, 300, "Load", "left bold")
    steps = [
        (24, 112, "locate"),
        (168, 112, "select"),
        (312, 124, "read, check"),
        (468, 112, "apply"),
        (612, 124, "model"),
    ]
    _stations(drawing, 314, steps)
    drawing.arrow((80, 264), (80, 314))
    notes = (
        "by listing\nthe output dir",
        "what comes\nfrom where",
        "every byte against\nits checksum",
        "batch by batch,\nno second copy",
    )
    for (x, width, _), note in zip(steps, notes, strict=False):
        drawing.text(x + width / 2, 398, note, "small")
    return drawing


def chain() -> Drawing:
    """Draw a chain of deltas over time, its compaction and its rotation."""
    drawing = Drawing(
        "A chain over time: full, deltas, compaction, rotation",
        "A full checkpoint is followed by three deltas, each of which stands on the one before it. A compactor makes a "
        "full copy of the newest delta, which supersedes it. The next delta stands on that copy. "
        "Rotation then removes the old full checkpoint and its deltas, on which nothing stands any more.",
        760,
        440,
    )
    links = [(24, 110, "ckpt_100\nfull", "sparse")]
    links += [(176 + 138 * number, 96, f"ckpt_{number + 2}00\ndelta", "dense") for number in range(3)]
    drawing.text(24, 38, "1. Saves: a full checkpoint, then what changed", "left bold")
    for (x, width, _, _), (next_x, _, _, _) in pairwise(links):
        drawing.arrow((next_x, 84), (x + width, 84))
    for x, width, lines, kind in links:
        drawing.box(x, 56, width, 56, lines, kind=kind)
    drawing.text(155, 130, "stands on", "small")
    drawing.text(656, 80, "a restore of ckpt_400\nreads four links", "small")
    drawing.text(24, 172, "2. Compaction: a full copy of ckpt_400 supersedes it", "left bold")
    drawing.line((24, 188), (24, 198), (548, 198), (548, 188))
    drawing.arrow((500, 198), (500, 220))
    drawing.text(230, 240, "a restore of ckpt_500\nreads two links", "small")
    drawing.text(24, 318, "3. Rotation: what nothing stands on any more is removed", "left bold")
    for x, width, lines, _ in links[:3]:
        drawing.box(x, 336, width, 56, lines, kind="gone")
    for y in (220, 336):
        drawing.box(440, y, 120, 56, "ckpt_400\nfull copy", kind="sparse")
        drawing.arrow((626, y + 28), (560, y + 28))
        drawing.box(626, y, 110, 56, "ckpt_500\ndelta", kind="dense")
    drawing.arrow((24, 416), (690, 416))
    drawing.text(714, 421, "time", "small")
    return drawing


def ranks_and_buckets() -> Drawing:
    """Draw how ids fall into buckets, and how ranks share them."""
    drawing = Drawing(
        "Ranks and buckets",
        "The hash of an id gives its bucket, one of 65,536. Each of two ranks that save owns a slice of the buckets "
        "and writes one shard: parts, which are files, with batches in bucket order. Each of three ranks that "
        "restore owns another slice, and reads only the batches that meet it; both ranks read a batch across a border.",
        760,
        420,
    )
    left, width = 116, 620
    drawing.text(24, 38, "ids", "left bold")
    drawing.text(left + width / 2, 38, "the hash of an id says its bucket: mix64(id) >> 48")
    drawing.text(24, 83, "buckets", "left bold")
    drawing.box(left, 58, width, 40, "0 … 65,535")
    drawing.text(24, 138, "2 ranks\nsave", "left bold")
    drawing.text(24, 236, "files", "left bold")
    for rank in range(2):
        x = left + rank * width / 2
        drawing.box(
            x, 122, width / 2, 42, f"rank {rank}: slice [{rank * 32768:,}, {(rank + 1) * 32768:,})", kind="dense"
        )
        drawing.arrow((x + width / 4, 164), (x + width / 4, 190))
        drawing.box(x + 2, 190, width / 2 - 4, 82)
        drawing.text(x + width / 4, 209, f"shard {rank} of 2: a part", "small")
    drawing.text(24, 336, "3 ranks\nrestore", "left bold")
    for rank in range(3):
        drawing.box(left + rank * width / 3, 322, width / 3, 42, f"rank {rank}", kind="dense")
    for batch in range(8):
        x = left + batch * width / 8
        is_across = batch in {2, 5}  # the borders lie at a third and at two thirds
        drawing.box(x + 5, 219, width / 8 - 10, 42, "batch", kind="done" if is_across else "sparse")
        for share in (0.3, 0.84) if batch == 2 else (0.16, 0.7) if batch == 5 else (0.5,):
            drawing.arrow((x + share * width / 8, 261), (x + share * width / 8, 322))
    drawing.text(left + width / 2, 394, "both ranks read a batch that lies across a border", "small")
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "two-ways.svg": two_ways,
    "chain.svg": chain,
    "ranks-and-buckets.svg": ranks_and_buckets,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
