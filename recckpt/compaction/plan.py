"""How the rows of a checkpoint are cut into parts: by ranges of buckets, each part a piece of work by itself."""

from __future__ import annotations

from dataclasses import dataclass

from recckpt.checkpoint.chain import OpenChain
from recckpt.compaction.chain_rows import FRACTIONS, size_of
from recckpt.format.buckets import gen_slice
from recckpt.sparse.files.part_plan import PART_BYTES, PartPlan, plan_parts

LEAST_PART_BYTES = 128 << 20
_MANY = 64  # parts are as small as that for this many of them: pieces of work for many workers


@dataclass(frozen=True)
class PlannedPart:
    """One part to write, of one of the shards, and about how many bytes its rows have in all links."""

    shard: int
    shards: int
    plan: PartPlan
    n_bytes: int


def plan_of_chain(chain: OpenChain) -> list[PlannedPart]:
    """Divide the rows of a chain over as many shards as the newest link has, and over parts of about equal bytes.

    Shards get equal slices of the hashed ids, as ranks do; their parts come in the order of a catalog.
    """
    newest, planned = chain.manifest, []
    names = {table.name: [slot.name for slot in table.slots] for table in newest.tables}
    sizes = {table: size_of(chain.table(table, slots).links) for table, slots in names.items()}
    for shard in range(len(newest.shards)):
        own = gen_slice(shard, len(newest.shards))
        plans = plan_parts(
            list(sizes.values()),
            _MANY,
            least_bytes=LEAST_PART_BYTES * FRACTIONS,
            part_bytes=PART_BYTES * FRACTIONS,
            buckets=(own.begin, own.end),
        )
        for plan in plans:
            n_bytes = sum(sizes[cut.table].within(cut.begin, cut.end) for cut in plan.ranges) // FRACTIONS
            planned.append(PlannedPart(shard, len(newest.shards), plan, n_bytes))
    return planned
