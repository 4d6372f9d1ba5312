"""The hashtable embedding: an ``nn.Module`` that adds a row for every id that it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import Slice, distinct
from recckpt.policies.admit import Admit, AdmitFunction, as_admit
from recckpt.sparse.table.admission import Admission, Fetched
from recckpt.sparse.table.bags import Embedding, Mode, bags_of, check_mode, ids_of_embedding, pool
from recckpt.sparse.table.checks import checked_padding, flat_ids, opaque
from recckpt.sparse.table.eviction import OnEvict, Policy, eviction_of
from recckpt.sparse.table.gradients import Lookup, is_in_backward
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.initializers import InitializerLike, TorchInitializer
from recckpt.sparse.table.nn_module import add_gradients, embedding_reader, first_embeddings, padding_row, warn_once
from recckpt.sparse.table.row_table import RowTable
from recckpt.text.foreign_words import answers_by, unknown_attribute
from recckpt.types import flag

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Int64s = npt.NDArray[np.int64]
_OTHER_DRAWS = (
    "a backward pass repeated a look-up, and the first time its initializer drew from torch's generator for ids that "
    "were new: dropout and the like after the look-up draw other numbers in the repetition; call the table outside of "
    "torch.utils.checkpoint, or use an initializer of recckpt.sparse, which draws by id"
)


class TableOptions(TypedDict, total=False):
    """Further arguments of :class:`HashTable`."""

    dtype: torch.dtype
    device: str | torch.device
    initializer: InitializerLike | None
    slice: Slice | None
    padding_id: int | None
    track: Sequence[str]
    admit: Admit | AdmitFunction | None
    evict: Policy | Sequence[Policy]
    evict_every: int | None
    budget_ms: float | None
    on_evict: OnEvict | None


class HashTable(RowTable):
    """A growing map from int64 ids to embeddings of one shape, with optimizer slots.

    Every int64 value is a legal id. ``state_dict()`` holds the table itself, under its name. Such a state dict can be
    deep-copied (which copies the rows) and passed to ``load_state_dict``; write it to disk with :class:`recckpt.Saver`,
    not with pickle. Thread-safe (docs/architecture.md), not collective.

    Args:
        embedding_shape: shape of one embedding, such as ``(64,)``; an int is short for one dimension.
        name: name in checkpoints, unique in a model, up to 1,024 bytes of UTF-8.
        dtype: float32, float16, bfloat16, float64, or an integer type.
        device: device of the slots; ids and index are always on the CPU.
        initializer: initial values of new rows: one of :mod:`recckpt.sparse.table.initializers`, or a callable like
            those of ``torch.nn.init``; None for ``Normal(std=1 / sqrt(values in a row))``, and for zeros in a table
            of integers. ``Constant(0)`` gives zeros.
        slice: part of the id space that this table may hold; None for all of it.
        padding_id: an id that pads ids of shape ``[B, L]``: look-ups return zeros for it, or the row that an
            ``insert`` or a load gave it; they do not insert, count or train it, and bags leave it out. Like
            ``padding_idx`` of ``nn.Embedding``, it belongs to this table, not to its checkpoints.
        track: what training look-ups write to scalar slots of the rows, any of ``"count"`` (slot ``count``),
            ``"step"`` (``last_step``) and ``"time"`` (``last_time``); see docs/rows.md.
        admit: which unseen ids training look-ups insert: a policy of :mod:`recckpt.policies.admit`, or a callable
            ``(ids, step) -> mask``; None for all. Other ids read their initial values and get no gradients.
        evict: policies of :mod:`recckpt.policies.evict`; training drops a row if any of them evicts it.
        evict_every: number of steps in which all rows are examined once, some at each step; see docs/rows.md.
        budget_ms: if eviction takes longer in a step, one warning suggests an ``evict_every``; None for no warning.
        on_evict: called as ``on_evict(name, ids)``, ids an int64 tensor, each time after rows were evicted, in the
            thread of the look-up, which waits. An exception that it raises is logged. See docs/rows.md.

    Attributes:
        name, dtype, padding_id: the arguments.
        anchor: an empty parameter, which represents the rows in ``model.parameters()``.

    Raises:
        TypeError: ``admit`` is not a policy, or ``on_evict`` is not a function.
        ValueError: another argument is invalid, or ``evict`` needs a slot that is not tracked.
    """

    @answers_by("HashTable(16, name='item'), with a dimension, a name of its own, and no number of rows")
    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        initializer: InitializerLike | None = None,
        slice: Slice | None = None,
        padding_id: int | None = None,
        track: Sequence[str] = (),
        admit: Admit | AdmitFunction | None = None,
        evict: Policy | Sequence[Policy] = (),
        evict_every: int | None = None,
        budget_ms: float | None = None,
        on_evict: OnEvict | None = None,
    ) -> None:
        super().__init__(
            embedding_shape,
            name=name,
            dtype=dtype,
            device=device,
            initializer=initializer,
            slice=slice,
            track=track,
        )
        self.padding_id = checked_padding(name, padding_id)
        self.eviction = eviction_of(self, self.time, evict, evict_every, budget_ms, on_evict=on_evict)
        if admit is not None:
            self.admission = Admission(as_admit(admit), self.time, self._made_candidates)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise unknown_attribute(self, name) from None

    @classmethod
    def from_embedding(
        cls, module: Embedding, *, name: str, ids: Tensor | None = None, **options: Unpack[TableOptions]
    ) -> Self:
        """Return a table with the rows of an ``nn.Embedding`` or ``nn.EmbeddingBag``, which trains in the same way.

        ``padding_idx`` becomes ``padding_id``: its row is not trained, and bags leave it out. A frozen weight gives a
        frozen table. A sharded table copies the rows that its rank owns.

        Args:
            module: the module whose weight is copied.
            name: name in checkpoints.
            ids: int64, one for each row; None for 0 to n - 1.
            options: further arguments of the table.

        Raises:
            TypeError, ValueError: the module is of another kind, or has options, hooks, parametrizations or a
                ``forward`` that tables do not support; or the ids do not fit.
        """
        own_ids, padding_id = ids_of_embedding(module, name, ids)
        weight = module.weight.detach()
        own: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device, "padding_id": padding_id}
        table = cls(weight.shape[1], name=name, **{**own, **options})
        owned = table.slice.owns(own_ids)
        table.insert(own_ids[owned], weight[owned.to(weight.device)].to(table.device))
        table.requires_grad = module.weight.requires_grad
        return table

    @opaque
    def forward(self, ids: Tensor, *, admit: bool | None = None) -> Tensor:
        """Return the embeddings of ``ids``.

        In training mode, unseen ids that are admitted get rows; other unseen ids give the initializer's values without
        a row. In eval mode nothing is inserted, and an unseen id gives the initializer's constant, or zeros if the
        initializer is random.

        Args:
            ids: int64 or int32, any shape.
            admit: False neither inserts nor counts in training mode, and unseen ids read as in eval mode. True inserts
                and counts in training mode, also in a frozen table. None means True unless the table is frozen.

        Returns:
            Tensor of shape ``ids.shape + embedding_shape``, differentiable unless the table is frozen; gradients of
            an id that occurs several times add up.

        Raises:
            ValueError: an unseen id is outside the slice of this table, or there are more ids than its capacity.
        """
        flat, is_inserting = flat_ids(ids, as_asked=True), inserts(self, admit)
        if is_inserting:
            self.eviction.evict_due(self)
        if torch.is_grad_enabled() and self.dtype.is_floating_point:
            owned = flat.copy()  # the caller may reuse the memory of its ids before the backward pass
            read = partial(fetch, self, owned, admit=is_inserting)
            anchor = self._parameters["anchor"]  # faster than self.anchor
            out: Tensor = Lookup.apply(anchor, read, partial(add_gradients, self), owned)  # type: ignore[no-untyped-call]
        else:
            out, _ = fetch(self, flat, admit=is_inserting)
        return out.view(*ids.shape, *out.shape[1:])

    @opaque
    def bag(
        self,
        ids: Any,
        offsets: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        mode: Mode = "sum",
        weights: Any = None,
        padding_id: int | None = None,
        include_last_offset: bool = False,
        admit: bool | None = None,
    ) -> Tensor:
        """Return the rows of each bag of ids, pooled, as ``nn.EmbeddingBag`` does; an empty bag gives zeros.

        Training inserts ids, and gradients reach rows, as in a call of the table. Collective if a call of the table is.
        Note that ``nn.EmbeddingBag`` defaults to ``mode="mean"``.

        Args:
            ids: int64 or int32. With two dimensions each row is a bag; with one, ``offsets`` or ``lengths`` delimit the
                bags. Or a nested tensor of the layout ``torch.jagged``, or any object with ``values()``, ``lengths()``
                and ``offsets()``, such as TorchRec's ``JaggedTensor``, whose weights are used too. Hash strings with
                :func:`recckpt.sparse.hash_ids`.
            offsets: where each bag begins, the first at 0.
            lengths: how many ids each bag has.
            mode: ``"sum"``, ``"mean"`` or ``"max"``.
            weights: for ``"sum"``: one factor for each id, in the dtype of the table; differentiable.
            padding_id: an id that is neither pooled nor counted by ``"mean"``, and gets no row; None for the table's
                ``padding_id``.
            include_last_offset: whether ``offsets`` ends with the number of ids, as an extra item.
            admit: as in a call of the table.

        Returns:
            Tensor of shape (bags, *embedding_shape).

        Raises:
            TypeError, ValueError: the ids, bags, weights or mode are invalid.
        """
        try:
            ends: dict[str, Any] = {"offsets": offsets, "lengths": lengths, "include_last_offset": include_last_offset}
            bags = bags_of(self, ids, weights, padding_id, **ends)
            check_mode(self, mode, bags.weights)
        except (TypeError, ValueError) as error:
            self.sharing.refuse(self, error, admit)
        return pool(self(bags.ids, admit=admit), bags, mode)

    @opaque
    def evict(self, *policies: Policy) -> int:
        """Drop all rows that any of these policies evicts now, and return how many. Collective with a capacity.

        An evicted id that is looked up again gets a new row. The row of ``padding_id`` stays.

        Args:
            policies: policies of :mod:`recckpt.policies.evict`.

        Raises:
            ValueError: an argument is not a policy, or needs a slot that the table lacks. Nothing has changed.
        """
        self._refuse_shown("evict()")
        return self.eviction.evict(self, policies)

    @property
    def evicts(self) -> tuple[Policy, ...]:
        """The policies that evict rows during training."""
        return self.eviction.plan.policies

    @property
    def n_evicted(self) -> int:
        """Number of rows that policies have evicted since the table was made, on this rank."""
        return self.eviction.n_evicted

    @property
    def admit(self) -> Admit | None:
        """The policy that decides which ids get rows; None if all ids do."""
        return None if self.admission is None else self.admission.policy

    @property
    def candidates(self) -> HashTable | None:
        """The counts of ids that wait for a row, saved as a table of their own; None if nothing is counted."""
        counts = None if self.admission is None else self.admission.candidates
        return None if counts is None else cast(HashTable, counts.table)

    def _made_candidates(self, n_values: int, dtype: torch.dtype, name: str) -> HashTable:
        table = HashTable(n_values, name=f"{self.name}.{name}", dtype=dtype, device="cpu", slice=self.slice)
        table.is_trained = False
        return table


def inserts(table: RowTable, admit: bool | None) -> bool:
    """Return whether a training look-up inserts and counts; by default only if the table is not frozen."""
    return table.is_trained and (table.requires_grad if admit is None else flag("admit", admit))


def counts_occurrences(table: RowTable) -> bool:
    waits = table.admission is not None and table.admission.candidates is not None
    return table.training and (table.tracking.counts or waits)


def fetch(table: RowTable, ids: Int64s, occurrences: Int64s | None = None, *, admit: bool) -> Fetched:
    """Return embeddings as a call of the table does, without a graph, and the positions of ids with rows; None for all.

    Without ``occurrences`` each id counts once. The padding id is neither inserted nor counted, and is treated as an id
    without a row: only ids with rows get gradients.
    """
    if table.padding_id is not None and len(places := np.flatnonzero(ids != table.padding_id)) < len(ids):
        of_others = None if occurrences is None else occurrences[places]
        others, present = fetch(table, ids[places], of_others, admit=admit)
        padding = padding_row(table)
        rows = padding.expand(len(ids), *padding.shape[1:]).contiguous()
        rows.index_copy_(0, torch.from_numpy(places).to(rows.device), others)
        return rows, places if present is None else places[present]
    if not table.training:
        return table.store.look_up(ids, embedding_reader(table)), None
    if not admit:
        read = embedding_reader(table)
        return table.store.look_up(ids, lambda some, at: (read(some, at), np.flatnonzero(at >= 0)))
    if is_in_backward() and (again := _fetched_again(table, ids)) is not None:
        return again
    admission = table.admission
    if occurrences is None and (table.tracking.names or admission is not None):
        occurrences = np.ones(len(ids), np.int64)
    if admission is not None and occurrences is not None:
        return admission.fetch(table, ids, occurrences, partial(_fetch_rows, table))
    return _fetch_rows(table, ids, occurrences), None


def _fetch_rows(table: RowTable, ids: Int64s, occurrences: Int64s | None) -> Tensor:
    capacity = table.eviction.plan.capacity
    if capacity is not None and len(ids) > capacity.n and (n_ids := len(distinct(ids))) > capacity.n:
        raise ValueError(
            f"table {table.name!r}: found a look-up of {n_ids} distinct ids, expected at most as many as "
            f"{capacity} allows: use a larger n, or smaller batches"
        )
    read, first = embedding_reader(table), partial(first_embeddings, table)
    if table.tracking.names and occurrences is not None:
        with table.store.lock:  # another thread may set an event time
            return table.store.visit(ids, table.tracking.visit(occurrences), read, first)
    return table.store.look_up_or_add(ids, read, first)


def _fetched_again(table: RowTable, ids: Int64s) -> Fetched | None:
    """Return what a training look-up of these ids read before the backward pass, and which of them had rows.

    The first look-up has done all counting, dating and inserting. Return None if this cannot be its repetition, because
    an id has no row although the table gives every id one.
    """
    if TorchInitializer in {type(table.initializer), type(getattr(table.initializer, "otherwise", None))}:
        warn_once(table, "recomputation", _OTHER_DRAWS)
    read, admission = embedding_reader(table), table.admission
    embeddings, rows = table.store.look_up(ids, lambda columns, rows: (read(columns, rows), rows))
    is_present = (rows >= 0) if admission is None else (rows >= 0) & ~admission.refused(ids)
    refused = np.flatnonzero(~is_present)
    if len(refused) == 0:
        return embeddings, None
    if admission is None:
        return None
    index = IdIndex()
    index.reserve(len(refused))
    groups, different = index.find_or_add(ids[refused])
    first = first_embeddings(table, different).index_select(0, torch.from_numpy(groups))
    embeddings[torch.from_numpy(refused).to(embeddings.device)] = first.to(embeddings.device)
    return embeddings, np.flatnonzero(is_present)
