"""The errors that recckpt raises; every one pickles, so that it can cross ranks.

A message says what, where, found against expected, and what to do. An ``OSError`` of the storage passes
through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RecckptError(Exception):
    """Root of all errors of recckpt."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the attributes, whatever the constructor asks for."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[RecckptError], args: tuple[Any, ...], state: dict[str, Any]) -> RecckptError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class CheckpointNotFoundError(RecckptError, FileNotFoundError):
    """There is no committed checkpoint where one was asked for."""


class CheckpointExistsError(RecckptError, FileExistsError):
    """A committed checkpoint of this id exists already."""


class CorruptCheckpointError(RecckptError):
    """A file of a checkpoint is not what its checkpoint says it is.

    Attributes:
        path: the file, as named under the output dir.
        where: the place in it (a field, a column of a batch), or "".
        found: what is there.
        expected: what should be there.
    """

    def __init__(self, path: str, where: str, *, found: object, expected: object, remedy: str = "") -> None:
        remedy = remedy or "restore an older checkpoint, or run `recckpt verify` to see all that is damaged"
        place = f" at {where}" if where else ""
        super().__init__(f"{path}{place}: found {found}, expected {expected}; {remedy}")
        self.path, self.where, self.found, self.expected = path, where, str(found), str(expected)


class FormatVersionError(RecckptError):
    """A checkpoint was written by a newer format than this version of recckpt reads."""

    def __init__(self, path: str, *, found: object, supported: int) -> None:
        super().__init__(
            f"{path}: found format version {found}, this recckpt reads versions up to {supported}; "
            "upgrade recckpt to read it"
        )
        self.found, self.supported = found, supported


class StateMismatchError(RecckptError, ValueError):
    """The state in a checkpoint does not fit the live one; names all that differs at once.

    Attributes:
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
        mismatched: name -> (found in the checkpoint, expected by the model).
    """

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, tuple[object, object]] | None = None,
        remedy: str = "",
    ) -> None:
        mismatched = dict(mismatched or {})
        lines = [f"{what} does not fit the model:"]
        lines += [f"  missing in the checkpoint: {name!r}" for name in missing]
        lines += [f"  not in the model: {name!r}" for name in unexpected]
        lines += [f"  {name!r}: found {found}, expected {expected}" for name, (found, expected) in mismatched.items()]
        lines += [f"  {remedy}"] if remedy else []
        super().__init__("\n".join(lines))
        self.missing, self.unexpected, self.mismatched = list(missing), list(unexpected), mismatched


class LoadConfError(RecckptError, ValueError):
    """A ``load_conf`` or model bank asks for what does not exist, or is no such thing; says all that is wrong.

    Attributes:
        problems: one text each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        head = f"{len(self.problems)} problems; nothing was loaded:\n  " if len(self.problems) > 1 else ""
        super().__init__(head + "\n  ".join(self.problems))


class WriterFencedError(RecckptError):
    """Another writer owns this output dir."""


class SaveFailedError(RecckptError):
    """A save failed and nothing was committed; the cause is chained.

    Attributes:
        ckpt_id: the checkpoint that was being written.
        rank: the first shard that failed.
    """

    def __init__(self, ckpt_id: str, rank: int, cause: str) -> None:
        super().__init__(
            f"saving {ckpt_id!r} failed on rank {rank}: {cause}; nothing was committed and older checkpoints "
            "are untouched: mend the cause and save again"
        )
        self.ckpt_id, self.rank = ckpt_id, rank
