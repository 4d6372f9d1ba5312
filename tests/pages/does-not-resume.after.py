"""The loop has found the first checkpoint that is not finite, and the line for bfloat16 makes numbers.

Of the damaged checkpoint the rows that are whole are there, and the others as an older one has them.
"""

said = what_was_said().splitlines()  # type: ignore[name-defined]
assert "ckpt_300 ['dense.bias', 'user@sparse_adamw_exp_avg of id 307']" in said
bits = torch.tensor([1.5, torch.nan], dtype=torch.bfloat16).view(torch.uint16).numpy()
assert np.isnan((bits.astype("u4") << 16).view("f4")).tolist() == [False, True]  # type: ignore[name-defined]
rows, _ = user.lookup(torch.arange(300_000))  # type: ignore[name-defined]
assert set(rows.unique().tolist()) == {3.0, 4.0}
rows, _ = model["new"].lookup(torch.arange(300_000))  # type: ignore[name-defined]
assert rows.unique().tolist() == [4.0]
assert model["dense"].bias.item() == 3.0  # type: ignore[name-defined]
