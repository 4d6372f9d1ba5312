"""What must be true of an output dir, whoever writes to it and wherever they stand still."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from faults.held_writer import HeldWriter
from faults.trainer import Trainer

from recckpt.errors import SaveFailedError, WriterFencedError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.output_dir.claims import claimed_epochs, last_takeover
from recckpt.output_dir.listing import Listing, list_checkpoints
from recckpt.storage import open_storage


class Witness:
    """Knows what was acknowledged, and looks whether that is what readers get.

    Attributes:
        fenced: how often a writer was told that it had lost the output dir.
    """

    def __init__(self, url: str) -> None:
        self.url, self._storage = url, open_storage(url)
        self.fenced = 0
        self._newest = 0, 0  # (epoch, seq)
        self._kept: tuple[int, dict[str, tuple[int, int]]] = 0, {}  # by the last owner that keeps all
        self._older: tuple[int, set[str]] = 0, set()  # of the last takeover: what counts of those before it

    def save(self, writer: HeldWriter, save: Callable[[Trainer], Manifest]) -> bool:
        """Let a writer save, and return whether it did; only one that has lost the output dir may fail."""
        try:
            manifest = save(writer.trainer)
        except WriterFencedError:
            self.fenced += 1
            assert self.owner > writer.epoch, f"the owner of epoch {writer.epoch} was fenced"
            return False
        except SaveFailedError as error:
            if self.owner > writer.epoch:
                return False
            raise AssertionError(f"a save of the owner of epoch {writer.epoch} failed") from error
        if manifest.place < self._newest:
            in_time = self._listed_after(manifest.epoch)
            assert manifest.save_id in in_time, f"{manifest.ckpt_id} of epoch {manifest.epoch} is acknowledged too late"
        else:
            self._newest = manifest.place
        if writer.trainer.saver.max_keep is None:
            kept = self._kept[1] if self._kept[0] == writer.epoch else {}
            self._kept = writer.epoch, {**kept, manifest.ckpt_id: manifest.place}
        return True

    @property
    def owner(self) -> int:
        """The highest epoch that was claimed."""
        return max(claimed_epochs(self._storage), default=0)

    def look(self) -> Listing:
        """Fail where readers get less than was acknowledged, a late commit, or anything damaged."""
        listing, takeover = list_checkpoints(self._storage), last_takeover(self._storage)
        assert not listing.damaged, f"damaged: {listing.damaged}"
        newest = listing.committed[-1].manifest.place if listing.committed else (0, 0)
        assert newest >= self._newest, f"(epoch, seq) {self._newest} was acknowledged, found {newest}"
        if self._kept[0] == self.owner:
            found = {c.ckpt_id: c.manifest.place for c in listing.current}
            lost = {ckpt_id for ckpt_id, order in self._kept[1].items() if found.get(ckpt_id, (0, 0)) < order}
            assert not lost, f"the owner keeps all of its checkpoints, and {lost} are gone"
        older = {c.manifest.save_id for c in listing.committed if c.manifest.epoch < takeover.epoch}
        if self._older[0] == takeover.epoch:
            assert older <= self._older[1], f"a late commit counts, of an epoch before {takeover.epoch}"
        self._older = takeover.epoch, older
        return listing

    def load_all(self) -> None:
        """Load every checkpoint there is, and compare all of its state with what its manifest says."""
        for checkpoint in self.look().current:
            reader = Trainer(self.url)
            reader.saver.load(ckpt_id=checkpoint.ckpt_id)
            expected = checkpoint.manifest.state["value"]
            assert reader.value == expected, f"{checkpoint.directory} holds {reader.value}, expected {expected}"

    def files(self) -> dict[str, bytes]:
        """Return all files of all checkpoints that count."""
        directories = [checkpoint.directory for checkpoint in self.look().committed]
        names = [layout.join(d, name) for d in directories for name in self._storage.list_files(d)]
        return {name: self._storage.read(name, 1 << 20) for name in names}

    def _listed_after(self, epoch: int) -> set[str]:
        """Return what those listed that took over later."""
        listed: set[str] = set()
        for later in range(epoch + 1, self.owner + 1):
            with suppress(FileNotFoundError):  # it has not come so far
                listed |= set(json.loads(self._storage.read(layout.takeover(later), 1 << 20))["committed"])
        return listed
