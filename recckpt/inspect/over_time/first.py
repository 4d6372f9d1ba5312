"""``recckpt.first``: the first checkpoint of a run in which a condition holds (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.tables import TableEntry
from recckpt.inspect.over_time.condition import OF_TENSORS, Condition, parse_condition
from recckpt.inspect.over_time.first_match import MOST_EXAMPLES, FirstMatch, Hits
from recckpt.inspect.over_time.kept import kept, unusable
from recckpt.inspect.over_time.matches import Hit, RowMatcher, compared_of_tensor, is_scalar
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.chain_table import ChainTable
from recckpt.storage import Storage, open_storage
from recckpt.text import Progress, nearest, one_line

_THREADS = 8


def first(path: str | os.PathLike[str], where: str = "not finite") -> FirstMatch:
    """Find the first checkpoint of a run, among those that are kept, in which a row or dense tensor meets a condition.

    Checkpoints are read oldest first up to the one that is found: of a delta, what has changed since its parent; of the
    slots, those that the condition needs. Every byte that is read is checked. What is damaged is passed over and said.
    Imports no torch. Prints as the text of ``recckpt first``.

    Args:
        path: an output dir; any fsspec URL.
        where: parts between blanks, which have to hold of one row or tensor together. ``not finite`` and ``finite``;
            ``norm``, ``max`` (the largest absolute value) or the name of a slot of one number, such as ``count``,
            compared by ``> >= < <= = !=`` with a number; ``table=``, ``tensor=`` and ``slot=`` with a name or a pattern
            such as ``user*``, and ``id=``, which say of what. Norms are those of embeddings, where no slot is named.

    Raises:
        ValueError: ``where`` is not a condition, or names tables, tensors or slots that no checkpoint has.
        CheckpointNotFoundError: there is no checkpoint that can be used, or the path is that of a checkpoint itself.
    """
    condition, storage = parse_condition(where), open_storage(os.fspath(path))
    listing = look_around(storage)
    checkpoints = kept(storage, listing)
    _check_names(condition, checkpoints, storage.url)
    search = _Search(storage, condition)
    before, damage = None, unusable(listing)
    n_bytes = sum(checkpoint.manifest.n_bytes for checkpoint in checkpoints)
    with Progress(f"looking for {one_line(where)}", n_bytes) as progress:
        for n_searched, checkpoint in enumerate(checkpoints, 1):
            try:
                hits = search.hits_in(checkpoint)
            except (CorruptCheckpointError, CheckpointRemovedError) as error:
                damage[checkpoint.directory] = str(error)
                continue
            if hits:
                unread = search.unread(checkpoints[:n_searched])
                return hits.first_in(
                    checkpoint, FirstMatch(storage.url, where, n_searched, damage, before, unread=unread)
                )
            before = checkpoint.ckpt_id
            progress.advance(checkpoint.manifest.n_bytes)
    unread = search.unread(checkpoints)
    return FirstMatch(storage.url, where, len(checkpoints), damage, before, unread=unread)


@dataclass(frozen=True)
class _TableToRead:
    """A table that is looked at, or one shard of it."""

    entry: TableEntry
    matcher: RowMatcher
    table: ChainTable


class _Search:
    """Looks at checkpoints, oldest first; of a chain whose older links were looked at, at the newest alone."""

    def __init__(self, storage: Storage, condition: Condition) -> None:
        self._storage, self._condition = storage, condition
        self._threads = storage.threads(_THREADS)
        self._ids = None if condition.id is None else np.array([condition.id])
        self._without: set[str] = set()  # directories of checkpoints in which nothing meets the condition

    def unread(self, checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
        """Return the registered objects of which pickled tensors, which need torch, might meet the condition."""
        if not self._condition.is_of_tensors or self._condition.tensor is not None:
            return ()
        names = dict.fromkeys(name for each in checkpoints for name in each.manifest.names.extra)
        return tuple(name for name in names if name != layout.SPARSE_OPTIM)

    def hits_in(self, checkpoint: Checkpoint) -> Hits:
        """Return what meets the condition in a checkpoint.

        Raises:
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError: its writer removed it.
        """
        chain = OpenChain.of(self._storage, checkpoint)
        is_known = bool(checkpoint.below) and checkpoint.below[0].directory in self._without
        jobs = list(self._jobs(chain.newest(1) if is_known else chain))
        hits = Hits()
        for table, of_table in zip(jobs, run_all(self._in_table, jobs, self._threads), strict=True):
            hits.add_rows(table.entry.name, *of_table)
        for tensor in chain.tensors.tensors.values() if self._condition.is_of_tensors else ():
            if self._condition.means("tensor", tensor.name):
                values = compared_of_tensor(self._condition, chain.tensors, tensor)
                hits.add_tensor(tensor.name, values)
        if not hits:
            self._without.add(checkpoint.directory)
        return hits

    def _jobs(self, chain: OpenChain) -> Iterator[_TableToRead]:
        """Yield what is read at once: a table, of a single link a shard of it."""
        for entry in chain.manifest.tables:
            matcher = RowMatcher(self._condition, entry)
            if matcher.slots is None:
                continue
            table = chain.table(entry.name, matcher.slots, self._ids)
            if len(table.links) > 1:
                yield _TableToRead(entry, matcher, table)
            else:
                [link] = table.links
                yield from (_TableToRead(entry, matcher, ChainTable([link.of_shards(c)])) for c in link.catalogs)

    def _in_table(self, job: _TableToRead) -> tuple[int, list[Hit]]:
        """Return how many rows meet the condition, and some of them."""
        n_rows, examples = 0, list[Hit]()
        for batch in job.table.all_rows() if self._ids is None else job.table.rows_of(self._ids):
            if not batch.num_rows:
                continue
            ids, values = job.matcher.matches(batch)
            n_rows += len(ids)
            for row, id_ in enumerate(ids[: MOST_EXAMPLES - len(examples)].tolist()):
                numbers = {name: column[row].item() for name, column in values.items()}
                examples.append(Hit(job.entry.name, id_, numbers))
        return n_rows, examples


def _check_names(condition: Condition, checkpoints: Sequence[Checkpoint], url: str) -> None:
    """Raise ValueError where a condition names what no checkpoint has."""
    manifests = [checkpoint.manifest for checkpoint in checkpoints]
    tables = [table for manifest in manifests for table in manifest.tables if condition.means("table", table.name)]
    scalars = {slot.name for table in tables for slot in table.slots if is_scalar(slot)}
    names = {
        "table": {table.name for manifest in manifests for table in manifest.tables},
        "tensor": {name for manifest in manifests for name in (*manifest.names.dense, *manifest.names.dense_opt)},
        "slot": {slot.name for table in tables for slot in table.slots},
    }
    for kind, there in names.items():
        pattern = getattr(condition, kind)
        if pattern is not None and not any(condition.means(kind, name) for name in there):
            raise ValueError(f"{url}: found no {kind} {pattern!r} in any checkpoint{nearest(pattern, sorted(there))}")
    for slot in condition.slots:
        if slot not in scalars:
            known = ", ".join((*OF_TENSORS[1:], *sorted(scalars)))
            hint = nearest(slot, [*OF_TENSORS, *sorted(scalars)])
            raise ValueError(f"{url}: found no slot {slot!r} of one number, expected one of {known}{hint}")
