"""How the failure of one rank looks to it and to the others."""

from __future__ import annotations

from recckpt.errors import SaveFailedError


class RankFailedError(Exception):
    """A rank failed, or did not come, at a barrier.

    Attributes:
        rank: the first that is known of.
        reason: what it said.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason


class PartlyCommittedError(SaveFailedError):
    """A rank failed after all had agreed to put their files in place: in doing so, or in its ``post_commit``."""

    def __init__(self, ckpt_id: str, rank: int, cause: str) -> None:
        super().__init__(ckpt_id, rank, cause)
        self.args = (
            f"saving {ckpt_id!r}: rank {rank} failed while or after putting its file in place: {cause}; "
            "files of other ranks may be new already: mend the cause and save again",
        )


def describe(error: BaseException) -> str:
    """Return an error as one text, for other ranks and for messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
