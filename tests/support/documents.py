"""The blocks of a page of the documentation: run as one program, or marked with the reason why they are not.

A block that is not run stands below a comment, which no reader of the page sees: ``<!-- not run: the reason -->``.
What a page takes for granted, such as "with your model", is made by ``tests/pages/<page>.before.py``, and what must
hold besides when it is over is in ``<page>.after.py``; of ``reference/<page>``, in ``reference-<page>.after.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import yaml

from support.paths import ROOT, TESTS

DOCS = ROOT / "docs"
PAGES = {"README.md": ROOT / "README.md", **{str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}}
TEXTS = {"command-line.md": "cli/test_app.py", "does-not-resume.md": "test_does_not_resume.py"}
"""Pages whose output another test compares."""
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the number of the line above its text."""

    page: str
    line: int
    language: str
    text: str
    why_not_run: str | None

    def __str__(self) -> str:
        """Say where it is."""
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    whole = PAGES[page].read_text(encoding="utf-8")
    return [
        Block(page, whole.count("\n", 0, found.start("text")), found["language"], found["text"], found["why"])
        for found in _BLOCK.finditer(whole)
    ]


def commands(shell: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block."""
    for line in shell.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def follow(page: str) -> None:
    """Do in the working directory what a page says, as if it were one script."""
    said, names = io.StringIO(), {"__name__": "__main__"}
    logging.basicConfig(stream=said, format="%(message)s", level=logging.INFO, force=True)
    with contextlib.redirect_stdout(said):
        _follow(page, names, said)


def _follow(page: str, names: dict[str, Any], said: io.StringIO) -> None:
    names["what_was_said"] = said.getvalue
    names["go_on_after"] = lambda other: _follow(other, names, said)
    _beside(page, "before", names)
    for block in blocks(page):
        if block.why_not_run is None:
            _do(block, names, said)
    _beside(page, "after", names)


def _beside(page: str, when: str, names: dict[str, Any]) -> None:
    script = TESTS / "pages" / f"{page.removesuffix('.md').replace('/', '-')}.{when}.py"
    if script.exists():
        exec(compile(script.read_bytes(), script, "exec"), names)


def _do(block: Block, names: dict[str, Any], said: io.StringIO) -> None:
    if block.language == "python":
        exec(compile("\n" * block.line + block.text, PAGES[block.page], "exec"), names)
    elif block.language == "sh":
        for words in commands(block.text):
            _run(words, block)
    elif block.language == "bash":
        subprocess.run(["bash", "-c", block.text], check=True)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "text" and block.page not in TEXTS:
        assert is_said(block.text, said.getvalue()), f"{block}: not said. What was said:\n{said.getvalue()}"


def _run(words: list[str], block: Block) -> None:
    """Run a command of ours; of others check that what they name is there."""
    name, *rest = words
    if name == "recckpt":
        from recckpt.cli import main

        answers = {0, 1} if rest[0] == "diff" else {0}  # that two checkpoints differ is no problem
        assert main(rest) in answers, f"{block}: {shlex.join(words)}"
    elif name == "export":
        os.environ.update(word.split("=", 1) for word in rest)  # type: ignore[arg-type]
    else:
        wrong = named_in_vain(words)
        assert wrong is None, f"{block}: {shlex.join(words)}: {wrong}"


def named_in_vain(words: list[str]) -> str | None:
    """Return what a command names that is not there: a target, an extra, a script, an option; None if all is."""
    name, *rest = words
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return next((word for word in rest if word not in targets), None)
    if name == "pip":
        extras = re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
        wanted = [extra for word in rest for extra in re.findall(r"\[(.+)\]", word) for extra in extra.split(",")]
        return next((extra for extra in wanted if extra not in extras), None)
    if name in {"python", "torchrun"}:
        script, *options = dropwhile(lambda word: not word.endswith(".py"), words)
        if script == "train.py":  # the reader's own
            return None
        if not (ROOT / script).is_file():
            return script
        known = (ROOT / script).read_text(encoding="utf-8")
        return next((word for word in options if word.startswith("--") and f'"{word}"' not in known), None)
    return name


def is_said(shown: str, said: str) -> bool:
    """Whether a page shows what was said, but for widths, the working directory, and what it leaves out by dots."""
    parts = [re.escape(word) if word not in {"...", "…"} else ".*?" for word in shown.split()]
    words = " ".join(said.replace(str(Path.cwd()), "/data").split())
    return re.search(" ".join(parts).replace(" .*? ", " (?:.*? )?"), words) is not None
