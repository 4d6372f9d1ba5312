"""Rows come in the order of the ids, those of unknown ids are zeros, and the diff found what was trained."""

connection.close()
assert found.tolist() == [True, True, True, False]
assert vectors[0].tolist() == vectors[2].tolist() != vectors[1].tolist()
assert not vectors[3].any()
assert moments.shape == (2, 8)
assert matrix.shape == (1000, 8)
assert (item.added, item.changed) == (100, 100)
assert isinstance(largest, float)
