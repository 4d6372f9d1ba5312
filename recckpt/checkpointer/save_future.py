"""The outcome of a save in the background; its error is raised once."""

from __future__ import annotations

from recckpt.parallel.one_process import OwnFuture


class SaveFuture(OwnFuture[None]):
    """A future that knows whether its error has been seen.

    Attributes:
        seen: whether the error was got from :meth:`result` or :meth:`exception`.
    """

    seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait, and raise the error if there is one; as :class:`concurrent.futures.Future` does."""
        try:
            super().result(timeout)
        except BaseException as error:
            self.seen = self.seen or (self.done() and error is super().exception())
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error if there is one; as :class:`concurrent.futures.Future` does."""
        error = super().exception(timeout)
        self.seen = True
        return error

    def raise_unseen(self) -> None:
        """Wait, and raise an error that was not seen yet."""
        error = super().exception()
        if error is not None and not self.seen:
            raise error
