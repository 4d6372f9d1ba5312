"""What the ranks tell each other before they write: that all save the same, and what is registered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recckpt.dense.sharded import Summary, check_shares, is_whole, model_names
from recckpt.format.manifest import Names
from recckpt.parallel.ranks import Ranks
from recckpt.save.stage import Staged


@dataclass(frozen=True)
class RankState:
    """What one rank tells.

    Attributes:
        sharded: of its pieces of sharded tensors.
        digest: of what rank 0 saves for all; 0 where there is one rank.
        own_extra: names of registered objects of which each rank saves its own state.
        io_state: names of positions in the data.
    """

    sharded: Summary
    digest: int
    own_extra: tuple[str, ...]
    io_state: tuple[str, ...]


def compared(staged: Staged, ranks: Ranks) -> Names:
    """Return on rank 0 the names of what all ranks have. Collective.

    Raises:
        SaveFailedError: the ranks do not have the parts of one state. Where they differ in what rank 0 saves for all,
            a warning says so.
    """
    own = RankState(
        staged.sharded.summary,
        staged.digest.summary if staged.digest else 0,
        tuple(staged.own_extra),
        tuple(staged.io_state),
    )
    of_all: list[RankState] = ranks.gather(own)
    shares = [staged.sharded.shares]
    if not is_whole([each.sharded for each in of_all]):
        shares = ranks.on_all(lambda: staged.sharded.shares)
        ranks.on_first(lambda: check_shares(shares))
    digest = staged.digest
    if digest is not None and len({each.digest for each in of_all}) > 1:
        digest.warn(ranks.on_all(lambda: digest.by_name), ranks.rank)
    return Names(
        dense=(*staged.dense, *model_names(shares)),
        extra=tuple(staged.extra),
        io_state=_once(each.io_state for each in of_all),
        extra_of_ranks=_once(each.own_extra for each in of_all),
        dense_opt=staged.dense_opt,
    )


def _once(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in names for name in each))
