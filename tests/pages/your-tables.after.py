"""What the page saves of tables of others comes back, and its second save was a delta of what was trained."""

before = dict(theirs.rows)
theirs.clear()
saver.load()
assert theirs.rows.keys() == before.keys() == {7, 8, -3, 1 << 40}
assert all(torch.equal(theirs.rows[key][0], before[key][0]) for key in before)
[entry] = [table for table in saver.save("c").tables if table.name == "item"]
assert (entry.rows, entry.delta.upserts, entry.delta.deletes) == (4, 0, 0)
