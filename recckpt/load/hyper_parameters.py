"""The hyper-parameters of a run: which ones a load replaces, and how the run keeps its own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recckpt.dense.optimizers import NAMES, SHAPES, counted_in_groups, groups_of, schedulers_in
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.live.optimizer_slots import DECAY
from recckpt.live.tables import RowOptimizers
from recckpt.load.live_state import LiveState
from recckpt.sparse.optim.optimizer import SparseOptimizer, TableParameter, plain
from recckpt.text import first_few

log = logging.getLogger("recckpt")

_NO_SETTINGS = {"params", "tables", NAMES, SHAPES, "initial_lr"}  # schedulers add initial_lr to a group
_KEPT, _REPLACED = (lambda each: "{} {}, not {}".format(*each)), (lambda each: "{} {} -> {}".format(*each))
_RATES = ("base_lrs", "max_lrs", "min_lrs", "base_momentums", "max_momentums")  # of torch's schedulers, one per group


class HyperParameters:
    """The hyper-parameters of all optimizers of a run, taken before a load. ``kept``: the run keeps them."""

    def __init__(self, live: LiveState, *, kept: bool) -> None:
        self.kept = kept
        objects = live.extra.objects
        own: dict[str, Any] = {name: obj for name, obj in objects.items() if isinstance(obj, Optimizer)}
        if live.row_optimizers is not None:
            own[SPARSE_OPTIM] = live.row_optimizers
        self._groups = {name: (one, [dict(group) for group in groups_of(one)]) for name, one in own.items()}
        self._schedules: dict[str, list[tuple[LRScheduler, dict[str, Any]]]] = {}  # with the rates of this run
        for name, obj in objects.items():
            for one in schedulers_in(obj):  # the object itself first, then schedulers inside it
                rates = {key: value for key in _RATES if (value := getattr(one, key, None))}
                self._schedules.setdefault(name, []).append((one, rates))

    def after_load(self, label: str, loaded: Collection[str], akin: Mapping[str, str], *, with_log: bool) -> None:
        """Restore the run's own hyper-parameters if they are kept, and log which ones the load has replaced.

        ``loaded``: registered objects that were loaded, optimizers only if their settings were. ``akin``: optimizer
        that took settings of a similar class but keeps its weight decay -> the reason.
        """
        for name, reason in akin.items() if not self.kept else ():
            if with_log and (differences := list(self._differences([name], DECAY))):
                log.warning("%s: %s: %s", label, reason, ", ".join(map(_KEPT, differences)))
            optimizer, groups = self._groups[name]
            for before, now in zip(groups, groups_of(optimizer), strict=True):
                now.update({key: before[key] for key in DECAY if key in before})
        differences = list(self._differences(self._groups))
        if with_log and differences:
            what = "this run keeps its hyper-parameters" if self.kept else "replaced hyper-parameters of this run"
            log.info("%s: %s: %s", label, what, ", ".join(map(_KEPT if self.kept else _REPLACED, differences)))
        for optimizer, groups in self._groups.values() if self.kept else ():
            if isinstance(optimizer, RowOptimizers):
                optimizer.set_settings(groups)
                continue
            for before, now in zip(groups, groups_of(optimizer), strict=True):
                new = now.keys() - before.keys() - _NO_SETTINGS
                counted = now.keys() & {"params", *counted_in_groups(optimizer), *new}
                own = {**before, **{key: now[key] for key in counted}}
                now.clear()
                now.update(own)
            if isinstance(optimizer, SparseOptimizer):
                optimizer.declare_slots()
        for name, schedules in self._schedules.items():
            if name in loaded and (self.kept or self._is_alone(schedules[0][0], loaded)):
                _keep_rates(schedules)

    def _differences(self, names: Iterable[str], keys: Collection[str] = ()) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value of this run, loaded value) for these optimizers; only for ``keys`` if given."""
        for name, (optimizer, groups) in ((name, self._groups[name]) for name in names):
            no_settings = _NO_SETTINGS | counted_in_groups(optimizer)
            for number, (before, now) in enumerate(zip(groups, groups_of(optimizer), strict=True)):
                which = name
                if len(groups) > 1:
                    tables = before.get("tables")
                    tables = tables or [one.table.name for one in before["params"] if isinstance(one, TableParameter)]
                    which = f"{name} of {first_few(tables)}" if tables else f"{name}[{number}]"
                for key in (key for key in keys or before if key in before and key in now and key not in no_settings):
                    own, loaded = _comparable(before[key]), _comparable(now[key])
                    if own != loaded:
                        yield f"{which} {key}", own, loaded

    def _is_alone(self, scheduler: LRScheduler, loaded: Collection[str]) -> bool:
        own = scheduler.optimizer.param_groups
        of_it = {name for name, (one, _) in self._groups.items() if any(a is b for a in groups_of(one) for b in own)}
        is_other = [plain(group["lr"]) for group in own] != scheduler.get_last_lr()
        return of_it.isdisjoint(loaded) and (bool(of_it) or is_other)  # without a known optimizer, compare rates


def _keep_rates(schedules: Sequence[tuple[LRScheduler, dict[str, Any]]]) -> None:
    """Continue at the loaded position in the schedule, with the rates of this run.

    The schedule has scaled its base rates, to a tenth for example; the same factor is applied to the base rates of this
    run.
    """
    outer = schedules[0][0]
    with_bases = [(one, rates["base_lrs"]) for one, rates in schedules if "base_lrs" in rates]
    factors: list[float] = []
    for based, _ in with_bases[:1]:
        rates_now = zip(outer.get_last_lr(), based.base_lrs, strict=False)
        factors = [float(now) / float(base) if float(base) else 1.0 for now, base in rates_now]
    for scheduler, rates in schedules:
        vars(scheduler).update(rates)
    if factors:
        factors += factors[-1:] * len(outer.optimizer.param_groups)  # factors of new groups
        for group, base, factor in zip(outer.optimizer.param_groups, with_bases[0][1], factors, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(base) * factor)
            else:
                group["lr"] = float(base) * factor
    outer._last_lr = [plain(group["lr"]) for group in outer.optimizer.param_groups]
    for scheduler, _ in schedules:
        if getattr(scheduler, "cycle_momentum", False) and scheduler.last_epoch >= 0:
            with warnings.catch_warnings():  # get_lr() warns outside of step()
                warnings.simplefilter("ignore")
                scheduler.get_lr()  # also sets the momentum or betas for its position


def _comparable(value: Any) -> Any:
    """Return a setting in a form to compare and print: numbers for tensors, tuples for lists."""
    value = plain(value) if not isinstance(value, Tensor) or value.numel() == 1 else value.tolist()
    return tuple(value) if isinstance(value, list) else value
