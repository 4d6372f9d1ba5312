"""Figures of the harnesses: what was tried and what was found, printed as JSON lines at the end of the run."""

from collections import Counter, defaultdict

import pytest


class Figures:
    """Counts by harness; ``figures.add("T5", points=1, lost=0)`` adds to them."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, name: str, **counts: int) -> None:
        """Add to the counts of a harness; a count of 0 is printed too."""
        for what, count in counts.items():
            self._counts[name][what] += count

    def take(self) -> dict[str, dict[str, int]]:
        """Return what was added since the last call."""
        taken, self._counts = self._counts, defaultdict(Counter)
        return {name: dict(counts) for name, counts in taken.items()}


_figures = Figures()


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Where a harness counts."""
    return _figures


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Send the counts along with the report of a test: with several processes, reports alone reach the summary."""
    if call.when == "teardown":
        item.user_properties += [("figures", taken) for taken in [_figures.take()] if taken]
