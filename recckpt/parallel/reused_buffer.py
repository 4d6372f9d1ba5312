"""Memory that is used again and again: fresh memory is slower to touch than bytes are to copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ReusedBuffer:
    """Memory for bytes, made once and kept for the next that need it. Not thread-safe."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes, uint8, of any content; they are good until the next are taken."""
        if len(self._bytes) < n_bytes:
            self._bytes = np.empty(n_bytes, np.uint8)
        return self._bytes[:n_bytes]
