"""The tensor that was not named became dense state."""

assert CheckpointReader("runs/model").tensor_names() == ["top.bias"]
