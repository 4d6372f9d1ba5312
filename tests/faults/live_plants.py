"""What an adapter of live tables can get wrong, as bugs in the code: each lets a save lack rows without a word."""

from faults.plant import Plant

ANNOUNCER, RULES = "recckpt.live.torch_announcer:TorchAnnouncer", "recckpt.live.torch_rules"
PRINTS = "recckpt.sparse.table.fingerprints"
OF_SLOTS = "for spec in rows.slots:"
OF_SUMS = "for spec in [spec for spec in rows.slots if spec.name.endswith('_sum')] or rows.slots:"

LIVE_PLANTS = {
    "live rows are not copied aside": Plant(
        "recckpt.sparse.table.observers:Observers.keep", "if snapshot is not None and len(rows):", "if False:"
    ),
    "a failed save has read the marks": Plant(
        "recckpt.sparse.table.marks:Marks.end", "_Since(before, sets[:1]) if base", "_Since(before, sets[1:]) if base"
    ),
    "rows are compared by the sum of Adagrad": (
        Plant(f"{PRINTS}:_prints_on_cpu", OF_SLOTS, OF_SUMS),
        Plant(f"{PRINTS}:_prints_of", OF_SLOTS, OF_SUMS),
    ),
    "AdamW changes the rows that Adagrad does": Plant(
        f"{RULES}:_adam_reason", 'return "its moments move every row at each step"', "return None"
    ),
    "a subclass is taken for its class": Plant(
        f"{RULES}:rule_of",
        "_RULES.get(type(optimizer))",
        "next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)",
    ),
    "a state that lies elsewhere is taken for that of before": Plant(
        "recckpt.live.store:LiveStore._noted_columns", "if self._memory != memory:", "if not self._memory:"
    ),
    "each rank marks what it looked up itself": (
        Plant(
            f"{ANNOUNCER}.install",
            "    for module in modules:\n",
            "    for module in modules:\n"
            "        module.register_forward_pre_hook(lambda module, args: vars(self).update(own=args[0].flatten()))\n",
        ),
        Plant(
            f"{ANNOUNCER}._announce_step",
            "        elif part.is_sparse:\n",
            "        elif table.reason is None:\n            self._door.announce(self.own)\n"
            "        elif part.is_sparse:\n",
        ),
    ),
    "the first table of a feature alone is marked": Plant(
        "recckpt.live.fbgemm_hooks:KernelHooks._rows",
        "if table in self._doors and begin < end:",
        "if table == tables[0] and begin < end:",
    ),
}
