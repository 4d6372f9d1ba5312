"""The diff found what was trained between the two saves."""

connection.close()
assert (item.added, item.changed) == (100, 100)
assert isinstance(largest, float)
assert how.is_healthy
assert (rows.rows_read, rows.untrained) == (200, 0)
assert page.startswith("<!doctype html>")
