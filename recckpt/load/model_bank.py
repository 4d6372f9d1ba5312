"""The model bank on paper: what a load from it would do, and which of its entries are looked at again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.load.conf import Entry
from recckpt.load.matching import Inventory, Planned
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan
from recckpt.load.resolve import resolve
from recckpt.load.source import Source, locate_source


def plan_load(
    model: Inventory,
    sources: Sequence[Source],
    problems: Problems | None = None,
    check: Callable[[Sequence[Planned], Problems], None] = lambda items, problems: None,
) -> LoadPlan:
    """Decide what is loaded from where; reads no rows and changes nothing.

    Args:
        model: names of the model.
        sources: checkpoints in the order of the bank; of those that have a name, the last one counts.
        problems: what the caller has found wrong already.
        check: adds what only the live objects can tell.

    Raises:
        LoadConfError: names or keys that do not exist; all of them, and all that does not fit beside them.
        StateMismatchError: where there is nothing but state that does not fit.
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: a checkpoint cannot be read.
    """
    problems = copy.deepcopy(problems or Problems())
    items = resolve(model, [source.offer(model) for source in sources], problems)
    check(items, problems)
    _excuse(sources, items, problems)
    misfits = [source for source in sources if source.entry.label in problems.misfits] or sources
    problems.raise_if_any(" and ".join(source.called for source in misfits) or "the bank")
    return LoadPlan(tuple(items), tuple(source.label for source in sources), tuple(problems.warnings))


def _excuse(sources: Sequence[Source], items: Sequence[Planned], problems: Problems) -> None:
    """A run that resumes may do without a bank that is gone, where its own checkpoint has all that was asked of it."""
    own = {number for number, source in enumerate(sources) if source.entry.is_own}
    for entry, error in list(problems.not_found):
        asked = (item for item in items if entry.wants(item.name) and not item.name.parameter)
        if own and all(item.offer in own for item in asked):
            problems.not_found.remove((entry, error))
            problems.warn(entry, f"{error}; it is not needed, since the run resumes")


@dataclass(frozen=True)
class Followed:
    """A dynamic entry of a bank: the names that it gives, and the checkpoint that they were taken from."""

    entry: Entry
    taken: Source

    def newer(self) -> Source | None:
        """Return the checkpoint that is there now, None where it is no newer than the one taken."""
        try:
            found = locate_source(self.entry)
        except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, OSError):
            return None  # a run that is being written or rotated; it is looked at again
        taken, there = self.taken.checkpoint.manifest, found.checkpoint.manifest
        return found if there.save_id != taken.save_id and there.order > taken.order else None


def followed(model: Inventory, sources: Sequence[Source]) -> list[Followed]:
    """Return the dynamic entries of a bank with the names that they win against the other entries."""
    if not any(source.entry.is_dynamic for source in sources):
        return []
    items = resolve(model, [source.offer(model) for source in sources], Problems())
    return [
        Followed(replace(source.entry, only=frozenset(i.name for i in items if i.offer == number)), source)
        for number, source in enumerate(sources)
        if source.entry.is_dynamic
    ]
