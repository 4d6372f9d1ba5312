"""Slots with one value for each range of columns, between tables that were divided otherwise, or not at all."""

from __future__ import annotations

from dataclasses import replace

from recckpt.load.inventory import Thing


def regroups(saved: Thing, live: Thing) -> bool:
    """Say whether a slot has one value a range of columns on one side, and of other ranges, or a row, on the other."""
    if live.columns:
        return saved.columns != live.columns
    return bool(saved.columns) and live.shape == ()


def regrouping(saved: Thing, live: Thing, *, is_allowed: bool) -> tuple[str, Thing]:
    """Return how the values of a slot become those of other ranges, and what they are then.

    Raises:
        ValueError: (found, expected): that is not allowed, or the ranges of the values are not known.
    """
    before, after = _values_of(saved), _values_of(live)
    if not saved.columns and saved.shape:
        raise ValueError(f"{saved}, of ranges of columns that are not known", f"{live}, {after}")
    if not is_allowed:
        raise ValueError(f"{saved}, {before}", f"{live}, {after}; or 'convert': True in load_conf")
    return f"{before} -> {after}", replace(saved, shape=live.shape)


def _values_of(thing: Thing) -> str:
    if not thing.columns:
        return "one value a row"
    return f"one value for each of the columns {', '.join(f'{begin}:{end}' for begin, end in thing.columns)}"
