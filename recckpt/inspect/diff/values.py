"""Training state by its values, and what lies in ``.pt`` files by name and checksum: no pickle is read (no torch)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest, StateValue
from recckpt.inspect.diff.result import Status, ValueDiff

# File, or what a file of one rank holds -> group of the values in it.
_GROUPS = {layout.EXTRA: "extra", layout.MODEL: "plain value"}
_GROUPS_OF_RANK = {"extra": "extra of ranks", "io_state": "position", "rng": "random state"}


Generators = Mapping[str, object]  # name of a random generator -> checksum of its states


def compare_values(
    before: Manifest,
    after: Manifest,
    plain: tuple[Collection[str], Collection[str]],
    generators: tuple[Generators, Generators],
) -> Iterator[ValueDiff]:
    """Yield what became of training state and of all that lies in ``.pt`` files; ``plain`` names plain values there.

    Random generators are compared one by one where both sides know theirs.
    """
    state, other_state = {"step": before.step, **before.state}, {"step": after.step, **after.state}
    for name in {**state, **other_state}:
        one, other = state.get(name), other_state.get(name)
        status = _presence(name, state, other_state) or ("same" if _is_same(one, other) else "changed")
        yield ValueDiff("training state", name, status, one, other)
    names, other_names = (_names(side, values) for side, values in zip((before, after), plain, strict=True))
    if all(generators):
        for name in generators[0]:
            is_same = generators[0][name] == generators[1].get(name)
            yield ValueDiff("random state", name, "same" if is_same else "changed")
        del names["random state"]
    for group in names:
        is_same = _checksums(before, group) == _checksums(after, group)
        yield from _in_files(group, names[group], other_names[group], is_same=is_same)


def files_of_values(side: Manifest, plain: Collection[str]) -> list[FileEntry]:
    """Return the ``.pt`` files by whose checksums values are compared; ``plain`` names plain values there."""
    groups = {group for group, names in _names(side, plain).items() if names}
    return [file for file in side.files if _group_of(file.name) in groups]


def _names(side: Manifest, plain: Collection[str]) -> dict[str, Collection[str]]:
    """Return group -> names of what lies in its files."""
    names = side.names
    return {
        "extra": [name for name in names.extra if name not in names.extra_of_ranks],
        "extra of ranks": names.extra_of_ranks,
        "position": names.io_state,
        "plain value": plain,
        "random state": ["all generators"] if _checksums(side, "random state") else [],
    }


def _in_files(
    group: str, names: Collection[str], other_names: Collection[str], *, is_same: bool
) -> Iterator[ValueDiff]:
    """Yield the names of a group; where files differ that hold several, no checksum says which have changed."""
    every = list(dict.fromkeys([*names, *other_names]))
    for name in every:
        changed: Status = "changed" if len(every) == 1 and group != "plain value" else "unclear"
        yield ValueDiff(group, name, _presence(name, names, other_names) or ("same" if is_same else changed))


def _presence(name: str, before: Collection[str], after: Collection[str]) -> Status | None:
    if name in before and name in after:
        return None
    return "gone" if name in before else "added"


def _checksums(side: Manifest, group: str) -> dict[str, int | None]:
    return {file.name: file.xxh3 for file in side.files if _group_of(file.name) == group}


def _group_of(name: str) -> str | None:
    """Return the group that lies in a file, None for a file with none of them."""
    return _GROUPS.get(name) or _GROUPS_OF_RANK.get(layout.content_of_rank(name) or "")


def _is_same(one: StateValue, other: StateValue) -> bool:
    is_nan = all(isinstance(side, float) and math.isnan(side) for side in (one, other))
    return is_nan or (type(one) is type(other) and one == other)
