"""The page of the command line is what the commands say of themselves."""

from __future__ import annotations

import pytest
from support.paths import ROOT


def test_the_page_of_the_command_line_is_the_help_of_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setenv("COLUMNS", "100")
    from command_line import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run `python docs/command_line.py`"
