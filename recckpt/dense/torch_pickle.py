"""The opcodes of pickle that torch.save writes, run by a machine too small to do harm.

Not ``pickle.Unpickler`` with a strict ``find_class``: 3 MB of nested tuples used as a key overflow its C
stack, and a dozen bytes that name a high memo slot make it take gigabytes. Here a global is what
``find_global`` makes of its name; nothing is imported, no attribute is set, and keys are scalars.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_PLAIN_ITEMS = 1 << 20  # of plain values, counted at every reference to them; a long text counts as many
_ITEM_CHARS = 64
MAX_PLAIN_DEPTH = 64
MAX_KEY_ITEMS = 1 << 16  # of all tuples that are keys: their hashes are computed, however shared their items are
_LEAVES = (str, bytes, int, float, complex, type(None))
_KEYS = {*_LEAVES, bool}


class RefusedError(Exception):
    """What is wrong in a pickle; who knows the file and the place adds them."""

    def __init__(self, found: str, expected: str, remedy: str = "") -> None:
        super().__init__(found)
        self.found, self.expected, self.remedy = found, expected, remedy


def refuse_type(value: object, expected: str) -> NoReturn:
    """Raise RefusedError with the type of ``value``; its repr may be endless."""
    raise RefusedError(f"a {type(value).__name__}", expected)


@dataclass(frozen=True, slots=True)
class Function:
    """Stands for a function that a pickle may call."""

    call: Callable[..., object]


class Machine:
    """A stack machine as in :mod:`pickle`, for protocol 2.

    Args:
        find_global: returns what stands for ``module.name``, or raises :class:`RefusedError`.
        find_storage: returns what stands for a persistent id, or raises it.

    Attributes:
        position: byte of the opcode that runs.
    """

    def __init__(self, find_global: Callable[[str], object], find_storage: Callable[[Any], object]) -> None:
        self.position = 0
        self.find_global, self.find_storage = find_global, find_storage
        self._key_items_left = MAX_KEY_ITEMS
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Return the object that ``data`` describes.

        Raises:
            RefusedError: it has what no dict of tensors needs.
            ValueError, TypeError, AttributeError, LookupError, OverflowError: it is broken.
        """
        for opcode, arg, position in pickletools.genops(data):
            self.position = position or 0
            step = _STEPS.get(opcode.name)
            if step is None:
                raise RefusedError(f"pickle opcode {opcode.name}", "the opcodes of torch.save, protocol 2")
            step(self, arg)
        if self.position + 1 != len(data):
            raise RefusedError(f"{len(data) - self.position - 1} bytes after the pickle", "none")
        return self.take(1)[0]

    def push(self, value: object) -> None:
        """Put ``value`` on the stack."""
        self._stack.append(value)

    def take(self, n_items: int | None = None) -> list[Any]:
        """Pop the last items, or all since the last mark."""
        begin = self._marks.pop() if n_items is None else len(self._stack) - n_items
        if not 0 <= begin <= len(self._stack):
            raise IndexError("stack underflow")
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def mark(self) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self._stack))

    def memoize(self, slot: int) -> None:
        """Keep the top of the stack for :meth:`recall`."""
        self._memo[slot] = self._stack[-1]

    def recall(self, slot: int) -> None:
        """Push what was kept."""
        self._stack.append(self._memo[slot])

    def extend(self, items: list[Any]) -> None:
        """Append ``items`` to the list on top."""
        self._top(list).extend(items)

    def update(self, items: list[Any]) -> None:
        """Set ``items``, key and value by turns, in the dict on top."""
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._check_key(key)
            target[key] = value

    def drop_attributes(self) -> None:
        """Ignore what BUILD would set: a state dict keeps the ``_metadata`` of its modules so."""
        self.take(1)
        self._top(dict)

    def call(self) -> None:
        """Call a function that :attr:`find_global` gave."""
        function, args = self.take(2)
        if type(function) is not Function or type(args) is not tuple:
            refuse_type(function, "a function and its arguments to call")
        self._stack.append(function.call(*args))

    def _check_key(self, key: object, depth: int = 0) -> None:
        """Refuse all but scalars and small tuples of them: to hash a tuple takes C stack for each level of it."""
        if type(key) is tuple and depth < MAX_PLAIN_DEPTH:
            self._key_items_left -= len(key)
            if self._key_items_left < 0:
                raise RefusedError("keys that are too large", f"tuples of at most {MAX_KEY_ITEMS} items, all together")
            for item in key:
                self._check_key(item, depth + 1)
        elif type(key) not in _KEYS:
            refuse_type(key, "a scalar, or a tuple of them, as a key")

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        return top if type(top) is kind else refuse_type(top, f"a {kind.__name__}")


class PlainCopier:
    """Copies values out of a machine, all on one budget: a few bytes of pickle may refer to themselves.

    Args:
        leaf: type that may stand beside the plain ones; kept as it is.
    """

    def __init__(self, leaf: type) -> None:
        self._leaves = (*_LEAVES, leaf)
        self._left = MAX_PLAIN_ITEMS

    def copy(self, value: Any, depth: int = 0) -> Any:
        """Return ``value`` without shared parts, or raise :class:`RefusedError`."""
        self._left -= 1 + (len(value) // _ITEM_CHARS if isinstance(value, (str, bytes)) else 0)
        if self._left < 0 or depth > MAX_PLAIN_DEPTH:
            limits = f"at most {MAX_PLAIN_ITEMS} items, {MAX_PLAIN_DEPTH} deep"
            raise RefusedError("values that are too large, too deep or endless", limits)
        if isinstance(value, dict):
            return {self.copy(key): self.copy(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.copy(item, depth + 1) for item in value])
        return value if isinstance(value, self._leaves) else refuse_type(value, "a tensor or a plain value")


_STEPS: Mapping[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda m, _: None,
    "STOP": lambda m, _: None,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"), Machine.push),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "MARK": lambda m, _: m.mark(),
    "BINPUT": Machine.memoize,
    "LONG_BINPUT": Machine.memoize,
    "BINGET": Machine.recall,
    "LONG_BINGET": Machine.recall,
    "TUPLE": lambda m, _: m.push(tuple(m.take())),
    "TUPLE1": lambda m, _: m.push(tuple(m.take(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.take(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.take(3))),
    "APPEND": lambda m, _: m.extend(m.take(1)),
    "APPENDS": lambda m, _: m.extend(m.take()),
    "SETITEM": lambda m, _: m.update(m.take(2)),
    "SETITEMS": lambda m, _: m.update(m.take()),
    "GLOBAL": lambda m, names: m.push(m.find_global(names.replace(" ", "."))),
    "BINPERSID": lambda m, _: m.push(m.find_storage(m.take(1)[0])),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.drop_attributes(),
}
