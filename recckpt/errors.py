"""The errors that recckpt raises. All of them can be pickled, because ranks send errors to each other.

A message says what, where, found against expected, and what to do. An ``OSError`` of the storage passes
through unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar


class RecckptError(Exception):
    """Root of all errors of recckpt."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the attributes, whatever arguments the constructor takes."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[RecckptError], args: tuple[Any, ...], state: dict[str, Any]) -> RecckptError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class CheckpointNotFoundError(RecckptError, FileNotFoundError):
    """A committed checkpoint was requested, and there is none."""


class CheckpointExistsError(RecckptError, FileExistsError):
    """A committed checkpoint of this id exists already."""


class CheckpointInUseError(RecckptError):
    """A checkpoint cannot be deleted: it is pinned, the only one, or a base of others. The message says what to do."""


class CorruptCheckpointError(RecckptError):
    """A file of a checkpoint is damaged: its contents differ from what the checkpoint recorded.

    Attributes:
        path: the file, as named under the output dir.
        where: the place in it, such as a field or a column of a batch, or "".
        found: what is there.
        expected: what should be there.
        remedy: what to do.
    """

    REMEDY: ClassVar = "restore an older checkpoint, or run `recckpt verify` to see all that is damaged"

    def __init__(self, path: str, where: str, *, found: object, expected: object, remedy: str = "") -> None:
        self.remedy = remedy or self.REMEDY
        place = f" at {where}" if where else ""
        super().__init__(f"{path}{place}: found {found}, expected {expected}; {self.remedy}")
        self.path, self.where, self.found, self.expected = path, where, str(found), str(expected)


class ConversionError(RecckptError, ValueError):
    """A source cannot be read or imported, or a checkpoint cannot be exported as requested. Nothing was written.

    Attributes:
        path: the file, directory or table.
        where: the place in it, or "".
        found: what is there.
        expected: what could be converted.
    """

    def __init__(self, path: str, where: str, *, found: object, expected: object, remedy: str = "") -> None:
        place = f" at {where}" if where else ""
        super().__init__(f"{path}{place}: found {found}, expected {expected}{'; ' if remedy else ''}{remedy}")
        self.path, self.where, self.found, self.expected = path, where, str(found), str(expected)


class CheckpointRemovedError(RecckptError):
    """The writer of a checkpoint removed it, as rotation does, while it was being read.

    Attributes:
        path: the checkpoint.
        emptied: tables that had rows and are empty now; loading again fills them.
    """

    REMEDY: ClassVar = "read the newest one, pin this one (manager.pin(step)), or raise max_keep"

    def __init__(self, path: str, *, emptied: Sequence[str] = (), remedy: str = "") -> None:
        state = f"tables {', '.join(map(repr, emptied))} are empty now; " if emptied else ""
        super().__init__(
            f"{path}: its writer removed this checkpoint while it was being read; {state}{remedy or self.REMEDY}"
        )
        self.path, self.emptied = path, tuple(emptied)


class PartlyLoadedError(RecckptError):
    """A load failed after it had begun to change tables that had rows; the cause is chained.

    Attributes:
        emptied: tables that have no rows now.
        mixed: tables in which only some rows were replaced by the checkpoint's rows.
    """

    def __init__(self, cause: str, *, emptied: Sequence[str] = (), mixed: Sequence[str] = ()) -> None:
        parts = [f"tables {', '.join(map(repr, emptied))} are empty now"] if emptied else []
        parts += [f"tables {', '.join(map(repr, mixed))} hold only some of the checkpoint's rows"] if mixed else []
        super().__init__(
            f"loading broke off: {cause}; {' and '.join(parts)}, everything else on this rank is unchanged: load or "
            "restore again before you use these tables"
        )
        self.emptied, self.mixed = tuple(emptied), tuple(mixed)


class FormatVersionError(RecckptError):
    """A file has a newer format than this version of recckpt reads, or a format from before the first release.

    Attributes:
        path: the file.
        found: its format version.
        supported: the newest version that this recckpt reads.
        state: ``"newer"`` or ``"older"``.
        needed: the version that reads the file, such as ``"recckpt 1.3"``, if known.
    """

    def __init__(self, path: str, *, found: object, supported: int, missing: str = "", reader: str = "") -> None:
        self.path, self.found, self.supported, self.state = path, found, supported, "older" if missing else "newer"
        self.needed = f"recckpt {reader}" if reader else "a newer recckpt"
        version = import_module(__name__.partition(".")[0]).__version__
        reads = f"this recckpt, {version}, reads versions up to {supported}"
        self.what = f"found format version {found}, {reads}: it needs {self.needed}"
        if missing:
            self.what = f"is of an older, unreleased form: it is intact, but has no {missing!r}; begin a new run"
        super().__init__(f"{path}: {self.what}")


class StateMismatchError(RecckptError, ValueError):
    """The state in a checkpoint does not fit the live one; lists all differences.

    Attributes:
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
        mismatched: name -> (found in the checkpoint, expected by the model).
    """

    def __init__(
        self,
        what: str | Sequence[str],
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, tuple[object, object]] | None = None,
        nearest: Mapping[str, str] | None = None,
        remedy: str = "",
    ) -> None:
        mismatched, nearest = dict(mismatched or {}), nearest or {}
        named = [what] if isinstance(what, str) else what
        lines = [f"{' and '.join(named)} {'does' if len(named) == 1 else 'do'} not fit the model:"]
        hints = {name: f" (nearest there: {there!r})" for name, there in nearest.items()}
        lines += [f"  missing in the checkpoint: {name!r}{hints.get(name, '')}" for name in missing]
        lines += [f"  not in the model: {name!r}" for name in unexpected]
        lines += [f"  {name!r}: found {found}, expected {expected}" for name, (found, expected) in mismatched.items()]
        lines += [f"  {remedy}"] if remedy else []
        super().__init__("\n".join(lines))
        self.missing, self.unexpected, self.mismatched = list(missing), list(unexpected), mismatched


class LiveTableError(RecckptError, ValueError):
    """A table of another library cannot be saved or loaded in place; the message gives the reason and a remedy."""


class MissedRowsError(LiveTableError):
    """An audit found changed rows of a live table that no hook had marked. The save fails, so no delta misses them.

    Attributes:
        table: its name.
        n_rows: the number of these rows.
        ids: the ids of the first of these rows.
    """

    def __init__(self, table: str, n_rows: int, ids: Sequence[int]) -> None:
        self.table, self.n_rows, self.ids = table, n_rows, list(ids)
        super().__init__(
            f"table {table!r}: found {n_rows} changed rows that no hook had marked, such as {self.ids}: some code "
            "writes rows without calling a hook. This save fails, the next save contains all rows, and later saves "
            "find changed rows by fingerprints; to use fingerprints from the start, pass marks='fingerprints' to "
            "live_tables"
        )


class LoadConfError(RecckptError, ValueError):
    """A ``load_conf`` or model bank is malformed or refers to names that do not exist; lists all problems.

    Attributes:
        problems: one message per problem.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        head = f"{len(self.problems)} problems; nothing was loaded:\n  " if len(self.problems) > 1 else ""
        super().__init__(head + "\n  ".join(self.problems))


class LookupFailedError(RecckptError):
    """A look-up in sharded tables, or its backward pass, failed on one rank; all ranks raise this.

    Attributes:
        rank: the first rank that failed.
    """

    def __init__(self, what: str, rank: int, cause: str, remedy: str) -> None:
        super().__init__(f"{what} failed on rank {rank}: {cause}; {remedy}")
        self.rank = rank


class WriterFencedError(RecckptError):
    """Another writer owns this output dir; the writer that gets this error writes nothing more there.

    Attributes:
        epoch: the claim of the other writer; 0 if unknown.
        by: its process and host.
        since: when it took over, by its own clock; None if its claim cannot be read.
    """

    def __init__(self, message: str, *, epoch: int = 0, by: str = "", since: str | None = None) -> None:
        super().__init__(message)
        self.epoch, self.by, self.since = epoch, by, since


class ForkedError(RecckptError, RuntimeError):
    """An object was used in a forked child of the process that created it.

    Attributes:
        made_by: id of the process that the object belongs to.
    """

    def __init__(self, what: str, made_by: int) -> None:
        super().__init__(
            f"{what} belongs to process {made_by} and is used in process {os.getpid()}, a fork of it, without the "
            "threads and the claim on the output dir: make a new one in the child, or start the child by "
            "multiprocessing's 'spawn' and make it there; to save in the child too, use a separate output dir"
        )
        self.made_by = made_by


NOTHING_COMMITTED = "nothing was committed and older checkpoints are untouched: mend the cause and save again"


class SaveFailedError(RecckptError):
    """A save failed, and nothing was committed unless the message says so; the cause is chained.

    Attributes:
        ckpt_id: the checkpoint that was being written.
        rank: the first rank that failed or is missing.
        step: the step of the save; None if steps are not counted.
        cause: what went wrong on that rank.
    """

    def __init__(
        self,
        ckpt_id: str,
        rank: int,
        cause: str,
        *,
        step: int | None = None,
        outcome: str = NOTHING_COMMITTED,
    ) -> None:
        super().__init__(f"saving {ckpt_id!r} failed on rank {rank}: {cause}; {outcome}")
        self.ckpt_id, self.rank, self.step, self.cause = ckpt_id, rank, step, cause


class RankLostError(RecckptError):
    """One or more ranks cannot be reached. The remaining ranks can no longer save or load together.

    Attributes:
        ranks: the missing ranks, as far as known.
        rank: the first missing rank.
        cause: how it was noticed.
    """

    def __init__(self, ranks: Sequence[int], cause: str) -> None:
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(
            f"{names} cannot be reached: {cause}; these processes can no longer save or load together: restart the "
            "job; it resumes from the newest checkpoint"
        )
        self.ranks, self.rank, self.cause = tuple(ranks), min(ranks), cause


class CommitNotDurableError(SaveFailedError):
    """The manifest was written, but the storage failed before it was certain to survive a power cut.

    Readers see the checkpoint if its manifest is in place. All older checkpoints are kept, because this one may still
    be lost.

    Attributes:
        is_in_place: whether the manifest was seen after the failure; False if the storage could not tell.
    """

    def __init__(self, ckpt_id: str, rank: int, cause: str, *, is_in_place: bool) -> None:
        super().__init__(ckpt_id, rank, cause)
        self.is_in_place = is_in_place
        self.args = (
            f"{ckpt_id!r} {'is' if is_in_place else 'may be'} in place, but the storage failed before it was surely "
            f"durable (rank {rank}): {cause}; older checkpoints are all kept: mend the cause and save again",
        )


class MissingLibraryError(RecckptError, ImportError):
    """A library that recckpt can do without is not installed."""


def needed(name: str, extra: str) -> Any:
    """Return an optional library or a module of it; MissingLibraryError names the extra that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        what = f"this needs {name.partition('.')[0]}, which is not installed"
        raise MissingLibraryError(f"{what}: pip install 'recckpt[{extra}]'") from error
