"""How far the long tests go, and what of a family of cases the default suite takes."""

import os

import pytest

SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "1"))  # sweeps try every so-manieth point: 1 is all
if not 1 <= SWEEP_STRIDE <= 100:
    raise pytest.UsageError(f"found SWEEP_STRIDE={SWEEP_STRIDE}, expected 1, for all points of the sweeps, to 100")


def mostly_slow(*varied: str) -> pytest.MarkDecorator:
    """Mark a parametrized test of which the default suite takes one case, its first, and the slow suite the others.

    Args:
        varied: parameters and fixtures of which the default suite takes all values, with the first of all others.
    """
    return pytest.mark.mostly_slow(*varied)


def mark_slow(item: pytest.Item) -> None:
    """Mark a case slow, where it is none of those that ``mostly_slow`` leaves to the default suite."""
    for mark in item.iter_markers("mostly_slow"):
        places = item.callspec.indices
        unknown = set(mark.args) - places.keys()
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: mostly_slow of {unknown}, expected some of {list(places)}")
        if any(place for name, place in places.items() if name not in mark.args):
            item.add_marker("slow")
