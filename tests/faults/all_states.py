"""Goes through all states of a model, those of the fewest steps first, so that what is lost is lost in the fewest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


class Lost(AssertionError):  # noqa: N818
    """Something is lost or written where it must not be; says by which steps it came about."""


def all_states(
    start: State,
    steps: Callable[[State], Iterable[tuple[str, Iterable[State]]]],
    check: Callable[[State], None],
) -> int:
    """Return how many states can be reached.

    Args:
        start: the first state.
        steps: of a state: what may be done in it, by name, and the states that this may lead to.
        check: raises Lost of a state that must not be.

    Raises:
        Lost: by ``check``, or by ``steps``; its message has the steps that led there, one a line.
    """
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    states = [start]
    for state in states:  # which grow
        for step, afterwards in steps(state):
            try:
                for after in afterwards:
                    if after not in came_from:
                        came_from[after] = state, step
                        check(after)
                        states.append(after)
            except Lost as lost:
                raise Lost("\n".join([*_steps_to(came_from, state), step, str(lost)])) from None
    return len(states)


def _steps_to(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    steps = []
    while (before := came_from[state]) is not None:
        state, step = before
        steps.append(step)
    return steps[::-1]
