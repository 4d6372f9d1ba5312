"""The span was printed."""

assert '"name": "recckpt.save"' in what_was_said()  # type: ignore[name-defined]
