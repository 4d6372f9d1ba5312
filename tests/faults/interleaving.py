"""Two writers of one output dir, of which one is held up before any of its operations, and what is seen of both."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from faults.storage_faults import Died, watch
from faults.trainer import Trainer

from recckpt.errors import (
    CheckpointNotFoundError,
    CheckpointRemovedError,
    RecckptError,
    SaveFailedError,
    WriterFencedError,
)
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.output_dir.claims import claimed_epochs, last_takeover
from recckpt.output_dir.listing import Listing, list_checkpoints
from recckpt.storage import open_storage

Script = Callable[["HeldWriter"], None]
_CLAIM = re.compile(r"put_if_absent \.recckpt/owner/(\d+)\.json")
_HOLDS_NOTHING = ("write", "discard")  # nobody else can see what a file has while it is written


class HeldWriter:
    """A trainer that halts before its storage operations.

    Attributes:
        trainer: what it trains; to be used by its scripts only.
        epoch: of its claim; 0 before it has tried to make one.
        at: the operation that it halts before; "" where it does not.
        stood: where it halted first, and how many operations it had done.
    """

    def __init__(self, url: str, max_keep: int | None = 1) -> None:
        self.trainer = Trainer(url, max_keep)
        self.epoch, self.at, self.stood, self._done = 0, "", "", 0
        self._go, self._halted = threading.Semaphore(0), threading.Semaphore(0)
        self._left: int | None = 0  # operations that it may do, None for all
        self._is_dead, self._is_done = False, True
        self._error: BaseException | None = None
        watch(self.trainer.saver.storage, self._before)

    def begin(self, script: Script) -> HeldWriter:
        """Take up work, of which nothing is done yet."""
        self._is_done = False
        threading.Thread(target=self._run, args=(script,), daemon=True).start()
        return self

    def go(self, operations: int | None = None) -> bool:
        """Do so many operations, or all that are left of the work; return whether there are more.

        Raises:
            BaseException: what the work raised.
        """
        self._let_go(operations)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return not self._is_done

    def die(self) -> None:
        """Do nothing any more, wherever it is."""
        self._is_dead = True
        self._let_go(None)

    def _let_go(self, operations: int | None) -> None:
        if not self._is_done:
            self._left = operations
            self._go.release()
            self._halted.acquire()

    def _run(self, script: Script) -> None:
        self._go.acquire()
        try:
            script(self)
        except Died:
            pass
        except BaseException as error:
            self._error = error
        self._is_done, self.at = True, ""
        self._halted.release()

    def _before(self, operation: str) -> None:
        if self._is_dead:
            raise Died
        if operation.split(maxsplit=1)[0] in _HOLDS_NOTHING:
            return
        while self._left == 0:
            self.at = operation
            self.stood = self.stood or f"{operation} ({self._done})"
            self._halted.release()
            self._go.acquire()
            if self._is_dead:
                raise Died
        if self._left is not None:
            self._left -= 1
        self._done += 1
        if claim := _CLAIM.match(operation):
            self.epoch = int(claim[1])


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


class Scene:
    """Writers on one output dir, and what they do."""

    def __init__(self, url: str, *max_keeps: int | None) -> None:
        self.witness = Witness(url)
        self.writers = [HeldWriter(url, max_keep) for max_keep in max_keeps]

    def begin(self, number: int, script: str) -> HeldWriter:
        """Give a writer ``onward``, ``back`` or ``named`` to do."""
        return self.writers[number].begin(getattr(self, f"_{script}"))

    def end(self) -> None:
        """Let all save once more: the owner can, and all others are told that they are not."""
        for writer in self.writers:
            told = self.witness.fenced
            writer.begin(self._save).go()
            assert writer.epoch == self.witness.owner or self.witness.fenced > told, "a writer was not told"
            self.witness.look()
        self.witness.load_all()

    @contextmanager
    def losing_nothing(self) -> Iterator[None]:
        """Say where all stood when something was lost, and let nobody wait for ever."""
        try:
            yield
        except (AssertionError, RecckptError) as error:
            raise AssertionError(f"{[writer.stood for writer in self.writers]}: {error}") from error
        finally:
            for writer in self.writers:
                writer.die()

    def _save(self, writer: HeldWriter) -> None:
        self.witness.save(writer, Trainer.save)

    def _onward(self, writer: HeldWriter) -> None:
        writer.trainer.manager.restore()
        for _ in range(3):
            self._save(writer)

    def _back(self, writer: HeldWriter) -> None:
        """Go back to the oldest step twice, and save the same ones anew."""
        for n_steps in (2, 3):
            writer.trainer.manager.restore()
            steps = [c.manifest.step for c in self.witness.look().current if c.manifest.step is not None]
            with suppress(CheckpointNotFoundError, CheckpointRemovedError):  # by the other writer, meanwhile
                writer.trainer.manager.restore(min(steps, default=None))
            for _ in range(n_steps):
                self._save(writer)

    def _named(self, writer: HeldWriter) -> None:
        """Save under one id, without steps."""
        for _ in range(3):
            self.witness.save(writer, lambda trainer: trainer.save_as("best"))


def overtaken(url: str, script: str, max_keeps: tuple[int | None, int | None], halt: int) -> bool:
    """Hold the first writer up, let the second do its script, and let the first go on; return whether it was held up.

    Raises:
        AssertionError: something is lost, or the first is not told.
    """
    scene = Scene(url, *max_keeps)
    with scene.losing_nothing():
        first = scene.begin(0, "named" if script == "named" else "onward")
        is_held = first.go(halt)
        second = scene.begin(1, script)
        second.go()
        files = scene.witness.files()
        if is_held and (deed := re.fullmatch(r"remove (.*/)manifest\.json", first.at)):
            # It has checked and not yet removed: one checkpoint goes that it found surplus, which is not the newest.
            files = {name: data for name, data in files.items() if not name.startswith(deed[1])}
            assert files
        while first.go(9):
            scene.witness.look()
        scene.witness.look()
        assert first.epoch > second.epoch or scene.witness.files() == files, "a checkpoint was touched"
        scene.end()
    return is_held


def crossed(url: str, scripts: tuple[str, ...], halts: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Hold all writers up, one after the other, and let them go on in an order.

    Raises:
        AssertionError: something is lost, or not all but the last are told.
    """
    scene = Scene(url, 2, *[None] * (len(scripts) - 1))
    with scene.losing_nothing():
        for number, (script, halt) in enumerate(zip(scripts, halts, strict=True)):
            scene.begin(number, script).go(halt)
            scene.witness.look()
        for number in order:
            while scene.writers[number].go(7):
                scene.witness.look()
        scene.end()


def operations(url: str, script: str, max_keep: int | None) -> list[str]:
    """Return before which operations a lone writer can be held up, in their order."""
    scene = Scene(url, max_keep)
    writer = scene.begin(0, script)
    found = []
    while writer.go(1 if found else 0):
        found.append(writer.at)
    return found
