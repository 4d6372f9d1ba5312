"""The share of its time that a job which fails at random spends on steps that stay: simulated, from measured costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DAY = 86_400.0


@dataclass(frozen=True)
class Kept:
    """One kind of save: how often, what it costs, and when it counts; all in seconds.

    Args:
        every_sec: from the begin of one to that of the next, of training.
        cost_sec: how much longer training takes for one.
        late_sec: from its begin until a restore finds it.
    """

    every_sec: float
    cost_sec: float
    late_sec: float

    def covered(self, trained_sec: float) -> float:
        """Return how much of what one life of a process has trained is in a save that counts; 0 before the first."""
        return max(0.0, (trained_sec - self.late_sec) // self.every_sec * self.every_sec)


@dataclass(frozen=True)
class Job:
    """A job whose processes die and whose hosts are lost, each independently at a steady rate.

    Args:
        checkpoints: outlive every failure.
        near: outlive processes alone; None where there are none.
        process_sec: from the death of a process to its first new step.
        host_sec: from the loss of a host to the first new step.
        process_failures: a day.
        host_failures: a day.
    """

    checkpoints: Kept
    near: Kept | None
    process_sec: float
    host_sec: float
    process_failures: float
    host_failures: float

    @property
    def slowness(self) -> float:
        """Seconds of training by the clock for one second of steps, without failures."""
        kinds = [self.checkpoints] + ([self.near] if self.near else [])
        return 1 + sum(kind.cost_sec / kind.every_sec for kind in kinds)


def useful_share(job: Job, days: float, seed: int) -> tuple[float, float]:
    """Return the share of the time that went into steps that stay, and the mean seconds of steps lost a failure."""
    random, rate = np.random.default_rng(seed), (job.process_failures + job.host_failures) / DAY
    clock = reached = 0.0  # seconds: by the clock, and of steps that a restore would find
    in_checkpoint = 0.0  # of ``reached``
    starting, lost, failures = 0.0, 0.0, 0
    while clock < days * DAY:
        lived = random.exponential(1 / rate) if rate else np.inf
        lived = min(lived, days * DAY - clock)
        clock += lived
        trained = max(0.0, lived - starting) / job.slowness
        if clock >= days * DAY:
            reached += trained
            break
        if covered := job.checkpoints.covered(trained):
            in_checkpoint = reached + covered
        is_host = random.random() < job.host_failures / (job.process_failures + job.host_failures)
        near = reached + (job.near.covered(trained) if job.near else 0.0)
        # Near saves of an earlier life lie on the host as well: what was reached by them is lost with it.
        found = in_checkpoint if is_host or not job.near else max(near, in_checkpoint)
        lost, failures = lost + reached + trained - found, failures + 1
        reached, starting = found, job.host_sec if is_host else job.process_sec
    return reached / clock, lost / failures if failures else 0.0
