"""The states of the fencing model: an output dir and its writers."""

from __future__ import annotations

from typing import Any, NamedTuple

from faults.all_states import Lost

NO_STEP = 0  # in place of one, of an id that has none


class Attempt(NamedTuple):
    """One try at a checkpoint: ``n`` tells those of one writer apart."""

    epoch: int
    n: int
    step: int


class Manifest(NamedTuple):
    """What makes an attempt count."""

    attempt: Attempt
    seq: int


class Dir(NamedTuple):
    """What lies in a directory, each by the attempt that put it there."""

    intent: Attempt | None = None
    data: Attempt | None = None
    manifest: Manifest | None = None


class Name(NamedTuple):
    """``<step>``, ``<step>.<epoch>`` or ``<step>.<epoch>.<n>``."""

    step: int
    epoch: int = 0
    n: int = 0


class Takeover(NamedTuple):
    """The list that a writer publishes."""

    epoch: int = 0
    committed: frozenset[Attempt] = frozenset()
    highest_step: int = -1


class Writer(NamedTuple):
    """A process: where it is, and what it remembers."""

    saves: int  # that it may still begin
    at: str = "claim"
    found: frozenset[Attempt] = frozenset()  # by its listing at the takeover
    highest_step: int = -1
    step: int = 0
    seq: int = 0
    name: Name | None = None
    todo: tuple[Name, ...] = ()  # directories that it is about to remove
    then: str = ""  # where it goes on when they are removed
    looked: Dir | None = None  # what it saw in the first of them


class State(NamedTuple):
    """The output dir, its writers, and the newest checkpoint that was acknowledged as (epoch, seq)."""

    claims: int
    takeover: Takeover
    dirs: tuple[tuple[Name, Dir], ...]
    writers: tuple[Writer, ...]
    acknowledged: tuple[int, int] = (0, 0)
    failures: int = 0  # that may still come
    before: int = 0  # the number above which writers claim


class Turn:
    """A state in which it is one writer's turn."""

    def __init__(self, state: State, number: int) -> None:
        self.state, self.number, self.epoch = state, number, state.before + number + 1
        self.writer, self.dirs = state.writers[number], dict(state.dirs)

    @property
    def owns(self) -> bool:
        """Whether a fence check passes."""
        return self.state.claims <= self.epoch

    @property
    def attempt(self) -> Attempt:
        """What the writer is trying."""
        return Attempt(self.epoch, self.writer.saves, self.writer.step)

    @property
    def held(self) -> Dir | None:
        """What is in the directory that the writer writes."""
        assert self.writer.name is not None
        return self.dirs.get(self.writer.name)

    def go(self, at: str, **changes: Any) -> State:
        """Return the state after a step; changes are of the writer, or of the state where it has the field."""
        dirs = changes.pop("dirs", None)
        of_state = {name: changes.pop(name) for name in State._fields if name in changes}
        if dirs is not None:
            of_state["dirs"] = tuple(sorted((name, held) for name, held in dirs.items() if held is not None))
        if at == "idle" and not self.writer.saves:
            at = "stopped"
        if at == "idle":  # what it need not remember must not make states differ
            changes = {"seq": 0, "name": None, "todo": (), "then": "", "looked": None, **changes}
        elif at == "stopped":
            changes = Writer(0)._asdict()
        writer = self.writer._replace(**{**changes, "at": at})
        writers = (*self.state.writers[: self.number], writer, *self.state.writers[self.number + 1 :])
        return self.state._replace(writers=writers, **of_state)

    def checked(self, at: str, **changes: Any) -> State:
        """Return the state after a fence check."""
        return self.go(at, **changes) if self.owns else self.go("stopped")

    def put(self, at: str, **files: Any) -> State:
        """Return the state in which files are in the directory that the writer writes."""
        held = self.held or Dir()
        if held.intent is not None and held.intent.epoch > self.epoch:
            raise Lost(f"{self.attempt} writes {set(files)} into {self.writer.name}, which is that of {held.intent}")
        return self.go(at, dirs={**self.dirs, self.writer.name: held._replace(**files)})

    def remove(self, at: str, file: str) -> State:
        """Return the state without a file of the directory that the writer removes."""
        name = self.writer.todo[0]
        held = self.dirs.get(name, Dir())
        found = getattr(held, file)
        owner = found.attempt if isinstance(found, Manifest) else found
        if owner is not None and owner.epoch > self.epoch:
            raise Lost(f"writer {self.epoch} removes {file} of {name}, which is that of {owner}")
        left = held._replace(**{file: None})
        return self.go(at, dirs={**self.dirs, name: None if left == Dir() else left})
