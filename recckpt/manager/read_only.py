"""A manager that only reads: a process beside a run brings its model to one checkpoint after another."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import nn

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError
from recckpt.inspect.follow import follow
from recckpt.inspect.reader import CheckpointReader
from recckpt.load.standby import Standby
from recckpt.manager.habits import unknown_when_read_only
from recckpt.output_dir.checkpoint_dir import refuse_checkpoint
from recckpt.output_dir.listing import describe, newest_first
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.storage import absolute, open_storage
from recckpt.types import flag

log = logging.getLogger("recckpt")


class ReadOnlyManager:
    """What ``CheckpointManager.attach(model, output_dir=..., read_only=True)`` returns: follows a run, writes nothing.

    It loads the tables and the dense state of a model as a :class:`recckpt.Standby` does, of deltas only what is new to
    the model; nothing that only training needs is loaded or missed. The output dir need not be there yet, nor be
    writable, and the process that trains goes on owning it. Not collective. Not thread-safe.

    Args:
        model: any module.
        output_dir: that of the run, as of :class:`recckpt.Saver`.
        load_conf: what to take, as of :func:`recckpt.load_into`; None for all of the model.

    Raises:
        TypeError, ValueError: an argument is invalid; LoadConfError is a ValueError.
    """

    def __init__(
        self, model: nn.Module, output_dir: str | os.PathLike[str], *, load_conf: Mapping[str, Any] | None = None
    ) -> None:
        self._standby = Standby(model, load_conf=load_conf)
        place: Any = output_dir  # what is no path is refused there
        self._storage = open_storage(absolute(os.fspath(place)) if isinstance(place, str | os.PathLike) else place)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(unknown_when_read_only(name), name=name, obj=self)

    def __repr__(self) -> str:
        return f"ReadOnlyManager(at step {self.global_step:,}, output_dir={self.output_dir!r})"

    @property
    def output_dir(self) -> str:
        """Where the checkpoints are."""
        return self._storage.url

    @property
    def global_step(self) -> int:
        """The step of the checkpoint that the model is at; 0 before the first load."""
        return self._standby.global_step or 0

    def all_steps(self) -> list[int]:
        """Return the steps that :meth:`restore` can be given, in order of commit; damaged ones are logged.

        Raises:
            CorruptCheckpointError: there are only damaged ones.
            FormatVersionError: a newer recckpt wrote one.
        """
        steps = (checkpoint.manifest.step for checkpoint in reversed(newest_first(self._storage)))
        return [step for step in steps if step is not None]

    def latest_step(self) -> int | None:
        """Return the last of :meth:`all_steps`, None where there is no checkpoint; raises as it."""
        return max(self.all_steps()[-1:], default=None)

    def restore(self, global_step: int | Literal["latest"] | None = None, *, required: bool = False) -> int:
        """Bring the model to the newest committed checkpoint, or to that of one step; return its step.

        Args:
            global_step: the step; None or "latest" for the newest.
            required: whether it is an error that there is nothing to restore.

        Returns:
            The step; 0 where there was nothing to restore.

        Raises:
            TypeError: ``global_step`` is something else.
            ValueError: the output dir is the directory of a checkpoint.
            CheckpointNotFoundError: no such checkpoint, and ``global_step`` or ``required`` was given.
            Exception: as :func:`recckpt.load_into`.
        """
        flag("required", required)
        if global_step is not None and global_step != "latest":
            self._standby.load(self._path_of(global_step))
        elif required or newest_first(self._storage):
            self._standby.load(self.output_dir)
        else:
            refuse_checkpoint(self._storage)
            log.warning("%s: nothing to restore yet: %s", self.output_dir, why_nothing(self._storage))
            return 0
        return self.global_step

    def _path_of(self, step: object) -> str:
        if not isinstance(step, Integral) or isinstance(step, bool):
            best = "find_checkpoint(output_dir, 'best', 'auc').step of recckpt is that of the best"
            raise TypeError(f"global_step must be an int, None or 'latest', found {step!r}: {best}")
        checkpoints = newest_first(self._storage)
        match = next((each for each in checkpoints if each.manifest.step == step), None)
        if match is None:
            there = describe(checkpoints[::-1]) if checkpoints else why_nothing(self._storage)
            raise CheckpointNotFoundError(f"{self.output_dir}: found no checkpoint of step {step}; {there}")
        return self._storage.url_of(match.directory)

    def follow(
        self,
        *,
        timeout_sec: float | None = None,
        every_sec: float = 1.0,
        after: int | None = None,
        newest: bool = False,
        ephemeral: bool = False,
    ) -> Iterator[CheckpointReader]:
        """Yield each committed checkpoint of the run once, when the model is at it, and wait for more.

        One that turns out damaged, or is removed before it was read, is passed over, with an error in the log.

        Args:
            timeout_sec: ends when no checkpoint has come for so long, 0 after those that are there; None: never.
            every_sec: how long to wait between two looks.
            after: passes over what is there of steps up to this one, such as the last that was evaluated.
            newest: passes over all but the newest where several wait, as where the caller is slower than the run.
            ephemeral: whether ephemeral checkpoints come, too.

        Raises:
            Exception: as :func:`recckpt.follow`, here and now; as :func:`recckpt.load_into`, at each.
        """
        checkpoints = follow(
            self.output_dir,
            timeout_sec=timeout_sec,
            every_sec=every_sec,
            after=after,
            newest=newest,
            ephemeral=ephemeral,
        )
        return self._each(checkpoints)

    def _each(self, checkpoints: Iterator[CheckpointReader]) -> Iterator[CheckpointReader]:
        for checkpoint in checkpoints:
            try:
                self._standby.load(checkpoint)
            except (CorruptCheckpointError, CheckpointRemovedError) as error:
                log.error("%s is passed over: %s", checkpoint.path, error)
                continue
            yield checkpoint

    def close(self) -> None:
        """Do nothing: what a loop calls of any manager."""

    def __enter__(self) -> ReadOnlyManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
