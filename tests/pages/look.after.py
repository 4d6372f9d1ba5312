"""The diff found what was trained between the two saves."""

connection.close()
assert (item.added, item.changed) == (100, 100)
assert isinstance(largest, float)
