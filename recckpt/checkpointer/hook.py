"""What users of a checkpointer may do around a commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


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
