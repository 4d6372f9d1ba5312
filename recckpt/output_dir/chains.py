"""What each delta stands on, decided by the manifests alone (docs/format.md, 12.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.links import MAX_LINKS, Parent
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry

Damage = CorruptCheckpointError | FormatVersionError | OSError


def preference(directory: str, record: Manifest) -> tuple[int, bool, str, bool]:
    """Return the key by which the greatest of one checkpoint, its revisions and forms is the one that readers take."""
    revised = record.revision_of.number if record.revision_of else 0
    return revised, record.kind == "full", record.save_id, layout.is_attempt(directory, record.ckpt_id)


class Chains:
    """The chains of checkpoints by their directories; does no I/O.

    Args:
        manifests: directory -> its manifest; all that count.
        damaged: directory -> what is wrong in it by itself; also of directories whose manifest cannot be read.

    Attributes:
        broken: directory -> what is wrong in it, or in a link that it stands on and has no other form of.
        is_incomplete: whether a parent is nowhere: a form may have taken its place since the directories were listed.
    """

    def __init__(self, manifests: Mapping[str, Manifest], damaged: Mapping[str, Damage]) -> None:
        self.broken = dict(damaged)
        self.is_incomplete = False
        self._manifests = manifests
        self._below: dict[str, str] = {}  # directory of a delta -> that of the link which it is read on
        self._n_links: dict[str, int] = {}
        self._causes = dict(damaged)  # as ``broken``, in the words of the link
        self._named: dict[str, list[str]] = {}
        for directory in sorted(manifests, key=lambda name: preference(name, manifests[name]), reverse=True):
            for save_id in {manifests[directory].save_id, manifests[directory].origin}:
                self._named.setdefault(save_id, []).append(directory)
        for directory in sorted(manifests, key=lambda name: manifests[name].place):  # a parent comes before its deltas
            if directory not in self.broken:
                self._stand(directory)

    def representations(self, save_id: str) -> list[str]:
        """Return where a checkpoint and its forms are that have a chain, the one that readers take first."""
        return [directory for directory in self._named.get(save_id, ()) if directory not in self.broken]

    def links(self, directory: str) -> tuple[str, ...]:
        """Return the directories of a chain, newest link first; ``directory`` is not broken."""
        links = [directory]
        while links[-1] in self._below:
            links.append(self._below[links[-1]])
        return tuple(links)

    def closure(self, save_ids: Collection[str]) -> set[str]:
        """Return the directories without which these checkpoints, or forms of them, could not be read."""
        best = (links[0] for save_id in save_ids if (links := self.representations(save_id)))
        return {link for directory in best for link in self.links(directory)}

    def _stand(self, directory: str) -> None:
        """Find the best link below, or say why there is none."""
        record = self._manifests[directory]
        if record.parent is None:
            self._n_links[directory] = 1
            return
        causes = []
        for below in self._named.get(record.parent.save_id, ()):
            cause = next(self._problems(directory, record, record.parent, below), None)
            if cause is None:
                self._below[directory], self._n_links[directory] = below, 1 + self._n_links[below]
                return
            causes.append(cause)
        if not causes:
            causes = [self._missing(directory, record, record.parent)]
        self._causes[directory] = causes[0]
        self.broken[directory] = _in_chain(causes[0], directory, record)

    def _problems(self, directory: str, record: Manifest, parent: Parent, below: str) -> Iterator[Damage]:
        """Yield why a delta cannot stand on what has the name of its parent."""
        link = self._manifests[below]

        def wrong(found: str, expected: str) -> CorruptCheckpointError:
            return _wrong_parent(directory, parent, f"{below}/ {found}", expected)

        if link.origin_xxh3 != parent.manifest:
            yield wrong(f"with the checksum {link.origin_xxh3:016x}", f"{parent.manifest:016x}")
        elif link.ckpt_id != parent.ckpt_id:
            yield wrong(f"with the id {link.ckpt_id!r}", repr(parent.ckpt_id))
        elif not link.place < record.place:
            yield wrong(f"committed as {link.place}", f"one before {record.place} (epoch, seq)")
        elif below in self._causes:
            yield self._causes[below]
        elif self._n_links[below] >= MAX_LINKS:
            yield wrong(f"with {self._n_links[below]} links", f"a chain of at most {MAX_LINKS} in all")
        else:
            yield from (wrong(f"with {found}", expected) for found, expected in _misfits(record, link))

    def _missing(self, directory: str, record: Manifest, parent: Parent) -> Damage:
        if parent.directory in self._causes and parent.directory not in self._manifests:  # it cannot be read
            return self._causes[parent.directory]
        self.is_incomplete = True
        expected = f"that of save {parent.save_id}, in {parent.directory}/ or as a form of it"
        remedy = f"if it was copied alone, {whole_one(record.ckpt_id)}; else restore an older checkpoint"
        return _wrong_parent(directory, parent, "no such checkpoint", expected, remedy)


def whole_one(ckpt_id: str) -> str:
    """Say what to do where the links of a delta are elsewhere."""
    return f"copy its links too, or make a whole one of it where they are: `recckpt compact DIR {ckpt_id} --out OTHER`"


def _wrong_parent(
    directory: str, parent: Parent, found: str, expected: str, remedy: str = ""
) -> CorruptCheckpointError:
    path, where = layout.join(directory, layout.MANIFEST), f"parent {parent.ckpt_id!r}"
    return CorruptCheckpointError(path, where, found=found, expected=expected, remedy=remedy)


def _misfits(record: Manifest, link: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (found, expected) for each way in which the rows of a delta do not fit the link below it."""
    for table in record.tables:
        below = link.table(table.name)
        if table.is_whole:
            continue
        if below is None:
            yield f"no table {table.name!r}", "it, since the delta does not replace it"
        elif below.slots != table.slots:
            yield f"slots {_slots(below)} in table {table.name!r}", f"{_slots(table)}, as in the delta"
        elif below.live != table.live:
            yield f"table {table.name!r} {_live(below)}", f"{_live(table)}, as in the delta"


def _slots(table: TableEntry) -> str:
    return ", ".join(f"{slot.name} {slot.dtype}{list(slot.shape)}" for slot in table.slots)


def _live(table: TableEntry) -> str:
    if table.live is None:
        return "not live"
    return f"live, of {table.live.n_rows} rows and columns {list(map(list, table.live.columns))}"


def _in_chain(cause: Damage, directory: str, record: Manifest) -> Damage:
    """Return damage of a link as that of a delta which stands on it."""
    is_own = isinstance(cause, CorruptCheckpointError) and cause.path == layout.join(directory, layout.MANIFEST)
    if not isinstance(cause, CorruptCheckpointError) or is_own:
        return cause
    link = f"a link of {record.ckpt_id!r}"
    where = f"{cause.where}, in {link}" if cause.where else link
    return CorruptCheckpointError(cause.path, where, found=cause.found, expected=cause.expected, remedy=cause.remedy)
