"""Another user than root, whose rights are checked, and a directory that this one can enter."""

import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def directory_for_all():
    """Make a directory that another user can enter, which tests of root cannot do in theirs."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place, "runs")


@contextmanager
def another_user():
    """Be a user whose rights are checked."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
