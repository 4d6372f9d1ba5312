"""What refuses a save before anything is staged: ranks at different saves, shared ids, too little room."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from recckpt.dense.sharded import is_sharded, local_bytes
from recckpt.errors import RecckptError
from recckpt.format.buckets import Slice
from recckpt.parallel.ranks import Ranks
from recckpt.save.arguments import check_trained
from recckpt.save.choice import Choice, slots_of_table
from recckpt.save.delta_base import Changes
from recckpt.save.job import Destination, Job, Live
from recckpt.save.save_info import SaveInfo
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.split import state_of
from recckpt.storage import Storage
from recckpt.text import size
from recckpt.types import SavableTable

_T = TypeVar("_T")
_Owned = Mapping[Slice | None, Sequence[str]]  # names of tables, by the ids that a rank owns of them


@dataclass(frozen=True)
class Need:
    """Bytes that a rank writes, and the device of its work dir, through which they go."""

    n_bytes: int
    device: tuple[str, int] | None

    def less(self, n_bytes: int) -> Need:
        """Return the need of a rank that writes so many bytes less."""
        return replace(self, n_bytes=self.n_bytes - n_bytes)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others before a save; whether it writes deltas, and its base is to be confirmed.

    ``unmatched`` is what its options say of nothing that it has.
    """

    ckpt_id: str
    step: int | None
    owned: _Owned
    need: Need
    choice: Choice
    unmatched: frozenset[str]
    writes_deltas: bool
    is_in_doubt: bool


@dataclass(frozen=True)
class Checked:
    """The tables of a model, its dense state, and what each rank would write of them."""

    tables: Mapping[str, SavableTable]
    dense: Mapping[str, Any]
    needs: Sequence[Need]


def check(live: Live, job: Job, to: Destination) -> Checked:
    """Refuse what cannot be saved, and return what is to be. Collective.

    Where there are deltas, only staging shows how much room a save needs.

    Raises:
        ValueError: two tables share a name, several ranks own the same ids of one, the optimizer trains others, or
            options say of nothing, or of what they cannot be said of, what is to be saved.
        SaveFailedError: the ranks are not at the same save, or it does not fit, or another rank failed.
        WriterFencedError: another writer has taken the output dir over since a checkpoint was restored.
    """
    info, ranks, work_dir, changes = job.info, job.ranks, to.transfers.work_dir, to.changes

    def tell(parts: tuple[dict[str, SavableTable], dict[str, Any]]) -> _Told:
        need = Need(estimated_bytes(*parts, ranks.rank, live.choice), work_dir.device if work_dir else None)
        deltas = changes is not None, changes is not None and _is_in_doubt(changes, to, ranks)
        said = live.choice, live.choice.unmatched(parts[0])
        return _Told(info.ckpt_id, info.step, _owned(parts[0]), need, *said, *deltas)

    def take() -> tuple[dict[str, SavableTable], dict[str, Any]]:
        parts = state_of(live.model)
        check_trained(live.sparse_optim, parts[0])  # tables may be others than when the saver was made
        live.choice.check(parts[0])
        return parts

    parts, told = agreed(take, info, ranks, tell)
    _check_same_save(told, info)
    if ranks.size > 1:
        _check_owners([each.owned for each in told])
    if told[0].is_in_doubt:
        ranks.on_first(lambda: _confirm_base(job, to))
    needs = [each.need for each in told]
    if not told[0].writes_deltas:
        agreed(lambda: check_rooms(needs, to), info, ranks)
    return Checked(*parts, needs)


def agreed(
    work: Callable[[], _T], info: SaveInfo, ranks: Ranks, tell: Callable[[_T], Any] | None = None
) -> tuple[_T, list[Any]]:
    """Do work on every rank; return what it gave here, and what each rank tells of what it gave there. Collective.

    Raises:
        Exception: whatever work raised here.
        SaveFailedError: that was an OSError, or work failed on another rank, or one is missing.
    """
    found: list[_T] = []
    own, failure = None, None
    try:
        found.append(work())
        own = tell(found[0]) if tell else None
    except Exception as error:
        failure = error
    outcomes = ranks.gather((failure and f"{type(failure).__name__}: {failure}", own))
    if isinstance(failure, OSError) and not isinstance(failure, RecckptError):  # of the storage, such as a full one
        raise info.failure(ranks.rank, outcomes[ranks.rank][0]) from failure
    if failure is not None:
        raise failure
    for rank, (reason, _) in enumerate(outcomes):
        if reason is not None:
            raise info.failure(rank, reason)
    return found[0], [told for _, told in outcomes]


def _is_in_doubt(changes: Changes, to: Destination, ranks: Ranks) -> bool:
    return changes.has_candidate or (ranks.rank == 0 and changes.is_base_gone(to.storage, to.fence))


def _confirm_base(job: Job, to: Destination) -> None:
    """Take the output dir over before anything is staged, which shows whether deltas can stand on what was restored."""
    if to.changes is not None:
        to.fence.is_resumed = job.is_resumed
        to.changes.confirm(to.storage, to.fence)


def _check_same_save(told: Sequence[_Told], info: SaveInfo) -> None:
    first = told[0]
    for rank, each in enumerate(told):
        if (each.ckpt_id, each.step) != (first.ckpt_id, first.step):
            cause = f"it saves {each.ckpt_id!r} of step {each.step}, rank 0 {first.ckpt_id!r} of step {first.step}"
            raise info.failure(rank, f"{cause}: all ranks save the same")
        if each.choice != first.choice:
            cause = "its save_slots, save_where or store is not that of rank 0"
            raise info.failure(rank, f"{cause}: give all ranks the same")
    unmatched = frozenset.intersection(*(each.unmatched for each in told))
    if unmatched:
        raise ValueError("; ".join(sorted(unmatched)))


def check_rooms(needs: Sequence[Need], to: Destination) -> None:
    """Refuse a save that would not fit into the storage, or the part of this host not into its work dir."""
    check_room(to.storage, sum(each.n_bytes for each in needs), to.min_free_bytes)
    work_dir = to.transfers.work_dir
    if work_dir is not None:
        work_dir.check_room(sum(each.n_bytes for each in needs if each.device == work_dir.device))


def has_room(needs: Sequence[Need], to: Destination) -> bool:
    """Say whether :func:`check_rooms` finds room for a save; another error of the storage is for that to raise."""
    try:
        check_rooms(needs, to)
    except OSError as error:
        return error.errno != errno.ENOSPC
    return True


def check_room(storage: Storage, n_bytes: int, min_free_bytes: int) -> None:
    """Refuse a save that would not fit, where the storage knows its room; others find out when they write.

    Args:
        storage: where the save goes.
        n_bytes: an estimate of what the save writes.
        min_free_bytes: what must be left afterwards.

    Raises:
        OSError: ENOSPC, with what is free and what is needed; or the output dir is gone.
    """
    storage.check_there()
    free = storage.free_bytes()
    if free is not None and free - n_bytes < min_free_bytes:
        kept = f" and leave {size(min_free_bytes)}" if min_free_bytes else ""
        raise OSError(
            errno.ENOSPC,
            f"found {size(free)} free, expected {size(n_bytes)} for the save{kept}; make room, or lower max_keep",
            storage.url,
        )


def estimated_bytes(tables: Mapping[str, SavableTable], dense: Mapping[str, Any], rank: int, choice: Choice) -> int:
    """Return about how many bytes a rank writes: its rows, its pieces, and as rank 0 the dense state.

    0 where nothing can be said, of a state that staging refuses.
    """
    try:
        return sum(_rows_bytes(table, choice) for table in tables.values()) + sum(
            _written_bytes(value, rank) for value in dense.values() if isinstance(value, Tensor)
        )
    except Exception:
        return 0


def _rows_bytes(table: SavableTable, choice: Choice) -> int:
    """Return the bytes of the rows of a table; 0 where conditions choose them, and a save finds out how many it has."""
    slots = slots_of_table(table)
    wanted = choice.of_table(table).of(table.name, slots)
    if wanted is not None and wanted.where is not None:
        return 0
    row_bytes = 8 + sum(slot.row_bytes for slot in slots) if wanted is None else wanted.row_bytes
    return source_of(table).n_rows * row_bytes


def _written_bytes(value: Tensor, rank: int) -> int:
    if is_sharded(value):
        return local_bytes(value)
    return value.nbytes if rank == 0 else 0


def _owned(tables: Mapping[str, SavableTable]) -> _Owned:
    found: dict[Slice | None, list[str]] = {}
    for name, table in tables.items():
        found.setdefault(getattr(table, "slice", None), []).append(name)
    return found


def _check_owners(owned: Sequence[_Owned]) -> None:
    """Refuse tables of which several ranks own the same ids."""
    names = sorted({name for of_rank in owned for names in of_rank.values() for name in names})
    overlaps = [text for name in names for text in _overlap(name, owned)]
    if overlaps:
        raise ValueError(
            f"{'; '.join(overlaps)}: an id belongs to one rank, or it is saved several times and cannot be loaded; "
            "make the table a recckpt.sparse.ShardedHashTable, or give it slice=gen_slice(rank, ranks)"
        )


def _overlap(name: str, owned: Sequence[_Owned]) -> list[str]:
    """Say which two ranks own the same ids of a table, if two do: neighbours, once they are in the order of ids."""
    ranges = sorted(
        ((own.begin / own.size, own.end / own.size, rank) if own else (0.0, 1.0, rank))
        for rank, of_rank in enumerate(owned)
        for own, names in of_rank.items()
        if name in names and (own is None or own.begin < own.end)
    )
    for (_, end, one), (begin, _, other) in pairwise(ranges):
        if begin < end:
            return [f"table {name!r}: ranks {min(one, other)} and {max(one, other)} own the same ids"]
    return []
