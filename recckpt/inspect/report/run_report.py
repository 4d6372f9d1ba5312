"""How a run is, as it prints itself and draws itself (no torch here)."""

from __future__ import annotations

from recckpt.inspect.libraries import MissingLibraryError
from recckpt.inspect.report.lines import lines_of, verdict
from recckpt.inspect.report.page import body_of, page_of
from recckpt.inspect.report.result import RunHealth
from recckpt.text import plain


class RunReport(RunHealth):
    """How a run is; prints as the text of ``recckpt report``, and notebooks show its page."""

    def to_html(self) -> str:
        """Return a page that needs no other file, no network and no script.

        Raises:
            MissingLibraryError: matplotlib, which draws the plots, is not installed.
        """
        return page_of(self)

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows; None without matplotlib, where it shows the text."""
        try:
            return body_of(self)
        except MissingLibraryError:
            return None

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        return f"<RunReport {self.url!r}: {verdict(self)}>"
