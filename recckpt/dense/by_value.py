"""Plain data whose pickle follows from its values alone: not from which of them are one object, nor from hashes."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

MAPPINGS = (dict, OrderedDict, Counter)  # of whose values a state may be made, the safe loader of torch knows them
_WITHOUT_IDENTITY = frozenset({type(None), bool, int, float})  # which pickle writes anew each time


class ByValue:
    """Makes states for one file; pickle writes a value again, or refers to where it has written that object."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, Any], Any] = {}

    def of(self, value: Any) -> Any:
        """Return a state, as :func:`recckpt.dense.state_copy.portable` returns it, with equal leaves as one object.

        Containers and tensors, which have an identity of their own, come once for each place that they are in.
        """
        kind = type(value)
        if kind in MAPPINGS:
            return kind({self.of(key): self.of(item) for key, item in value.items()})
        if kind in (list, tuple):
            is_plain = _WITHOUT_IDENTITY.issuperset(map(type, value))
            return kind([*value] if is_plain else [self.of(item) for item in value])
        return _InOrder(self.of(item) for item in value) if kind is set else self._leaf(kind, value)

    def _leaf(self, kind: type, value: Any) -> Any:
        if kind is str:
            return sys.intern(value)  # also equal to what pickle itself writes, such as "cpu"
        if kind in (bytes, torch.Size, torch.device):
            return self._known.setdefault((kind, value), value)
        if kind is complex:
            return self._known.setdefault((kind, repr(value)), value)  # 0j and -0j are equal
        return value


class _InOrder(list[Any]):
    """The members of a set, which pickles as that set, in an order that does not follow from their hashes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, (sorted(self, key=lambda item: (type(item).__name__, repr(item))),)
