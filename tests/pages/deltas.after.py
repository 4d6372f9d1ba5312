"""The numbers that the page spells out are those that deltas=True stands for."""

assert deltas == Deltas()
assert manager.counts.deltas == 2
