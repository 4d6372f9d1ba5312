"""Two or three writers on one output dir, held up at one of their operations each, and let go on in some order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from faults.held_writer import HeldWriter
from faults.trainer import Trainer
from faults.witness import Witness

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, RecckptError


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
