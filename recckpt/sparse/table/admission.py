"""Which ids of a look-up get rows: a policy decides, and those that it refuses are counted and read as if new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.policies.admit import Admit, as_admit
from recckpt.sparse.table.candidates import Candidates, MakeTable, candidates_of
from recckpt.sparse.table.checks import check_owned
from recckpt.sparse.table.first_values import first_embeddings
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.recomputation import Refusals
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.tracking import TableTime

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
FetchRows = Callable[[Int64s, Int64s], Tensor]


class Fetched(NamedTuple):
    """Embeddings of ids, and where among them those are that have rows, which alone get gradients; None for all."""

    rows: Tensor
    present: Int64s | None


class Admission:
    """A policy, and the counts of those that wait for a row, if the policy goes by them.

    Args:
        policy: says which ids get rows.
        table_time: that of the table.
        make: makes the table of the counts.
    """

    def __init__(self, policy: Admit, table_time: TableTime, make: MakeTable) -> None:
        self.policy = policy
        self.candidates: Candidates | None = candidates_of(make, policy.bloom) if policy.counts else None
        self.refusals = Refusals()
        self._table_time = table_time

    def fetch(self, table: TableModule, ids: Int64s, occurrences: Int64s, fetch_rows: FetchRows) -> Fetched:
        """Return the embeddings of ids; who is admitted gets a row, all others read what that would begin with.

        ``fetch_rows`` gives the ids rows and returns their embeddings. First the rows change, then the counts, each as
        a whole or not at all.
        """
        with table.store.lock:
            absent = np.flatnonzero(table.store.find(ids) < 0)
            if len(absent) == 0:
                self.refusals.note(ids, None)
                return Fetched(fetch_rows(ids, occurrences), None)
            index = IdIndex()
            index.reserve(len(absent))
            groups, new_ids = index.find_or_add(ids[absent])
            check_owned(table.name, table.slice, new_ids)
            occurred = np.bincount(groups, occurrences[absent], len(new_ids)).astype(np.int64)
            counts = occurred if self.candidates is None else self.candidates.counts(new_ids, occurred)
            is_in = self._decide(table.name, new_ids, counts)
            is_out = np.flatnonzero(~is_in)
            first = first_embeddings(table, new_ids[is_out])
            is_present = np.ones(len(ids), np.bool_)
            is_present[absent] = is_in[groups]
            present, refused = np.flatnonzero(is_present), np.flatnonzero(~is_present)
            occurrences, first_at = occurrences.copy(), np.empty(len(new_ids), np.int64)
            first_at[groups[::-1]] = absent[::-1]  # where each comes last here, and first in the look-up
            occurrences[first_at] += counts - occurred  # what was counted while the id waited
            rows = fetch_rows(ids[present], occurrences[present])
            places = np.empty(len(ids), np.int64)  # of each id among the rows and what the others read
            places[present] = np.arange(len(present))
            places[refused] = len(present) + (np.cumsum(~is_in) - 1)[groups[~is_in[groups]]]
            rows = torch.cat([rows, first]).index_select(0, torch.from_numpy(places).to(rows.device))
            if self.candidates is not None:
                self.candidates.add(new_ids[is_out], occurred[is_out])
            self.forget(new_ids[is_in])
            self.refusals.note(ids, ~is_present if len(refused) else None)
        return Fetched(rows, present if len(refused) else None)

    def forget(self, ids: Int64s) -> None:
        """Drop what was counted of ids, which have rows now or are gone, where it is counted by id."""
        if self.candidates is not None:
            self.candidates.forget(ids)

    def forget_present(self, store: RowStore) -> None:
        """Drop the counts of ids to which others than the policy have given rows, as a load that merges does."""
        if self.candidates is not None:
            with store.lock:
                waiting = self.candidates.waiting()
                self.forget(waiting[store.find(waiting) >= 0])

    def _decide(self, table: str, ids: Int64s, counts: Int64s) -> Bools:
        """Return which of different ids get rows, as the policy says."""
        step = self._table_time.step
        if self.policy.needs_step and step is None:
            raise ValueError(
                f"table {table!r}: {self.policy!r} tosses anew at each step, and nobody has said which this is: "
                "make a CheckpointManager and call its step(), or set table.step"
            )
        mask = self.policy.admits(ids, counts, step or 0)
        if not isinstance(mask, np.ndarray) or mask.shape != ids.shape or mask.dtype != bool:
            answer = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise ValueError(f"table {table!r}: admit returned {answer}, expected {len(ids)} bools, one an id")
        return mask


def admission_of(admit: Any, table_time: TableTime, make: MakeTable) -> Admission | None:
    """Return what admits rows by a policy, None where all ids get them."""
    return None if admit is None else Admission(as_admit(admit), table_time, make)
