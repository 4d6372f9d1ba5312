import json
from typing import Any, NamedTuple

import pytest

from recckpt.cli import main


class Answer(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture
def recckpt(capsys):
    """Run a command in this process."""

    def run(*args: object) -> Answer:
        capsys.readouterr()
        return Answer(main([str(arg) for arg in args]), *capsys.readouterr())

    return run
