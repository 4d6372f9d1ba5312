"""One world: whatever is saved, compacted, forgotten and restored, readers and restores get what a dict says."""

import numpy as np
import pytest
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import rule
from save import test_deltas_machine as saving
from support.sweeps import SWEEP_STRIDE

import recckpt
from recckpt import CheckpointManager, CheckpointReader
from recckpt.inspect.absent import look_for
from recckpt.sparse.files.arrow_format import column_buffer

SEEN, IDS = saving.SEEN, st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True)


def rows_in(batches):
    """Return id -> slot -> bytes, having seen no id twice."""
    found = {}
    for batch in filter(len, batches):
        names = [name for name in batch.schema.names if name not in ("id", "table")]
        raw = {n: np.frombuffer(column_buffer(batch.column(n)), np.uint8).reshape(len(batch), -1) for n in names}
        for row, id_ in enumerate(batch.column("id").to_pylist()):
            assert id_ not in found
            found[id_] = {name: raw[name][row].tobytes() for name in names}
    return found


class World(saving.Saving):
    """Two savers of one model, each with an output dir, readers that stay open, and who asks to forget ids."""

    @rule(number=st.integers(0, 1), asked=IDS)
    def read(self, number, asked):
        owner = self.owners[number]
        owner.settle()
        if not owner.contents:
            return
        readers = self.__dict__.setdefault("readers", {})
        reader = readers.setdefault(number, None) or CheckpointReader(owner.url)
        readers[number] = reader
        reader.refresh()
        newest = owner.oldest_first()[-1]
        assert reader.manifest.name == newest.name[0]
        for name, rows in owner.contents[newest.name[0]].items():
            there = {id_: rows[id_] for id_ in asked if id_ in rows}
            assert rows_in(reader.table(name)) == rows_in(reader.dataset(name).to_batches()) == rows
            assert rows_in(reader.table(name, ids=asked)) == there
            values, found = reader.lookup(name, asked)
            assert found.tolist() == [id_ in rows for id_ in asked]
            assert [value.tobytes() for value in values[found]] == [row["embedding"] for row in there.values()]
        SEEN["read"] += 1

    @rule(number=st.integers(0, 1), name=st.sampled_from("ab"), ids=IDS, inside=st.booleans(), often=st.integers(0, 1))
    def forget(self, number, name, ids, inside, often):
        owner = self.owners[number]
        for each in self.owners:
            each.settle()
        if often or not owner.contents:
            return
        at = {c.place: owner.contents[c.name[0]] for c in owner.oldest_first()}
        if inside:
            CheckpointManager(owner.saver, 10**6).forget(name, ids)
        else:
            recckpt.forget(owner.url, name, ids)

        def kept(tables):
            return tables | {name: {id_: row for id_, row in tables[name].items() if id_ not in ids}}

        owner.contents = {c.name[0]: kept(at[c.place]) for c in owner.oldest_first()}
        owner.check()
        assert look_for(str(owner.url), np.array(ids), name).holding == ()
        SEEN["forgotten"] += 1
        if not inside:  # the saver was taken over
            self.restart(number, other=True)

    def teardown(self):
        for reader in getattr(self, "readers", {}).values():
            reader.close()
        super().teardown()


def test_readers_and_restores_get_what_a_dict_says():
    expected = ("full", "delta", "restored", "offered", "read", "forgotten")
    SEEN.clear()
    for number in range(10):
        if not all(SEEN[word] for word in expected):
            saving.run(5, seed(number)(type("SeededWorld", (World,), {})), derandomize=True)
    assert all(SEEN[word] for word in expected), SEEN


@pytest.mark.slow
def test_readers_and_restores_get_what_a_dict_says_in_many_runs(record_property):
    SEEN.clear()
    saving.run(200 // SWEEP_STRIDE, World)
    record_property("figures", {"world": dict(SEEN)})
