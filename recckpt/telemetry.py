"""Metrics and spans of saves and loads for OpenTelemetry, if its API is installed.

Each series and span has the attribute ``recckpt.run``, by which one Prometheus tells jobs apart. OpenTelemetry is not
imported before the first save or load. An error in OpenTelemetry, such as in a user's processor, is logged once; the
save or load continues.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from opentelemetry.trace import Tracer

log = logging.getLogger("recckpt")

What = Literal["save", "load"]
Attributes = Mapping[str, str | int]

_PREFIX = "recckpt."
_COUNTERS = {
    "saves": ("{save}", "Saves that have ended, by kind and result."),
    "save.bytes": ("By", "Bytes of the files that saves have written."),
    "save.rows": ("{row}", "Rows that saves have written."),
    "loads": ("{load}", "Loads that have ended, by result."),
    "failures": ("{failure}", "Saves and loads that have failed, by operation."),
    "near.saves": ("{save}", "Near saves that were acknowledged."),
    "near.failures": ("{failure}", "Near saves that have failed."),
    "near.bytes": ("By", "Bytes of the files that near saves have written."),
    "restore.fallbacks": ("{fallback}", "Damaged checkpoints that restores skipped."),
    "storage.retries": ("{retry}", "Retried requests to the storage, counted when a save or load ends."),
}
_PRESENT = ("restore.fallbacks", "storage.retries")  # start at 0, as "failures", which has other attributes
_HISTOGRAMS = {
    "save.duration": ("s", "From the request for a save until it has ended."),
    "save.pause": ("s", "How long a save blocked training, on the rank that waited longest."),
    "near.duration": ("s", "From the step of a near save until it was acknowledged."),
    "near.pause": ("s", "How long a near save blocked training, on rank 0."),
    "load.duration": ("s", "How long reading a checkpoint took, once it was found and opened."),
}
_GAUGES = {
    "chain.length": ("{checkpoint}", "Checkpoints that a restore of the newest one reads."),
    "last_save.time": ("s", "When the newest checkpoint was committed, in seconds since 1970."),
    "near.last_save.time": ("s", "When the newest near save was acknowledged, in seconds since 1970."),
    "near.lag": ("{step}", "Steps since the newest near save or checkpoint, at the last step with a near save due."),
    "lag": ("{step}", "Steps since the newest checkpoint, at the last step with a near save due."),
    "storage.free": ("By", "Free space after the last save, if the storage reports it."),
}
_UNDER_WAY = "save.under_way", "s", "How long the running save has taken so far; 0 between saves."
# The default bounds are meant for milliseconds.
_SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


class _Tools:
    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self.tracer = tracer
        self.open: set[Operation] = set()
        self.runs: set[str] = set()  # runs that have begun a save or load in this process
        self.counters = {name: meter.create_counter(_PREFIX + name, *about) for name, about in _COUNTERS.items()}
        self.histograms = {
            name: meter.create_histogram(_PREFIX + name, *about, explicit_bucket_boundaries_advisory=_SECONDS)
            for name, about in _HISTOGRAMS.items()
        }
        self.gauges = {name: meter.create_gauge(_PREFIX + name, *about) for name, about in _GAUGES.items()}
        os.register_at_fork(after_in_child=self._forget)
        name, unit, description = _UNDER_WAY
        meter.create_observable_gauge(_PREFIX + name, [lambda _: self._seconds_under_way()], unit, description)

    def record(self, run: str, measured: Mapping[str, float]) -> None:
        attributes_of_run = {_PREFIX + "run": run}
        for name, value in measured.items():
            if name in self.counters:
                self.counters[name].add(value, attributes_of_run)
            elif name in self.histograms:
                self.histograms[name].record(value, attributes_of_run)
            else:
                self.gauges[name].set(value, attributes_of_run)

    def _forget(self) -> None:
        """Forget the saves that were running at a fork: a child never learns how they end."""
        self.open.clear()
        self.runs.clear()

    def _seconds_under_way(self) -> Iterator[Observation]:
        """Yield, for each run, how long its current save has taken; the oldest save if several savers share a name."""
        from opentelemetry.metrics import Observation

        now, saves = time.perf_counter(), [each for each in self.open.copy() if each.what == "save"]
        for run in self.runs.copy():
            seconds = max((now - save.begin for save in saves if save.run == run), default=0.0)
            yield Observation(seconds, {_PREFIX + "run": run})


class Operation:
    """A running save or load, recorded as one span. Only the first call of :meth:`end` counts.

    As a context manager, it ends only if an error leaves the block. ``retries`` returns the number of storage requests
    retried so far. ``is_reported``: whether this process reports the operation; only one of several ranks does.
    """

    def __init__(
        self,
        what: What,
        attributes: Attributes,
        *,
        run: str = "",
        retries: Callable[[], int] = lambda: 0,
        is_reported: bool = True,
    ) -> None:
        self.what, self.run, self.begin = what, run, time.perf_counter()
        self._once, self._retries, self._retries_before = threading.Lock(), retries, retries()
        self._span: Any = None
        self._tools = _guarded(_tools) if is_reported else None
        if self._tools is not None:
            tools, attributes_of_run = self._tools, {"run": run}
            tools.open.add(self)
            tools.runs.add(run)
            self._span = _guarded(
                lambda: tools.tracer.start_span(_PREFIX + what, attributes=_named({**attributes, **attributes_of_run}))
            )
            # Prometheus counts no increase if a counter first appears with the value 1.
            _guarded(lambda: tools.counters["failures"].add(0, _named({"operation": what, **attributes_of_run})))
            _guarded(lambda: tools.record(run, dict.fromkeys(_PRESENT, 0)))

    def __enter__(self) -> Operation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(error)

    def end(
        self,
        error: BaseException | None = None,
        *,
        attributes: Attributes | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Report the result of the operation; only the first call has an effect.

        ``attributes`` are added to the span; ``kind`` is also added to the metrics. ``measured`` maps instrument names
        to values; some instruments are recorded for successes only.
        """
        if self._tools is None or not self._once.acquire(blocking=False):
            return
        self._tools.open.discard(self)
        tools, seconds = self._tools, time.perf_counter() - self.begin
        known = dict(attributes or {})
        values = {"storage.retries": self._retries() - self._retries_before, **(measured or {})}
        _guarded(lambda: self._measure(tools, seconds, known, values, error))
        if self._span is not None:
            _guarded(lambda: self._describe(known, error))
            _guarded(self._span.end)

    def _measure(
        self, tools: _Tools, seconds: float, known: Attributes, measured: Mapping[str, float], error: object
    ) -> None:
        result = {"run": self.run, "result": "ok" if error is None else "failed"}
        if "kind" in known:
            result["kind"] = str(known["kind"])
        tools.counters[f"{self.what}s"].add(1, _named(result))
        tools.histograms[f"{self.what}.duration"].record(seconds, _named(result))
        if error is not None:
            tools.counters["failures"].add(1, _named({"run": self.run, "operation": self.what}))
        tools.record(self.run, measured)

    def _describe(self, known: Attributes, error: BaseException | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(_named(known))
        if error is not None:
            self._span.record_exception(error)
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))


def measure(run: str, measured: Mapping[str, float]) -> None:
    tools = _guarded(_tools)
    if tools is not None:
        _guarded(lambda: tools.record(run, measured))


@cache
def _tools() -> _Tools | None:
    """Return the tracer and the meter of OpenTelemetry; None if its API is not installed."""
    try:
        from opentelemetry import metrics, trace
    except ImportError:
        return None
    version = sys.modules[__name__.partition(".")[0]].__version__
    return _Tools(trace.get_tracer("recckpt", version), metrics.get_meter("recckpt", version))


def _named(attributes: Attributes) -> dict[str, str | int]:
    return {_PREFIX + name: value for name, value in attributes.items()}


def _guarded(work: Callable[[], Any]) -> Any:
    """Return the result, or None after an error of OpenTelemetry, which is logged once."""
    try:
        return work()
    except Exception as error:
        _say(type(error).__name__)
        log.debug("OpenTelemetry failed", exc_info=True)
        return None


@cache
def _say(kind: str) -> None:
    log.warning("OpenTelemetry failed, and saves and loads continue without it: %s", kind, exc_info=True)
