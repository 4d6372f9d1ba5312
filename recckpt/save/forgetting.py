"""What a saver does about ids that are to be forgotten: in its own tables, in its output dir, and before it is read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from recckpt.errors import CorruptCheckpointError, RecckptError, WriterFencedError
from recckpt.forgetting.forget import check_table, checked_ids
from recckpt.forgetting.forgetting import Forgotten, check_readable, forget_as_owner, scan, settle
from recckpt.forgetting.ids_in_files import Ids
from recckpt.near.tier import NearTier
from recckpt.output_dir.forget_requests import audit, check_none_pending, done_requests, pending, requests
from recckpt.output_dir.known_mirrors import known_mirrors
from recckpt.output_dir.near_hosts import hosts_behind
from recckpt.parallel.ranks import Ranks
from recckpt.save.job import Destination
from recckpt.sparse.split import filter_out_sparse_param
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")

_BY = "manager.forget"
Left = list[tuple[str, Ids]]  # tables and ids that are yet to be forgotten in an output dir


class Forgetting:
    """The requests to forget ids of one saver's output dir, whose owner the saver is, or becomes."""

    def __init__(self, to: Destination) -> None:
        self._to = to

    def before_load(self) -> None:
        """Note what has been forgotten before one rank reads the output dir.

        Raises:
            RecckptError: a request is not ended, so that what is read may have its ids.
        """
        known = requests(self._to.storage)
        check_none_pending(self._to.storage, "run `recckpt forget DIR`, or call manager.restore(), which ends it")
        self._to.fence.note_requests(known)

    def before_restore(self, ranks: Ranks) -> Left:
        """End what is pending before all ranks read the output dir; return what could not be. Collective."""
        return _with_errors(ranks).on_first(self._end_pending)

    def _end_pending(self) -> Left:
        storage, fence = self._to.storage, self._to.fence
        left: Left = []
        if not all(requests(storage).values()):
            fence.hold()
            if not end_pending(self._to):
                with suppress(CorruptCheckpointError):  # of a request that is damaged itself, as the log says by now
                    left = [(each.table, each.ids) for each in pending(storage)]
        fence.note_requests(requests(storage))
        return left

    def after_restore(self, left: Left, model: nn.Module) -> None:
        """Drop the rows of ids that could not be removed from what was restored."""
        for table, ids in left:
            self._erase(_live(model, table), ids)

    def forget(self, ranks: Ranks, model: nn.Module, table: str, ids: Iterable[int] | Tensor) -> list[Forgotten]:
        """As :meth:`recckpt.CheckpointManager.forget`. Collective; no save is under way."""
        ranks = _with_errors(ranks)
        checked = ranks.on_each(lambda: checked_ids(ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids))
        digests = ranks.gather((table, hashlib.sha256(checked.tobytes()).hexdigest()))
        others = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if others:
            raise RecckptError(f"forgetting failed on rank {others[0]}: it was given other ids, or another table")
        live = _live(model, table)
        ranks.on_each(lambda: _check_erasable(live, table))
        is_live = any(ranks.gather(live is not None))
        ranks.on_first(lambda: self._check(table, checked, is_live=is_live))
        self._erase(live, checked)  # first: whatever fails from here on, the next save does not contain the ids
        done, epoch, known = ranks.on_first(lambda: self._forget_here(table, checked))
        if self._to.near is not None:
            self._forget_near(self._to.near, ranks, epoch, known)
        return done

    def _forget_near(self, near: NearTier, ranks: Ranks, epoch: int, known: frozenset[str]) -> None:
        """Remove the near saves of all hosts; they count no more. Collective."""
        near.forget_together(ranks, epoch, known)
        ranks.on_first(self._warn_of_hosts)

    def _warn_of_hosts(self) -> None:
        hosts = [host.shown for host in hosts_behind(self._to.storage)]
        if hosts:
            log.warning("%s: near saves on %s may still have the ids", self._to.storage.url, ", ".join(hosts))

    def _forget_here(self, table: str, ids: Ids) -> tuple[list[Forgotten], int, frozenset[str]]:
        """Return what was done, the epoch of this owner, and all requests that have been carried out."""
        storage, fence = self._to.storage, self._to.fence
        self._to.offers.close()  # it would go on writing rows of these ids to its own directory
        if self._to.near is not None:  # rule *forget_in_new_epoch*: near saves may have rows of these ids
            fence.take_over_from_itself()
            self._to.near.void()
        try:
            done = forget_as_owner(storage, fence, table, ids, _BY)
            forgotten = done_requests(storage)
            behind = [each.url for each in known_mirrors(storage) if each.is_behind(forgotten)]
            if behind:  # of which none is asked: training does not wait for copies
                names = ", ".join(behind)
                log.warning("%s: its mirrors %s, and theirs, have the ids until their next pass", storage.url, names)
            return done, fence.epoch, forgotten
        finally:
            fence.note_requests(requests(storage))  # the tables of this process have done their part

    def _check(self, table: str, ids: Ids, *, is_live: bool) -> None:
        """Refuse what cannot be forgotten, before anything changes but the owner of the output dir."""
        storage, fence = self._to.storage, self._to.fence
        fence.hold()
        check_readable(fence.listing)
        if not is_live:
            check_table(fence.listing, table, storage.url)
        scan(storage, fence.listing, table, ids)
        audit(storage)  # as the checkpoints, whole before anything changes
        known_mirrors(storage)

    def _erase(self, live: SavableTable | None, ids: Ids) -> None:
        """Drop rows of this rank; the next save is full, since a delta would name the ids as deleted."""
        if self._to.changes is not None:
            self._to.changes.drop_base()
        if live is not None:
            _eraser(live)(torch.from_numpy(ids.copy()))


def end_pending(to: Destination) -> bool:
    """Carry out, as the owner, what earlier owners were asked; say whether nothing is left, and log why if not.

    Raises:
        WriterFencedError: another writer has taken the output dir over.
    """
    if not to.fence.is_settled:
        to.offers.close()  # it would go on writing rows of these ids to its own directory
    try:
        settle(to.storage, to.fence)
    except WriterFencedError:
        raise
    except (RecckptError, OSError) as error:
        log.error("%s: ids that were to be forgotten may still be there: %s", to.storage.url, error)
        return False
    return True


def _live(model: nn.Module, table: str) -> SavableTable | None:
    """Return a table of the model, or that of the counts of one, None where it has no such table."""
    tables = filter_out_sparse_param(model)
    counts = (getattr(each, "candidates", None) for each in tables.values())
    return tables.get(table) or next((each for each in counts if each is not None and each.name == table), None)


def _check_erasable(live: SavableTable | None, table: str) -> None:
    if live is not None and not callable(getattr(live, "erase", None)):
        raise TypeError(f"table {table!r} is a {type(live).__name__} without erase(ids), so nothing was forgotten")


def _eraser(live: SavableTable) -> Callable[[Tensor], object]:
    erase: Callable[[Tensor], object] = getattr(live, "erase")  # noqa: B009  # the protocol of tables lacks it
    return erase


def _with_errors(ranks: Ranks) -> Ranks:
    """Return the ranks; where one is alone, its error says enough by itself."""
    return ranks if ranks.size == 1 else ranks.raising(_failed)


def _failed(rank: int, cause: str) -> RecckptError:
    return RecckptError(f"forgetting failed on rank {rank}: {cause}")
