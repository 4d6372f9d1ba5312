"""The second call went on where the page says, and nothing was amiss."""

assert "restored ckpt_40, step 40" in what_was_said()
assert "from scratch" not in what_was_said()
