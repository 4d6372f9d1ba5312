"""An output dir that is saved to, damaged and died in, beside a dict that says what must be in it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from faults.trainer import Trainer
from faults.watched_storage import Died, watch

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, RecckptError, WriterFencedError
from recckpt.format import layout
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage


@dataclass
class Version:
    """A checkpoint that was committed.

    Attributes:
        ckpt_id: its id.
        value: what restores from it.
        is_sure: False where its writer died and may have removed it.
        damage: "" for none, "bytes" where only reading them shows it, "shape" where looking at the directory does.
    """

    ckpt_id: str
    value: float
    is_sure: bool = True
    damage: str = ""

    @property
    def step(self) -> int | None:
        return layout.parse_step(self.ckpt_id)


class CheckedDir:
    """An output dir, a trainer that saves to it, and what must be there; AssertionError where something else is.

    Attributes:
        versions: what is committed, oldest first.
        done: what was done how often.
    """

    def __init__(self, url: str, max_keep: int | None = 1) -> None:
        self.url, self.max_keep = url, max_keep
        self.versions: list[Version] = []
        self.done: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._ever: set[str] = set()  # ids
        self._has_index = False
        self._storage, self._reader = open_storage(url), Trainer(url)
        self._left: int | None = None  # operations until the trainer dies
        self.restart()

    # what must be there

    @property
    def current(self) -> list[Version]:
        """The newest version of each id that listings count."""
        newest = {version.ckpt_id: version for version in self.versions if version.damage != "shape"}
        return [version for version in self.versions if newest.get(version.ckpt_id) is version]

    @property
    def steps(self) -> list[Version]:
        """Those that can be restored by their step."""
        return [v for v in self.current if v.step is not None and v.is_sure and not v.damage]

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
        sound = [version for version in self.current if not version.damage]
        expected: object = sound[-1].value if sound else "damaged" if self.versions else "nothing"
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

    def _committed(self, ckpt_id: str, *, rotated: bool) -> None:
        value = self.trainer.value
        assert value is not None
        self.versions.append(Version(ckpt_id, value))
        self._ever.add(ckpt_id)
        current = self.current
        kept = current[-self.max_keep if self.max_keep else 0 :]
        kept += [version for version in current if version.step is not None][-1:]  # a save by hand leaves a run its own
        kept += [version for version in current if version.ckpt_id in self._pinned]
        kept += [version for version in self.versions if version.damage == "shape"]
        if rotated:
            self.versions = [version for version in self.versions if version in kept]
        for version in self.versions:
            version.is_sure = version in kept

    def _settle(self) -> None:
        """Find out what dead writers have removed: a policy that keeps more from now on cannot bring it back."""
        found = [checkpoint.manifest.state["value"] for checkpoint in list_checkpoints(self._storage).committed]
        self.versions = [version for version in self.versions if version.is_sure or version.value in found]
        for version in self.versions:
            version.is_sure = True

    # what is done

    def restart(self) -> None:
        """Begin a process that takes up the run, as far as there is one."""
        self._left = None
        self.trainer = Trainer(self.url, self.max_keep)
        self._check_restore(self.trainer)
        watch(self.trainer.saver.storage, self._die_in_time)

    def save(self, named: str = "") -> None:
        self._settle()
        manifest = self.trainer.save_as(named) if named else self.trainer.save()
        self._committed(manifest.ckpt_id, rotated=True)
        found = list_checkpoints(self._storage).current
        values = [checkpoint.manifest.state["value"] for checkpoint in found]
        assert values == [version.value for version in self.current], f"found {values}, expected {self.current}"
        assert self._index() == [layout.encode_id(version.ckpt_id) for version in self.current]

    def die_while_saving(self, operations: int) -> bool:
        """Die at an operation of a save, and restart; return whether it came to that."""
        self._left = operations
        try:
            self.save()
            died = False
        except Died:
            died = True
            self.done["deaths"] += 1
            found = [c.manifest.state["value"] for c in list_checkpoints(self._storage).committed]
            if self.trainer.value in found:
                self._committed(layout.step_id(self.trainer.manager.global_step), rotated=False)
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
        elif newest.damage:
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
        """Flip a bit of a file, cut it, or remove it."""
        version = self.current[-1]
        [directory] = [
            c.directory for c in list_checkpoints(self._storage).committed if c.manifest.state["value"] == version.value
        ]
        names = [name for name in self._storage.list_files(directory) if name != layout.INTENT]
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
        self.done["damaged"] += 1

    def change_times(self) -> None:
        """Let the newest files be the oldest, as a copy may leave them."""
        paths = sorted(Path(self.url).rglob("*"), key=lambda path: path.stat().st_mtime)
        for age, path in enumerate(paths if "://" not in self.url else ()):
            os.utime(path, (10**9 - age, 10**9 - age))
