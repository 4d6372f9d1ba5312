"""The page for the night: each symptom is brought about, and says what the page shows."""

from __future__ import annotations

import logging
import re
import traceback
from pathlib import Path

import pytest
from support import symptoms
from support.symptoms import PAGE, SYMPTOMS, Log

import recckpt


def as_shown(said: str | Exception, here: Path) -> str:
    """Return a message without what differs from run to run."""
    text = str(said) if isinstance(said, str) else "".join(traceback.format_exception_only(said)).rstrip("\n")
    text = text.replace(str(here), "/data").replace(f"{symptoms.__file__}", "train.py")
    text = text.replace(f"this recckpt, {recckpt.__version__},", "this recckpt, 1.0.0,")
    text = re.sub(r"process \d+ on \S+?(?=[ ,;:])", "process 4711 on host-0", text)
    return re.sub(r"\b[0-9a-f]{16,32}\b|\d{4}-\d\d-\d\dT[\d:]+Z|(?<=train.py:)\d+", "…", text)


def shown() -> dict[str, str]:
    """Return the heading of each symptom, and the message below it."""
    return dict(
        re.findall(r"^## ([^\n]+)\n\n```text\n(.+?)\n```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )


def test_each_symptom_of_the_page_is_brought_about_here() -> None:
    assert list(shown()) == list(SYMPTOMS)


SLOW = {"The storage lets nobody in"}  # what speaks S3 takes seconds to import


@pytest.mark.parametrize(
    "heading", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SYMPTOMS]
)
def test_the_page_shows_what_is_said(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    assert as_shown(SYMPTOMS[heading](Log(caplog)), tmp_path) == shown()[heading]


def test_the_name_that_searched_checkpoints_leads_to_the_loop_of_the_page() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'first': .* docs/does-not-resume\.md#the-loss-is-nan$"):
        _ = recckpt.first  # type: ignore[attr-defined]
