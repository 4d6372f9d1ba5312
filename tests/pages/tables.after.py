"""Bags have the shapes that the page says, and what stands for no id has no row."""

assert {name: tuple(rows.shape) for name, rows in pooled.items()} == {"genre": (3, 16), "tag": (3, 16)}
assert pooled["genre"][1].abs().sum() == 0
assert 9 in genres.ids().tolist()
