"""Which tests of a contract a table breaks: they are called as pytest calls them, and what fails is no failure here."""

import inspect
from pathlib import Path

import pytest


def broken(suite: type, root: Path, only: str | None = None) -> list[str]:
    """Return the names of the tests of a suite that fail, in order; of one of them, or of all."""
    names = sorted(name for name in dir(suite) if name.startswith("test_"))
    failed = []
    for name in [only] if only else names:
        test, room = getattr(suite(), name), root / name
        room.mkdir()
        values = {"tmp_path": room}
        try:
            test(**{parameter: values[parameter] for parameter in inspect.signature(test).parameters})
        except pytest.skip.Exception:
            continue
        except Exception:
            failed.append(name)
    return failed
