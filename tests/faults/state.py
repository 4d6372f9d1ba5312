"""What a run is like at a moment, by which its checkpoints are known."""

from typing import NamedTuple


class State(NamedTuple):
    """What a run is like after a step; runs that went back to an earlier step are on another branch."""

    step: int
    branch: int = 0


NOTHING = State(0)  # where nothing restores
