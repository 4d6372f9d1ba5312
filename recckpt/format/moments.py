"""Moments as manifests and timelines write them."""

from __future__ import annotations

from datetime import datetime, timezone


def time_now() -> str:
    """Return the time of now as files have it: UTC, in seconds."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def time_of(text: object) -> datetime | None:
    """Return a moment with its zone, UTC where it names none; None for text that is not a moment."""
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))  # Python 3.10 does not know Z
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
