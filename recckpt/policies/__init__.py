"""Pure decisions: when to save, and what to keep."""
