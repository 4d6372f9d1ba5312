"""Which ids of a look-up get rows: a policy decides, and those that it refuses are counted and read as if new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.policies.admit import Admit, as_admit
from recckpt.sparse.table.candidates import Candidates, MakeTable, candidates_of
from recckpt.sparse.table.checks import check_owned
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.initializers import TorchInitializer
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.recomputation import Refusals
from recckpt.sparse.table.tracking import TrackedTable

if TYPE_CHECKING:
    from recckpt.sparse.table.table import HashTable

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_OTHER_DRAWS = (
    "a look-up was made once more in a backward pass, and its initializer has drawn from torch's generator for the ids "
    "that were new in the forward run: dropout and the like behind it draw other numbers this time; call the table "
    "outside of torch.utils.checkpoint, or take an initializer of recckpt.sparse, which draws by id"
)


class Fetched(NamedTuple):
    """Embeddings of ids, and where among them those are that have rows, which alone get gradients; None for all."""

    rows: Tensor
    held: Int64s | None


class Admission:
    """A policy, and the counts of those that wait for a row, if the policy goes by them."""

    def __init__(self, policy: Admit, make: MakeTable) -> None:
        self.policy = policy
        self.candidates: Candidates | None = candidates_of(make, policy.bloom) if policy.counts else None
        if self.candidates is not None:
            self.candidates.table.is_trained = False
        self.refusals = Refusals()

    def fetch(self, table: HashTable, ids: Int64s, occurrences: Int64s) -> Fetched:
        """Return the embeddings of ids; who is admitted gets a row, all others read what that would begin with.

        First the rows change, then the counts, each as a whole or not at all.
        """
        with table.store.lock:
            absent = np.flatnonzero(table.store.find(ids) < 0)
            if len(absent) == 0:
                self.refusals.note(ids, None)
                return Fetched(table.fetch_all(ids, occurrences), None)
            index = IdIndex()
            index.reserve(len(absent))
            groups, new_ids = index.find_or_add(ids[absent])
            check_owned(table.name, table.slice, new_ids)
            occurred = np.bincount(groups, occurrences[absent], len(new_ids)).astype(np.int64)
            counts = occurred if self.candidates is None else self.candidates.counts(new_ids, occurred)
            is_in = self._decided(table, new_ids, counts)
            is_out = np.flatnonzero(~is_in)
            first = table.first_embeddings(new_ids[is_out])
            is_held = np.ones(len(ids), np.bool_)
            is_held[absent] = is_in[groups]
            held, refused = np.flatnonzero(is_held), np.flatnonzero(~is_held)
            occurrences, first_at = occurrences.copy(), np.empty(len(new_ids), np.int64)
            first_at[groups[::-1]] = absent[::-1]  # where each comes last here, and first in the look-up
            occurrences[first_at] += counts - occurred  # what was counted while the id waited
            rows = table.fetch_all(ids[held], occurrences[held])
            places = np.empty(len(ids), np.int64)  # of each id among the rows and what the others read
            places[held] = np.arange(len(held))
            places[refused] = len(held) + (np.cumsum(~is_in) - 1)[groups[~is_in[groups]]]
            rows = torch.cat([rows, first]).index_select(0, torch.from_numpy(places).to(rows.device))
            if self.candidates is not None:
                self.candidates.add(new_ids[is_out], occurred[is_out])
            self.forget(new_ids[is_in])
            self.refusals.note(ids, ~is_held if len(refused) else None)
        return Fetched(rows, held if len(refused) else None)

    def forget(self, ids: Int64s) -> None:
        """Drop what was counted of ids, which have rows now or are gone, where it is counted by id."""
        if self.candidates is not None:
            self.candidates.forget(ids)

    def _decided(self, table: HashTable, ids: Int64s, counts: Int64s) -> Bools:
        """Return which of different ids get rows, as the policy says."""
        if self.policy.needs_step and not table.is_step_known:
            raise ValueError(
                f"table {table.name!r}: {self.policy!r} tosses anew at each step, and nobody has said which this is: "
                "make a CheckpointManager and call its step(), or set table.step"
            )
        mask = self.policy.admits(ids, counts, table.step)
        if not isinstance(mask, np.ndarray) or mask.shape != ids.shape or mask.dtype != bool:
            found = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise ValueError(f"table {table.name!r}: admit returned {found}, expected {len(ids)} bools, one an id")
        return mask


class AdmittingTable(TrackedTable):
    """A table that may let some ids wait for their rows.

    Attributes:
        is_trained: False for a table of counts, which belongs to another one.
    """

    is_trained = True
    _admission: Admission | None = None

    @property
    def candidates(self) -> HashTable | None:
        """The counts of ids that wait for a row, which are saved as a table of their own; None without such."""
        found = None if self._admission is None else self._admission.candidates
        return None if found is None else found.table

    @property
    def admit(self) -> Admit | None:
        """The policy that says which ids get rows; None where all do."""
        return None if self._admission is None else self._admission.policy

    @property
    def admission(self) -> Admission | None:
        """What lets ids wait; None where all get rows."""
        return self._admission

    @property
    def counts_occurrences(self) -> bool:
        """Whether a look-up of this moment has to know how often each id occurs."""
        return super().counts_occurrences or (self.training and self.candidates is not None)

    def forget_admitted(self) -> None:
        """Drop the counts of ids that others than the policy have given rows, as a load that merges does."""
        if self._admission is not None and self._admission.candidates is not None:
            with self._store.lock:
                waiting = self._admission.candidates.waiting()
                self._admission.forget(waiting[self._store.find(waiting) >= 0])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.forget_admitted()

    def _forget_counts(self, ids: Int64s) -> None:
        if self._admission is not None:
            self._admission.forget(ids)

    def _own_tables(self) -> list[TableModule]:
        return [self] if self.candidates is None else [self, self.candidates]


def fetched_again(table: HashTable, ids: Int64s) -> Fetched | None:
    """Return what a training look-up of these ids has read before the backward pass, and which of them had rows.

    It has counted, dated and inserted all that there is. None where this cannot be that look-up once more, since there
    is an id without a row in a table in which all get one.
    """
    if isinstance(table.initializer, TorchInitializer):
        table.warn_once("recomputation", _OTHER_DRAWS)
    admission = table.admission
    embeddings, rows = table.store.look_up(ids, lambda columns, rows: (table.read(columns, rows), rows))
    is_held = (rows >= 0) if admission is None else (rows >= 0) & ~admission.refusals.of(ids)
    refused = np.flatnonzero(~is_held)
    if len(refused) == 0:
        return Fetched(embeddings, None)
    if admission is None:
        return None
    index = IdIndex()
    index.reserve(len(refused))
    groups, different = index.find_or_add(ids[refused])
    first = table.first_embeddings(different).index_select(0, torch.from_numpy(groups))
    embeddings[torch.from_numpy(refused).to(embeddings.device)] = first.to(embeddings.device)
    return Fetched(embeddings, np.flatnonzero(is_held))


def admission_of(admit: Any, make: MakeTable) -> Admission | None:
    """Return what admits rows by a policy, None where all ids get them."""
    return None if admit is None else Admission(as_admit(admit), make)
