"""The slots that hold the per-row states of torch's optimizers of embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIXES: Mapping[str, str] = {  # class -> prefix of its slot names
    "SparseAdam": "sparse_adam",
    "Adam": "sparse_adam",
    "AdamW": "sparse_adamw",
    "Adagrad": "sparse_adagrad",
    "SGD": "sparse_sgd",
}
_SHORT = {"momentum_buffer": "momentum"}
_AKIN = {"Adam": "AdamW", "AdamW": "Adam"}  # one class inherits from the other, and both have the same moments
AKIN_LINEAGE = {"Adam": ("AdamW", "Adam"), "AdamW": ("Adam",)}  # class -> lineage of its akin class in a manifest
_OPTIONAL = (("Adam", "max_exp_avg_sq"), ("AdamW", "max_exp_avg_sq"), ("SGD", "momentum_buffer"))
_KEYS = {short: key for key, short in _SHORT.items()}


def slot_of(prefix: str, key: str) -> str:
    return f"{prefix}_{_SHORT.get(key, key)}"


OPTIONAL = {slot_of(PREFIXES[kind], key) for kind, key in _OPTIONAL}  # slots that exist with some settings only
DECAY = ("weight_decay", "decoupled_weight_decay")  # settings that mean something else in the akin class


def key_of(kind: str, slot: str) -> str | None:
    """Return the optimizer's own key for a slot of its class or of an akin class; None for other slots."""
    for prefix in (f"{PREFIXES[each]}_" for each in (kind, _AKIN.get(kind, "")) if each in PREFIXES):
        if slot.startswith(prefix):
            short = slot.removeprefix(prefix)
            return _KEYS.get(short, short)
    return None


def akin_slot(slot: str) -> str | None:
    """Return the slot where an akin optimizer keeps the same moment; None if no optimizer is akin."""
    for kind, other in _AKIN.items():
        if slot.startswith(f"{PREFIXES[kind]}_"):
            return PREFIXES[other] + slot.removeprefix(PREFIXES[kind])
    return None


def common_slot(slot: str) -> str:
    """Return the common name of an optimizer slot, if related optimizers name it differently."""
    return min(slot, akin_slot(slot) or slot)


def are_own(kind: str, slots: Iterable[str]) -> bool:
    """Return whether all slots belong to this class and not to an akin class."""
    return all(slot.startswith(f"{PREFIXES[kind]}_") for slot in slots)
