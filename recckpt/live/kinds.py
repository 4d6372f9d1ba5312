"""What libraries that are never imported here have made, known by the names of its classes."""

from __future__ import annotations


def is_a(obj: object, module: str, *names: str) -> bool:
    """Say whether an object is of one of these classes of a module, or of a subclass of one."""
    return any(cls.__module__ == module and cls.__name__ in names for cls in type(obj).__mro__)
