"""The slots that hold what optimizers of torch keep of each row of an embedding (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES: Mapping[str, str] = {  # class -> what the names of its slots begin with
    "SparseAdam": "sparse_adam",
    "Adam": "sparse_adam",
    "AdamW": "sparse_adamw",
    "Adagrad": "sparse_adagrad",
    "SGD": "sparse_sgd",
}
_SHORT = {"momentum_buffer": "momentum"}
_KEYS = {short: key for key, short in _SHORT.items()}


def slot_of(prefix: str, key: str) -> str:
    """Return the slot of a state that an optimizer calls ``key``."""
    return f"{prefix}_{_SHORT.get(key, key)}"


def key_of(kind: str, slot: str) -> str | None:
    """Return what an optimizer of a class calls the state in a slot; None where the slot is not one of its class."""
    prefix = f"{PREFIXES[kind]}_" if kind in PREFIXES else None
    if prefix is None or not slot.startswith(prefix):
        return None
    short = slot.removeprefix(prefix)
    return _KEYS.get(short, short)
