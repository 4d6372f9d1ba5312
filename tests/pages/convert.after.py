"""The tensor that was not named became dense state, and CSV came back."""

import polars as pl

assert CheckpointReader("runs/model").tensor_names() == ["top.bias"]

there, back = (pl.read_csv(name).sort("id") for name in ("item.csv", "sheet.csv"))
assert back.columns == ["id", "field_0", "field_1"]
assert back["id"].to_list() == there["id"].to_list() == [-(2**63), 17, 2**63 - 1]
for name, field in (("x", "field_0"), ("y", "field_1")):
    assert back[field].cast(pl.Float32).equals(there[name].cast(pl.Float32))
