"""A policy of what to keep, as it is written in the shell: ``3``, ``all``, ``every=1000``, joined by commas."""

from __future__ import annotations

from collections.abc import Callable

from recckpt.policies.keep import All, Best, EveryNth, Keep, KeepBytes, KeptByAny, Newest, OnePer, YoungerThan

_DAY_SEC = 86_400.0
_POLICIES: dict[str, Callable[[str], Keep]] = {
    "every": lambda text: EveryNth(int(text)),
    "best": lambda text: Best(1, text),
    "least": lambda text: Best(1, text, "min"),
    "days": lambda text: YoungerThan(float(text) * _DAY_SEC),
    "one-per-days": lambda text: OnePer(float(text) * _DAY_SEC),
    "bytes": KeepBytes,
}


def keep_policy(text: str) -> Keep:
    """Return the policy; ValueError where it is not one."""
    return KeptByAny(*map(_part, text.split(",")))


def _part(text: str) -> Keep:
    if text == "all":
        return All()
    name, _, value = text.partition("=")
    try:
        return _POLICIES[name](value) if value and name in _POLICIES else Newest(int(text))
    except ValueError as error:
        policies = ", ".join(f"{each}=..." for each in _POLICIES)
        raise ValueError(f"--keep: found {text!r}, expected a number of the newest, all, {policies}") from error
