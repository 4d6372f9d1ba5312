"""Contracts of tables, as pytest suites: to test your own table, subclass one of them in a test file.

No other part of recckpt needs pytest.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("recckpt.testing.live_tables", "recckpt.testing.savable_tables")

from recckpt.testing.live_tables import LiveTableContract  # noqa: E402
from recckpt.testing.savable_tables import SavableTableContract  # noqa: E402

__all__ = ["LiveTableContract", "SavableTableContract"]
