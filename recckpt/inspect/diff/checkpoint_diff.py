"""The differences between two checkpoints, as they print themselves and draw themselves (no torch here)."""

from __future__ import annotations

from recckpt.inspect.diff.lines import lines_of
from recckpt.inspect.diff.page import body_of, page_of
from recckpt.inspect.diff.result import Differences
from recckpt.text import plain


class CheckpointDiff(Differences):
    """What differs between two checkpoints; prints as the text of ``recckpt diff``, and as a page in notebooks."""

    def to_html(self) -> str:
        """Return a page that needs no other file and no network."""
        return page_of(self)

    def _repr_html_(self) -> str:
        return body_of(self)

    def __str__(self) -> str:
        return "\n".join(plain(lines_of(self)))

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} of {what}" for what, n in self.differing.items()) or "equal"
        return f"<CheckpointDiff {self.before.ckpt_id!r} -> {self.after.ckpt_id!r}: {counts}>"
