"""Removes ids and checkpoints on request."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from recckpt.checkpoint.read_again import remove_checked
from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.format.forgetting import Ids, checked_ids
from recckpt.output_dir.forget_requests import Forgotten, check_none_pending, pending, requests
from recckpt.output_dir.listing import Checkpoint, locate
from recckpt.output_dir.notes import noted_hosts
from recckpt.output_dir.rotation import deletable, pinned_ids
from recckpt.parallel.ranks import Ranks
from recckpt.save.job import Destination
from recckpt.sparse.split import filter_out_sparse_param
from recckpt.storage import Storage
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")
_BY = "manager.forget"
Left = list[tuple[str, Ids]]  # tables and ids that are yet to be forgotten in an output dir


class Removal:
    """Removes ids and checkpoints from the output dir of a saver. For this the saver takes the output dir over."""

    def __init__(self, to: Destination) -> None:
        self._to = to

    def before_load(self, storages: Iterable[Storage]) -> None:
        """Note which requests to forget exist before one rank reads the output dir, whatever path the caller gave.

        Raises RecckptError if a request is pending, because the checkpoints may still contain its ids.
        """
        if all(storage.url != self._to.storage.url for storage in storages):
            return
        known = requests(self._to.storage)
        check_none_pending(self._to.storage, "run `recckpt forget DIR`, or call manager.restore(), which does that")
        self._to.fence.note_requests(known)

    def before_restore(self, ranks: Ranks) -> Left:
        """Carry out pending requests before all ranks read the output dir; return those that remain. Collective."""
        return _forgetting(ranks).on_first(self._end_pending)

    def _end_pending(self) -> Left:
        storage, fence = self._to.storage, self._to.fence
        left: Left = []
        known = requests(storage)
        if not all(known.values()):
            fence.note_requests(known)  # every checkpoint is read after this call
            fence.hold()
            if not end_pending(self._to):
                with suppress(CorruptCheckpointError):  # the request itself is damaged, which was logged
                    left = [(each.table, each.ids) for each in pending(storage)]
        fence.note_requests(known)  # without newer requests: their ids may have been read
        return left

    def after_restore(self, left: Left, model: nn.Module) -> None:
        for table, ids in left:
            self._erase(_live(model, table), ids)

    def forget(self, ranks: Ranks, model: nn.Module, table: str, ids: Iterable[int] | Tensor) -> list[Forgotten]:
        """Do the work of :meth:`recckpt.CheckpointManager.forget`. Collective; no save may be running."""
        ranks = _forgetting(ranks)
        checked = ranks.on_each(lambda: checked_ids(ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids))
        digests = ranks.gather((table, hashlib.sha256(checked.tobytes()).hexdigest()))
        others = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if others:
            raise RecckptError(f"forgetting failed on rank {others[0]}: rank 0 has other ids or another table")
        live = _live(model, table)
        ranks.on_each(lambda: _check_erasable(live, table))
        is_live = any(ranks.gather(live is not None))
        ranks.on_first(lambda: self._check(table, checked, is_live=is_live))
        self._erase(live, checked)  # first: even if a later step fails, the next save does not contain the ids
        done, epoch = ranks.on_first(lambda: self._forget_here(table, checked))
        for guest in self._to.guests:
            guest.forget_together(ranks, epoch)
        ranks.on_first(self._warn_of_hosts)
        return done

    def _warn_of_hosts(self) -> None:
        hosts = [host.shown for host in noted_hosts(self._to.storage)]
        if hosts:
            log.warning("%s: near saves on %s may still have the ids", self._to.storage.url, ", ".join(hosts))

    def _forget_here(self, table: str, ids: Ids) -> tuple[list[Forgotten], int]:
        storage, fence = self._to.storage, self._to.fence
        self._to.end_compactions()
        for guest in self._to.guests:
            guest.void()
        return self._to.forgets.forget_as_owner(storage, fence, table, ids, _BY), fence.epoch

    def _check(self, table: str, ids: Ids, *, is_live: bool) -> None:
        storage, fence = self._to.storage, self._to.fence
        fence.hold()
        self._to.forgets.check(storage, fence.listing, table, ids, is_live=is_live)

    def _erase(self, live: SavableTable | None, ids: Ids) -> None:
        """Erase rows of this rank, and their averages.

        The next save is full, because a delta would list the ids as deleted.
        """
        if self._to.changes is not None:
            self._to.changes.drop_base()
        for table in () if live is None else (live, *getattr(live, "companions", ())):
            erase: Callable[[Tensor], object] = getattr(table, "erase")  # noqa: B009  # the protocol of tables lacks it
            erase(torch.from_numpy(ids.copy()))

    def delete(self, ranks: Ranks, ckpt_id: str) -> None:
        """Do the work of :meth:`recckpt.CheckpointManager.delete`. Collective; no save may be running."""
        failed = partial(_failed, "deleting")
        ranks = ranks if ranks.size == 1 else ranks.raising(failed)
        for rank, other in enumerate(ranks.gather(ckpt_id)):
            if other != ckpt_id:
                raise failed(rank, f"it deletes {other!r}, this rank {ckpt_id!r}: pass the same step on all ranks")
        changes = self._to.changes
        base = None if changes is None or changes.base is None else changes.base.save_id
        if ranks.on_first(lambda: base in {each.manifest.name for each in self._chosen(ckpt_id)}) and changes:
            changes.drop_base()  # first: even if a later step fails, no delta has a removed base
        ranks.on_first(lambda: self._remove(ckpt_id))

    def _chosen(self, ckpt_id: str) -> list[Checkpoint]:
        storage, fence = self._to.storage, self._to.fence
        locate(storage, ckpt_id)  # before anything changes
        fence.hold()
        bases = self._to.bases_of_guests(fence.listing)
        return deletable(fence.listing, ckpt_id, pinned_ids(storage), storage.url, bases)

    def _remove(self, ckpt_id: str) -> None:
        storage, fence = self._to.storage, self._to.fence
        victims = self._chosen(ckpt_id)
        gone = remove_checked(storage, fence, victims, self._to.concurrency)
        fence.write_index()
        if {victim.directory for victim in victims}.difference(gone):
            what = f"not all of {ckpt_id!r} could be removed, as the log says"
            raise RecckptError(f"{storage.url}: {what}; delete it again")
        log.info("%s: %s was deleted on request", storage.url, ckpt_id)


def end_pending(to: Destination) -> bool:
    """Carry out pending requests, as the owner; return whether all are done."""
    if not to.fence.is_settled:
        to.end_compactions()
    return to.forgets.settle(to.storage, to.fence)


def _live(model: nn.Module, table: str) -> SavableTable | None:
    tables = filter_out_sparse_param(model)
    counts = (getattr(each, "candidates", None) for each in tables.values())
    return tables.get(table) or next((each for each in counts if each is not None and each.name == table), None)


def _check_erasable(live: SavableTable | None, table: str) -> None:
    if live is not None and not callable(getattr(live, "erase", None)):
        raise TypeError(f"table {table!r} is a {type(live).__name__} without erase(ids), so nothing was forgotten")


def _failed(what: str, rank: int, cause: str) -> RecckptError:
    return RecckptError(f"{what} failed on rank {rank}: {cause}")


def _forgetting(ranks: Ranks) -> Ranks:
    """Return the ranks, set up to raise errors of forgetting; a single rank raises its own error."""
    return ranks if ranks.size == 1 else ranks.raising(partial(_failed, "forgetting"))
