"""Write the file of one rank, and put it in place together with those of the others (no torch until it is needed)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from recckpt.checkpointer.barrier import Alone, Barrier, RankFailedError, describe
from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.errors import SaveFailedError
from recckpt.format import layout
from recckpt.storage import SinkFile, Storage, open_storage


@dataclass(frozen=True)
class RankInfo:
    """One rank among others.

    Attributes:
        global_rank: 0 to ``global_world_size`` - 1.
        global_world_size: number of ranks that save together.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        rank, size = self.global_rank, self.global_world_size
        if not (type(rank) is int and type(size) is int and 0 <= rank < size):
            raise ValueError(f"global_rank must be 0 to global_world_size - 1, found rank {rank!r} of {size!r}")

    @property
    def file_name(self) -> str:
        """Name of the file of this rank."""
        return layout.state_of_rank(self.global_rank)


class WriterHook(ABC):
    """Called on each rank by its writer; with an :class:`AsyncCheckpointer`, in the writer process.

    Follows the hook of the same name in ``torch.distributed.checkpoint._experimental``, with one difference: there
    the file is in place before ``pre_commit``.
    """

    @abstractmethod
    def pre_commit(self, path: str, **kwargs: Any) -> None:
        """Act once the bytes of this rank are durable but not yet visible. An error drops the save, on all ranks.

        Args:
            path: the directory of the checkpoint, absolute or a URL.
            kwargs: what was passed to ``save``.
        """

    @abstractmethod
    def post_commit(self, path: str, **kwargs: Any) -> None:
        """Act once the files of all ranks are in place. An error is raised on all ranks, and the files stay."""


class PartlyCommittedError(SaveFailedError):
    """A rank failed after all had agreed to put their files in place: in doing so, or in its ``post_commit``."""

    def __init__(self, ckpt_id: str, rank: int, cause: str) -> None:
        super().__init__(ckpt_id, rank, cause)
        self.args = (
            f"saving {ckpt_id!r}: rank {rank} failed while or after putting its file in place: {cause}; "
            "files of other ranks may be new already: mend the cause and save again",
        )


class CheckpointWriter:
    """Writes ``<path>/checkpoint_<rank>.pt``, whole or not at all.

    The order of a save: bytes durable under another name, ``pre_commit``, all ranks agree, names put in place, all
    ranks agree, ``post_commit``, all ranks agree.

    Args:
        rank_info: this rank.
        barrier: where several ranks agree; None for one rank.
        commit_hook: called before and after the commit.
        proceed: called before every few megabytes; raises where the save is to be dropped.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        barrier: Barrier | None = None,
        commit_hook: WriterHook | None = None,
        proceed: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank_info, self._barrier, self._hook = rank_info, barrier or Alone(), commit_hook
        self._proceed = proceed

    def write(self, path: str | os.PathLike[str], state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Save a state dict. Collective where there is a barrier.

        Args:
            path: the directory of the checkpoint, or its URL.
            state_dict: as :meth:`Checkpointer.save` takes it.
            kwargs: passed to the hook.

        Raises:
            TypeError, ValueError: there is something in ``state_dict`` that cannot be loaded back safely.
            SaveFailedError: writing failed, here or on another rank; the cause is chained.
        """
        from recckpt.checkpointer.pack import pack

        self._barrier.begin()
        try:
            storage = storage_at(path)
            contents = pack(state_dict).contents()
        except BaseException as error:
            self._barrier.refuse(describe(error))
            raise
        self.put(storage, contents, kwargs)

    def put(self, storage: Storage, contents: ArchiveContents, kwargs: Mapping[str, Any]) -> None:
        """Write ``contents`` in a save that has begun; as :meth:`write` does."""
        url = storage.url
        with self._raised_alike(url, SaveFailedError):
            draft = storage.draft(self._rank_info.file_name)
            try:
                write_archive(SinkFile(draft), contents, self._proceed)
                draft.seal()
                if self._hook is not None:
                    self._hook.pre_commit(url, **kwargs)
                self._barrier.agree()
            except BaseException:
                draft.discard()
                raise
        with self._raised_alike(url, PartlyCommittedError):
            with draft:
                pass
            self._barrier.agree()
            if self._hook is not None:
                self._hook.post_commit(url, **kwargs)
            self._barrier.agree(last=True)

    @contextmanager
    def _raised_alike(self, url: str, failed: Callable[[str, int, str], SaveFailedError]) -> Iterator[None]:
        """Send an error to the other ranks, and raise theirs."""
        try:
            yield
        except RankFailedError as error:
            raise failed(url, error.rank, error.reason) from error.__cause__
        except BaseException as error:
            self._barrier.refuse(describe(error))
            if not isinstance(error, Exception):
                raise
            raise failed(url, self._rank_info.global_rank, describe(error)) from error


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Return the storage whose root is the directory of a checkpoint.

    Raises:
        TypeError: it is not a path.
        ValueError: nothing can be saved there.
    """
    if not isinstance(path, str | os.PathLike):
        hint = "; the state comes first and then the path" if isinstance(path, Mapping) else ""
        raise TypeError(f"path is a directory or URL, found a {type(path).__name__}{hint}")
    return open_storage(os.fspath(path))
