"""The span was printed, and the report read the newest checkpoint."""

assert '"name": "recckpt.save"' in what_was_said()  # type: ignore[name-defined]
assert how.is_healthy
assert (rows.rows_read, rows.untrained) == (1000, 0)
assert page.startswith("<!doctype html>")
