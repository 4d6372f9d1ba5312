"""tqdm bars on a terminal or below a notebook cell. bars.py imports this module late: tqdm is slow to import."""

from __future__ import annotations

import io
import logging
from typing import Any

from tqdm import tqdm

log = logging.getLogger("recckpt")


class TerminalBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar on stderr, dropped at its first error, because tqdm keeps the lock of all bars if a bar raises."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the bar, or a text in its place; tqdm calls this for each update."""
        try:
            return self._draw(msg, pos)
        except Exception as error:
            self.disable = True
            self._instances.discard(self)  # frees its line, because closing a disabled bar does nothing
            log.debug("the bar is dropped: %s", error)
            return False

    def _draw(self, msg: str | None, pos: int | None) -> bool:
        return bool(super().display(msg, pos))


class NotebookBar(TerminalBar):
    """A bar made of text that is replaced at each update, and empty at the end; saved notebooks lack widgets."""

    def __init__(self, **options: Any) -> None:
        self._output: Any = None
        super().__init__(file=io.StringIO(), ascii=False, **options)

    def _draw(self, msg: str | None, pos: int | None) -> bool:
        content = {"text/plain": str(self) if msg is None else msg}
        if self._output is None:
            from IPython.display import display

            self._output = display(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)
        return True
