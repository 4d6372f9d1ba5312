"""What only the links of a chain together can show: the rows after each, and that all that one stands on is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.tables import TableEntry
from recckpt.inspect.verify_checkpoint import Checkup, newer, unreadable
from recckpt.output_dir.at_path import read_checkpoint
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.chain_counts import Counted, Node, count_rows
from recckpt.storage import Storage

_COUNT_BYTES = 64 << 20


@dataclass(frozen=True)
class Standing:
    """What deltas stand on, by the manifests."""

    links: Mapping[str, Sequence[str]] = field(default_factory=dict)  # directory -> those of its links, itself first
    broken: Mapping[str, CorruptCheckpointError] = field(default_factory=dict)  # directory -> why it has no chain


def standing_of_all(storage: Storage) -> Standing:
    """Return what the deltas of an output dir stand on."""
    listing = look_around(storage)
    errors = {**listing.damaged, **listing.unreadable}
    broken = {name: _as_damage(name, error) for name, error in errors.items()}
    return Standing({c.directory: _directories(c) for c in listing.committed}, broken)


def standing_of(storage: Storage, directory: str) -> Standing:
    """Return what the checkpoint in a directory stands on."""
    try:
        record = read_manifest(storage, directory)
        found = read_checkpoint(storage, directory) if record is not None and record.parent is not None else None
    except CheckpointNotFoundError:  # a late commit: no run reads it, but it may be looked at
        return Standing()
    except (CorruptCheckpointError, FormatVersionError, OSError) as error:
        return Standing(broken={directory: _as_damage(directory, error)})
    if found is None or found.directory != directory:  # readers take a form of it
        return Standing()
    return Standing({directory: _directories(found)})


def _directories(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(link.directory for link in checkpoint.links)


def _as_damage(directory: str, error: Exception) -> CorruptCheckpointError:
    if isinstance(error, CorruptCheckpointError):
        return error
    if isinstance(error, FormatVersionError):
        return newer(error)
    assert isinstance(error, OSError | CheckpointRemovedError)
    return unreadable(layout.join(directory, layout.MANIFEST), error, "a manifest")


def check_counts(looks: Sequence[Checkup], standing: Standing, threads: int) -> None:
    """Count the rows after each link of the chains that are whole so far; ids are read once for all chains."""
    whole = {look.directory: look for look in looks if look.manifest and not _has_bad_rows(look)}
    chains = [links for links in standing.links.values() if len(links) > 1 and whole.keys() >= set(links)]
    names = {table.name for links in chains for table in whole[links[0]].tables if not table.is_whole}
    jobs = [_CountTable(name, whole, chains) for name in sorted(names)]
    for job, counted in zip(jobs, run_all(_CountTable.run, jobs, threads), strict=True):
        job.report(counted)


def check_links(looks: Sequence[Checkup], standing: Standing) -> None:
    """Say of each checkpoint that stands on a damaged link that it does; call it when all other errors are known.

    Of a link nothing counts but its rows, and that all of its files are there.
    """
    damaged = {look.directory for look in looks if _has_bad_rows(look)}
    for look in looks:
        known = [(error.path, error.found) for error in look.errors]
        broken = standing.broken.get(look.directory)
        if broken is not None and (broken.path, broken.found) not in known:
            look.errors.append(broken)
        for link in standing.links.get(look.directory, ())[1:]:
            if link in damaged:
                path, where = layout.join(look.directory, layout.MANIFEST), "its chain"
                look.errors.append(CorruptCheckpointError(path, where, found=f"damage in {link}/", expected="none"))


def _has_bad_rows(look: Checkup) -> bool:
    """Say whether what a checkpoint holds for those that stand on it is damaged."""
    names = {error.path.removeprefix(f"{look.directory}/") for error in look.errors}
    return any(name in (layout.MANIFEST, layout.SPARSE_DIR) or layout.has_rows(name) for name in names)


class _CountTable:
    """Counts the rows of one table."""

    def __init__(self, name: str, whole: Mapping[str, Checkup], chains: Sequence[Sequence[str]]) -> None:
        below: dict[str, str | None] = {}
        entries: dict[str, TableEntry] = {}
        for links in chains:
            for link, after in zip(links, [*links[1:], None], strict=True):
                entry = next((table for table in whole[link].tables if table.name == name), None)
                if entry is None:  # only older links have it
                    break
                entries[link], below[link] = entry, None if entry.is_whole else after
                if entry.is_whole:  # nothing older counts
                    break
        self._looks = sorted((whole[link] for link in entries), key=lambda look: look.place)
        numbers: dict[str | None, int] = {look.directory: number for number, look in enumerate(self._looks)}
        self._nodes = [Node(look.link().reader(name, ()), numbers.get(below[look.directory])) for look in self._looks]

    def run(self) -> list[Counted]:
        return count_rows(self._nodes, _COUNT_BYTES)

    def report(self, counted: Sequence[Counted]) -> None:
        """Add what is wrong to the errors of the links."""
        for look, node, count in zip(self._looks, self._nodes, counted, strict=True):
            if count.error is not None:
                look.add([_as_damage(look.directory, count.error)])
            elif count.is_known:
                look.add_absent_deletes(count.absent)
                entry = node.link.entry
                if count.rows != entry.rows:
                    look.add([count_error(look.directory, entry.name, entry.rows, count.rows)])
