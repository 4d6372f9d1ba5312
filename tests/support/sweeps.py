"""How far the long tests go, and what of a family of cases the default suite takes."""

import os
from collections.abc import Iterable
from itertools import combinations
from typing import TypeVar

import pytest

_Case = TypeVar("_Case", bound=tuple)

SWEEP_STRIDE = int(os.environ.get("SWEEP_STRIDE", "1"))  # sweeps try every so-manieth point: 1 is all
if not 1 <= SWEEP_STRIDE <= 100:
    raise pytest.UsageError(f"found SWEEP_STRIDE={SWEEP_STRIDE}, expected 1, for all points of the sweeps, to 100")
# Of sweeps whose points are jobs on several hosts: each takes a second.
HOST_STRIDE = 2 * SWEEP_STRIDE if SWEEP_STRIDE > 1 else 1


def some_of(n_points: int, stride: int, number: int) -> range:
    """Return every ``stride``-th of the points 1 to ``n_points`` of a sweep, at least one where there are any.

    Args:
        n_points: of the sweep.
        stride: from one to the next.
        number: of the sweep among others like it, each of which begins elsewhere.
    """
    period = max(1, min(stride, n_points))
    return range(1 + number * (period // 9 | 1) % period, n_points + 1, stride)


def pairwise(cases: Iterable[_Case]) -> list[_Case]:
    """Return all cases at a small stride, else fewer, in which any two values that come together in one still do.

    Args:
        cases: values of the same parameters, as of ``itertools.product``.
    """
    left = [(case, {*combinations(enumerate(map(repr, case)), 2)}) for case in cases]
    if SWEEP_STRIDE < 20:
        return [case for case, _ in left]
    missed, some = set().union(*(pairs for _, pairs in left)), []
    while missed:
        case, pairs = max(left, key=lambda one: len(one[1] & missed))
        some.append(case)
        missed -= pairs
    return some


_first: dict[tuple[str, str], dict[str, object]] = {}  # test -> parameters of the case that the default suite takes


def mostly_slow(*varied: str) -> pytest.MarkDecorator:
    """Mark a parametrized test of which the default suite takes one case, its first, and the slow suite the others.

    Args:
        varied: parameters, of fixtures too, of which the default suite takes all values, with the first of all others.
    """
    return pytest.mark.mostly_slow(*varied)


def mark_slow(item: pytest.Item) -> None:
    """Mark a case slow, where it is none of those that ``mostly_slow`` leaves to the default suite."""
    mark = item.get_closest_marker("mostly_slow")
    if mark is None or item.get_closest_marker("slow"):
        return
    given = item.callspec.params
    if not set(mark.args) <= given.keys():
        raise pytest.UsageError(f"{item.nodeid}: found mostly_slow{mark.args}, expected some of {list(given)}")
    first = _first.setdefault((item.parent.nodeid, item.originalname), given)
    if any(given[name] is not first[name] for name in given if name not in mark.args):
        item.add_marker("slow")
