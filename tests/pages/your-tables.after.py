"""The tables of the page fulfil the contracts that it shows, as pytest would run them."""

from pathlib import Path

from support.broken_contracts import broken

for suite in (TestWords, TestClicks):
    root = Path("contracts") / suite.__name__
    root.mkdir(parents=True)
    assert broken(suite, root.absolute()) == []
