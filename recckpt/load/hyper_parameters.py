"""The hyper-parameters of a run: which of them a load replaces, and how a run keeps its own."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recckpt.dense.optimizers import NAMES, SHAPES
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.live.optimizers import RowOptimizers
from recckpt.load.live_state import LiveState
from recckpt.sparse.optim.param_groups import plain

log = logging.getLogger("recckpt")

_NO_SETTINGS = {"params", "tables", NAMES, SHAPES, "initial_lr"}  # the last is what schedulers note in a group
_RATES = ("base_lrs", "max_lrs", "min_lrs")  # what torch's schedulers make learning rates of, one a group


@dataclass(frozen=True)
class _Schedule:
    """A registered scheduler, or one inside of it, with the rates that it has in this run."""

    scheduler: LRScheduler
    rates: Mapping[str, Any]


class HyperParameters:
    """Those of all optimizers of a run, as they are when this is made: before a load.

    Attributes:
        kept: whether those of this run are to stay.
    """

    def __init__(self, live: LiveState, *, kept: bool) -> None:
        self.kept = kept
        objects = live.extra.objects
        optimizers = {name: obj for name, obj in objects.items() if isinstance(obj, Optimizer)}
        own: dict[str, Optimizer | RowOptimizers] = {**optimizers}
        if live.row_optimizers is not None:
            own[SPARSE_OPTIM] = live.row_optimizers
        self._groups = {name: (one, [dict(group) for group in one.param_groups]) for name, one in own.items()}
        self._schedules = {
            name: schedules for name, obj in objects.items() if (schedules := [*map(_schedule, _schedulers(obj))])
        }

    def after_load(self, label: str, loaded: Collection[str], fresh: Collection[str], *, with_log: bool) -> None:
        """Put those of this run back where they are kept, and say in one line what a load has replaced.

        Args:
            label: what messages call the checkpoint.
            loaded: names of the registered objects that were loaded.
            fresh: names of the optimizers that took nothing, since they are of another class.
            with_log: whether to log what has changed.
        """
        differences = list(self._differences())
        if with_log and differences:
            what = "this run keeps its hyper-parameters" if self.kept else "replaced hyper-parameters of this run"
            form = "{} {}, not {}" if self.kept else "{} {} -> {}"
            log.info("%s: %s: %s", label, what, ", ".join(form.format(*each) for each in differences))
        if self.kept:
            self._put_back()
        for name, schedules in self._schedules.items():
            if name in loaded and (self.kept or self._belongs(schedules[0].scheduler, fresh)):
                _keep_rates(schedules)

    def _differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value of this run, value that was loaded)."""
        for name, (optimizer, groups) in self._groups.items():
            for number, (before, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
                which = f"{name}[{number}]" if len(groups) > 1 else name
                for key in (key for key in before if key in now and key not in _NO_SETTINGS):
                    own, loaded = _comparable(before[key]), _comparable(now[key])
                    if own != loaded:
                        yield f"{which} {key}", own, loaded

    def _put_back(self) -> None:
        for optimizer, groups in self._groups.values():
            if isinstance(optimizer, RowOptimizers):
                optimizer.set_settings(groups)
                continue
            for before, now in zip(groups, optimizer.param_groups, strict=True):
                own = {**before, "params": now["params"]}
                now.clear()
                now.update(own)

    def _belongs(self, scheduler: LRScheduler, names: Collection[str]) -> bool:
        """Say whether a scheduler is of one of these optimizers, or of one inside of it."""
        optimizers = (optimizer for name, (optimizer, _) in self._groups.items() if name in names)
        return any(optimizer.param_groups is scheduler.optimizer.param_groups for optimizer in optimizers)


def _schedulers(obj: Any) -> Iterator[LRScheduler]:
    """Yield a scheduler and those that it consists of, outer ones first; a wrapper has it as ``scheduler``."""
    if not isinstance(obj, LRScheduler):
        obj = getattr(obj, "scheduler", None)
    if isinstance(obj, LRScheduler):
        yield obj
        for inner in getattr(obj, "_schedulers", ()):
            yield from _schedulers(inner)


def _schedule(scheduler: LRScheduler) -> _Schedule:
    return _Schedule(scheduler, {name: rates for name in _RATES if (rates := getattr(scheduler, name, None))})


def _keep_rates(schedules: Sequence[_Schedule]) -> None:
    """Go on from the place in the schedule that was loaded, with the rates of this run.

    The schedule has made something of the rates that it began with, such as a tenth: the same of those of this run is
    the learning rate now.
    """
    outer = schedules[0].scheduler
    based = next((schedule for schedule in schedules if "base_lrs" in schedule.rates), None)
    factors = _factors(outer, based.scheduler) if based is not None else []
    for schedule in schedules:
        vars(schedule.scheduler).update(schedule.rates)
    if based is not None and factors:
        factors += factors[-1:] * len(outer.optimizer.param_groups)  # of a group that is new
        for group, base, factor in zip(outer.optimizer.param_groups, based.rates["base_lrs"], factors, strict=False):
            _set_rate(group, float(base) * factor)
    outer._last_lr = [plain(group["lr"]) for group in outer.optimizer.param_groups]


def _factors(outer: LRScheduler, based: LRScheduler) -> list[float]:
    """Return what the schedule has made of the rate of each group so far."""
    rates = zip(outer.get_last_lr(), based.base_lrs, strict=False)
    return [float(now) / float(base) if float(base) else 1.0 for now, base in rates]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _comparable(value: Any) -> Any:
    """Return a setting as one compares and prints it: numbers in place of tensors, tuples in place of lists."""
    value = plain(value) if not isinstance(value, Tensor) or value.numel() == 1 else value.tolist()
    return tuple(value) if isinstance(value, list) else value
