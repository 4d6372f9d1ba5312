"""What the page saves of tables of others comes back, and each save takes all rows of a library once."""

before, theirs.rows = theirs.rows, {}
saver.load()
assert theirs.rows.keys() == before.keys()
assert all(torch.equal(own, then) for key in before for own, then in zip(theirs.rows[key], before[key], strict=True))
theirs.n_exports = 0
[kept] = [table for table in saver.save("c").tables if table.name == "item"]
assert kept.rows == 3
assert theirs.n_exports == 1
