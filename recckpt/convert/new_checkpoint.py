"""A full checkpoint made of rows in bucket order and of dense state: its files, and what its manifest says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.shard_writer import ShardWriter, with_shards
from recckpt.convert.row_runs import RowRuns
from recckpt.convert.source import SourceContents
from recckpt.format import layout
from recckpt.format.buckets import gen_slice
from recckpt.format.manifest import Content, Names, StateValue
from recckpt.format.tables import TableEntry
from recckpt.format.training import Training
from recckpt.output_dir.writer import WRITER

Advance = Callable[[int], object]


@dataclass(frozen=True)
class NewCheckpoint:
    """What is to be written: rows that are in order, and all else of a source."""

    tables: Sequence[RowRuns]
    contents: SourceContents
    state: Mapping[str, StateValue]

    @property
    def shards(self) -> int:
        """As many as there are positions: each rank that goes on takes its own."""
        return max(1, len(self.contents.io_state))


def write_new(to: Attempt, new: NewCheckpoint, advance: Advance) -> Content:
    """Write all files of a checkpoint, and return what it holds."""
    records, rows = [], Counter[str]()
    for number in range(new.shards):
        shard = _written_shard(to, new, number, advance)
        records.append(shard.record())
        rows.update(shard.catalog.rows)
    tables = tuple(TableEntry(runs.table.name, rows[runs.table.name], runs.table.slots) for runs in new.tables)
    content = Content((), tables, (), names=_names(new.contents), state=new.state, writer=WRITER)
    return with_shards(replace(content, training=Training(new.contents.lineages)), records)


def _written_shard(to: Attempt, new: NewCheckpoint, number: int, advance: Advance) -> ShardWriter:
    """Write the rows and the positions of one shard, and of the first one all else; a tensor at a time is in memory."""
    shard, own, contents = to.shard(number, new.shards), gen_slice(number, new.shards), new.contents
    shard.rows(new.tables, 1, advance, buckets=(own.begin, own.end))
    if number == 0 and (contents.dense or contents.values):
        shard.tensors(_state(contents))
    states = {}
    if number == 0 and contents.extra:
        states[layout.EXTRA] = "extra", contents.extra
    if contents.io_state:
        states[layout.io_state(number)] = "io_state", contents.io_state[number]
    if states:
        from recckpt.dense.state_copy import portable  # torch, which rows do without

        shard.states({name: portable(what, dict(state)) for name, (what, state) in states.items()})
    return shard


def _state(contents: SourceContents) -> dict[str, Any]:
    from recckpt.dense.saver import Later
    from recckpt.dense.state_copy import portable

    tensors = {t.name: Later(t.dtype, t.shape, t.same, t.whole) for t in contents.dense}
    return {**tensors, **portable("the state", dict(contents.values))}


def _names(contents: SourceContents) -> Names:
    positions = dict.fromkeys(name for each in contents.io_state for name in each)
    dense = (*(tensor.name for tensor in contents.dense), *contents.values)
    extra, dense_opt = tuple(contents.extra), tuple(contents.dense_opt)
    return Names(dense=dense, extra=extra, io_state=tuple(positions), dense_opt=dense_opt)
