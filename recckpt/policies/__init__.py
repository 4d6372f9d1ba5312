"""Pure decisions: when to save, which rows and slots, what to keep, what to do on a signal and after an error."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.policies.admit import AdmitIf, Bloom, MinCount, Probability
    from recckpt.policies.evict import Capacity, LowCount, SmallNorm, Unseen, UnseenFor
    from recckpt.policies.keep import All, Best, EveryNth, KeepBytes, Newest, OnePer, YoungerThan
    from recckpt.policies.options import Choose, OnSignal, Tolerate, Transfers
    from recckpt.policies.when import (
        AtSteps,
        EveryEpochs,
        EveryEventTime,
        EverySeconds,
        EverySteps,
        EveryWindows,
        Moment,
        WhenTrue,
    )

_NAMES = {  # module -> its public names
    "options": ("Choose", "Transfers", "OnSignal", "Tolerate"),
    "keep": ("Newest", "EveryNth", "Best", "OnePer", "YoungerThan", "KeepBytes", "All"),
    "when": (
        *("EverySteps", "AtSteps", "EveryWindows", "EveryEpochs"),
        *("EverySeconds", "EveryEventTime", "WhenTrue", "Moment"),
    ),
    "evict": ("Unseen", "UnseenFor", "LowCount", "SmallNorm", "Capacity"),
    "admit": ("MinCount", "Bloom", "Probability", "AdmitIf"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "Choose",
    "Transfers",
    "OnSignal",
    "Tolerate",
    "Newest",
    "EveryNth",
    "Best",
    "OnePer",
    "YoungerThan",
    "KeepBytes",
    "All",
    "EverySteps",
    "AtSteps",
    "EveryWindows",
    "EveryEpochs",
    "EverySeconds",
    "EveryEventTime",
    "WhenTrue",
    "Moment",
    "Unseen",
    "UnseenFor",
    "LowCount",
    "SmallNorm",
    "Capacity",
    "MinCount",
    "Bloom",
    "Probability",
    "AdmitIf",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
