"""How often to save: what saves and failures cost together, and the interval at which that is least (pure).

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016. Failures come at random, at a steady rate.
"""

from __future__ import annotations

import math


def best_interval(pause_sec: float, failure_sec: float) -> float:
    """Return the seconds from the begin of one save to that of the next at which least time is lost, by Daly's formula.

    Args:
        pause_sec: how long training stands still for a save; above 0.
        failure_sec: the mean time from one failure to the next; above 0.
    """
    if pause_sec >= 2 * failure_sec:
        return failure_sec + pause_sec
    ratio = pause_sec / (2 * failure_sec)
    return math.sqrt(2 * pause_sec * failure_sec) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def lost_share(every_sec: float, pause_sec: float, total_sec: float, failure_sec: float) -> float:
    """Return which share of the time saves and failures take, to first order; 1 at most.

    Args:
        every_sec: from the begin of one save to that of the next; above 0.
        pause_sec: how long training stands still for a save.
        total_sec: from the begin of a save until it is committed: what is trained meanwhile is lost with a failure too.
        failure_sec: the mean time from one failure to the next; above 0.
    """
    return min(1.0, pause_sec / every_sec + (every_sec / 2 + total_sec) / failure_sec)
