"""An output dir to which anything is done, held against a dict of what was saved."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from faults.storage_faults import Died, watch
from faults.trainer import Trainer

import recckpt
from recckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RecckptError,
    SaveFailedError,
    WriterFencedError,
)
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.output_dir.listing import Checkpoint, list_checkpoints
from recckpt.storage import open_storage


@dataclass
class Version:
    """A checkpoint that was committed.

    Attributes:
        ckpt_id: its id.
        value: what restores from it.
        is_sure: False where its writer died and may have removed it.
        damage: "" for none, "bytes" where only reading them shows it, "shape" where looking at the directory does.
        spoils: whether the damage is of what is read for deltas that stand on it, too.
        parent: what it stands on; None where it is full, or has a form.
        offered: whether an offer of it was made, which may be adopted.
    """

    ckpt_id: str
    value: float
    parent: Version | None = None
    is_sure: bool = True
    damage: str = ""
    spoils: bool = False
    offered: bool = False

    @property
    def step(self) -> int | None:
        return layout.parse_step(self.ckpt_id)

    @property
    def links(self) -> list[Version]:
        """It, and all that it stands on; the full one last."""
        return [self, *(self.parent.links if self.parent else [])]

    @property
    def is_whole(self) -> bool:
        """Whether it restores."""
        return not self.damage and not any(link.spoils for link in self.links)


def _current(versions: list[Version]) -> list[Version]:
    newest = {version.ckpt_id: version for version in versions if version.damage != "shape"}
    return [version for version in versions if newest.get(version.ckpt_id) is version]


class CheckedDir:
    """An output dir, a trainer that saves to it, and what must be there; AssertionError where something else is.

    Attributes:
        versions: what is committed, oldest first.
        done: what was done how often.
    """

    def __init__(self, url: str, max_keep: int | None = 1, *, deltas: bool = False) -> None:
        self.url, self.max_keep, self.deltas = url, max_keep, deltas
        self.versions: list[Version] = []
        self.done: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._ever: set[str] = set()  # ids
        self._by_save_id: dict[str, Version] = {}
        self._has_index = False
        self._storage, self._reader = open_storage(url), Trainer(url, deltas=deltas)
        self._left: int | None = None  # operations until the trainer dies
        self.restart()

    # what must be there

    @property
    def current(self) -> list[Version]:
        """The newest version of each id that listings count."""
        return _current(self.versions)

    @property
    def restores(self) -> Version | None:
        """The newest that is whole; what a damaged one has superseded, and a delta stands on, counts again."""
        left = list(self.versions)
        while found := _current(left):
            if found[-1].is_whole:
                return found[-1]
            left.remove(found[-1])
        return None

    @property
    def steps(self) -> list[Version]:
        """Those that can be restored by their step."""
        return [v for v in self.current if v.step is not None and v.is_sure and v.is_whole]

    @property
    def can_be_damaged(self) -> bool:
        settled = all(version.is_sure for version in self.versions)
        return settled and bool(self.current) and not self.current[-1].damage

    def check(self) -> None:
        """Look with the eyes of a reader."""
        self._check_restore(self._reader)
        listing = list_checkpoints(self._storage)
        damaged = [version for version in self.versions if version.damage == "shape"]
        assert len(listing.damaged) == len(damaged), f"damaged: {listing.damaged}, expected {damaged}"
        index = self._index()
        assert index is not None or not self._has_index, "the index file is gone"
        assert set(index or ()) <= self._ever, f"the index file has {index}, saved were {self._ever}"
        self._has_index = index is not None
        self.done["steps"] += 1

    def _check_restore(self, trainer: Trainer) -> None:
        newest = self.restores
        expected: object = newest.value if newest else "damaged" if self.versions else "nothing"
        try:
            trainer.manager.restore(required=True)
            found: object = trainer.value
        except CorruptCheckpointError:
            found = "damaged"
        except CheckpointNotFoundError:
            found = "nothing"
        except RecckptError as error:
            found = error
        assert found == expected, f"restored {found}, expected {expected}: {self.versions}"

    def _index(self) -> list[str] | None:
        try:
            return self._storage.read(layout.INDEX_FILE, 1 << 20).decode().splitlines()
        except FileNotFoundError:
            return None

    def _committed(self, manifest: Manifest, *, rotated: bool) -> None:
        value = self.trainer.value
        assert value is not None
        parent = manifest.parent and self._by_save_id[manifest.parent.save_id]
        self.versions.append(Version(manifest.ckpt_id, value, parent))
        self._by_save_id[manifest.save_id] = self.versions[-1]
        self._ever.add(manifest.ckpt_id)
        self.done["deltas"] += parent is not None
        current = self.current
        kept = current[-self.max_keep if self.max_keep else 0 :]
        if len(kept) > 1 and parent:  # one that damage to the newest full one does not take
            kept += [version for version in current if version.links[-1] is not current[-1].links[-1]][-1:]
        kept += [version for version in current if version.step is not None][-1:]  # a save by hand leaves a run its own
        kept += [version for version in current if version.ckpt_id in self._pinned]
        kept = [link for version in kept for link in version.links]
        kept += [version for version in self.versions if version.damage == "shape"]
        if rotated:
            self.versions = [version for version in self.versions if version in kept]
        for version in self.versions:
            version.is_sure = version in kept

    def _settle(self) -> None:
        """Find out what dead writers have removed: a policy that keeps more from now on cannot bring it back."""
        found = self._look()
        self.versions = [version for version in self.versions if version.is_sure or version.value in found]
        for version in self.versions:
            version.is_sure = True

    def _look(self) -> dict[float, Checkpoint]:
        """Return by its value what is there, and note what was compacted, which heals it."""
        committed = list_checkpoints(self._storage).committed
        versions = {version.value: version for version in self.versions}
        for value in (c.manifest.state["value"] for c in committed if c.manifest.supersedes):
            version = versions[value]
            assert version.offered, f"{version} was compacted, and no offer was made"
            if version.parent is not None:
                version.parent, version.damage, version.spoils = None, "", False
                self.done["forms"] += 1
        return {c.manifest.state["value"]: c for c in committed}

    # what is done

    def restart(self) -> None:
        """Begin a process that takes up the run, as far as there is one."""
        self._left = None
        self.trainer = Trainer(self.url, self.max_keep, deltas=self.deltas)
        for version in self.versions:
            version.offered = version.offered and version.parent is None  # nobody adopts what is of an earlier epoch
        self._check_restore(self.trainer)
        watch(self.trainer.saver.storage, self._die_in_time)

    def save(self, named: str = "") -> None:
        self._settle()
        try:
            manifest = self._save(named)
        except SaveFailedError:
            assert any(version.damage == "shape" for version in self.versions)
            manifest = self._save(named)  # what a delta was to stand on was damaged meanwhile: this one is full
            assert manifest.kind == "full"
        self._committed(manifest, rotated=True)
        self._look()
        waiting = [version for version in self.versions if version.offered and version.parent and not version.damage]
        assert not waiting, f"offers of {waiting} are not adopted"
        found = list_checkpoints(self._storage).current
        values = [checkpoint.manifest.state["value"] for checkpoint in found]
        assert values == [version.value for version in self.current], f"found {values}, expected {self.current}"
        assert self._index() == [layout.encode_id(version.ckpt_id) for version in self.current]

    def _save(self, named: str) -> Manifest:
        return self.trainer.save_as(named) if named else self.trainer.save()

    def die_while_saving(self, operations: int) -> bool:
        """Die at an operation of a save, and restart; return whether it came to that."""
        self._left = operations
        try:
            self.save()
            died = False
        except Died:
            died = True
            self.done["deaths"] += 1
            found = self._look()
            if self.trainer.value in found:
                self._committed(found[self.trainer.value].manifest, rotated=False)
        self.restart()
        return died

    def _die_in_time(self, operation: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Died

    def take_over(self) -> None:
        """Let another process save, and then the first."""
        self.save()  # or it would be the first that takes over, once it saves
        first = self.trainer
        self.restart()
        self.save()
        for _ in range(2):
            try:
                first.save()
            except WriterFencedError:
                continue
            raise AssertionError("a writer that was overtaken has saved")
        self.done["takeovers"] += 1

    def go_back(self, number: int) -> None:
        version = self.steps[number % len(self.steps)]
        step = self.trainer.manager.restore(version.step)
        assert (step, self.trainer.value) == (version.step, version.value), f"restored {step}, expected {version}"

    def load_by_id(self, number: int) -> None:
        ckpt_id = self.versions[number % len(self.versions)].ckpt_id
        newest = {version.ckpt_id: version for version in self.current}.get(ckpt_id)
        found = self._loaded(ckpt_id)
        if newest is None:
            expected: list[object] = ["damaged"]
        elif not newest.is_whole:
            expected = ["damaged", newest.value]  # the random generators are not loaded
        else:
            expected = [newest.value] if newest.is_sure else [newest.value, "gone"]
        assert found in expected, f"{ckpt_id} is {found}, expected {expected}"

    def _loaded(self, ckpt_id: str) -> object:
        try:
            self._reader.saver.load(ckpt_id=ckpt_id)
        except CheckpointNotFoundError:
            return "gone"
        except CorruptCheckpointError:
            return "damaged"
        return self._reader.value

    def pin(self, number: int) -> None:
        version = self.steps[number % len(self.steps)]
        assert version.step is not None
        self.trainer.manager.pin(version.step)
        self._pinned.add(version.ckpt_id)

    def unpin(self, number: int) -> None:
        """Unpin something that is pinned, if there is anything."""
        for ckpt_id in sorted(self._pinned)[number % 3 :][:1]:
            step = layout.parse_step(ckpt_id)
            assert step is not None
            self.trainer.manager.unpin(step)
            self._pinned.remove(ckpt_id)

    def keep(self, max_keep: int | None) -> None:
        self.max_keep = self.trainer.saver.max_keep = max_keep

    def damage_the_newest(self, number: int, how: str) -> None:
        """Flip a bit of a file, cut it, or remove it; what was compacted is spared."""
        version, committed = self.current[-1], list_checkpoints(self._storage).committed
        directory, *others = [c.directory for c in committed if c.manifest.state["value"] == version.value]
        if others:
            return
        others = (layout.INTENT, layout.OFFER_JSON)
        names = [name for name in self._storage.list_files(directory) if name not in others]
        if how == "remove":
            names.remove(layout.MANIFEST)  # without it there is no checkpoint
        if how == "flip" and "://" in self.url:  # only the values of a part are read there, and those are right
            names = [name for name in names if not layout.is_part(name)]
        name = names[number % len(names)]
        data = bytearray(self._storage.read(f"{directory}/{name}", 1 << 20))
        at = number * len(data) // 100
        self._storage.remove(f"{directory}/{name}")
        if how != "remove":
            data[at] ^= 4
            with self._storage.create(f"{directory}/{name}") as sink:
                sink.write(data if how == "flip" else data[:at])
        version.damage = "bytes" if how == "flip" and name != layout.MANIFEST else "shape"
        version.spoils = version.damage == "bytes" and name.startswith(f"{layout.SPARSE_DIR}/")
        self.done["damaged"] += 1

    def offer(self) -> None:
        """Merge the chain of the newest, as somebody who does not save; of one that is full there is nothing to do."""
        if not (self.current and self.current[-1].parent):
            self.save()
        newest = self.current[-1] if self.current else None
        try:
            made = recckpt.rewrite.compact(self.url, threads=1)
        except CheckpointNotFoundError:
            assert not self.versions
        except CorruptCheckpointError:
            assert newest is None or not newest.is_whole
        else:
            assert newest is not None
            newest.offered |= made.directory is not None and bool(self.trainer.saver._to.fence.epoch)
            self.done["offers"] += made.directory is not None

    def change_times(self) -> None:
        """Let the newest files be the oldest, as a copy may leave them."""
        paths = sorted(Path(self.url).rglob("*"), key=lambda path: path.stat().st_mtime)
        for age, path in enumerate(paths if "://" not in self.url else ()):
            os.utime(path, (10**9 - age, 10**9 - age))
