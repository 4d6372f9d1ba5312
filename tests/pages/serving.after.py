"""Rows come in the order of the ids, and those of unknown ids are zeros."""

assert found.tolist() == [True, True, True, False]
assert vectors[0].tolist() == vectors[2].tolist() != vectors[1].tolist()
assert not vectors[3].any()
assert moments.shape == (2, 8)
