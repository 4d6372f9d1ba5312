"""Readers beside a run that saves deltas: at every save they give the rows of the live tables, bit for bit."""

from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.builders import OPTIMIZERS, ClickModel, Run
from support.sweeps import mostly_slow
from torch import nn

import recckpt
from recckpt import CheckpointReader, Deltas, Saver
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import HashTable
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.storage import open_storage

IDS = st.lists(st.integers(-30, 60), min_size=1, max_size=25, unique=True)


def live_rows(table):
    """Return id -> slot -> bytes."""
    if not len(table):
        return {}
    columns = {"embedding": table.embeddings(), **table.slots}
    raw = {n: t.detach().contiguous().view(len(table), -1).view(torch.uint8).numpy() for n, t in columns.items()}
    return {int(id_): {n: raw[n][row].tobytes() for n in raw} for row, id_ in enumerate(table.ids())}


def read_rows(batches):
    found = {}
    for batch in filter(len, batches):
        names = [name for name in batch.schema.names if name not in ("id", "table")]
        raw = {n: np.frombuffer(column_buffer(batch.column(n)), np.uint8).reshape(len(batch), -1) for n in names}
        for row, id_ in enumerate(batch.column("id").to_pylist()):
            assert id_ not in found
            found[id_] = {name: raw[name][row].tobytes() for name in names}
    return found


class BesideARun(RuleBasedStateMachine):
    """A model that changes and is saved in any order, and a reader that stays open."""

    @initialize()
    def begin(self):
        self.place = TemporaryDirectory()
        torch.manual_seed(0)
        self.model = ClickModel()
        self.optimizer = OPTIMIZERS["adam"](self.model.tables)
        deltas = Deltas(full_every=6, max_dirty=1.0, max_chain_bytes=100.0)
        self.saver = Saver(self.model, self.optimizer, self.place.name, max_keep=3, deltas=deltas)
        self.n_saves, self.kinds = 0, []
        self.model.items(torch.arange(40))
        self.model.users(torch.arange(40))
        self.save(ephemeral=False)
        self.reader = CheckpointReader(self.place.name)

    def teardown(self):
        if hasattr(self, "place"):
            self.reader.close()
            self.place.cleanup()

    @rule(ids=IDS)
    def train(self, ids):
        ids = torch.tensor(ids)
        (self.model.users(ids) + self.model.items(ids)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @rule(ids=IDS)
    def erase(self, ids):
        self.model.items.erase(torch.tensor(ids))

    @rule(ids=IDS, value=st.floats(-9, 9, width=32))
    def insert(self, ids, value):
        self.model.items.insert(torch.tensor(ids), torch.full((len(ids), 4), value))

    @rule()
    def clear(self):
        self.model.users.clear()

    @precondition(lambda self: "late" not in self.model.items.slots)
    @rule()
    def add_slot(self):
        self.model.items.add_slot("late", (2,))

    @rule(ephemeral=st.sampled_from([False, False, False, True]))
    def save(self, ephemeral):
        self.n_saves += 1
        record = self.saver.save(f"ckpt_{self.n_saves}", ephemeral=ephemeral)
        self.kinds.append(record.kind)
        self.saved = {table.name: live_rows(table) for table in self.model.tables}

    @rule(asked=st.sets(st.integers(-30, 60)))
    def look(self, asked):
        self.reader.refresh()
        assert self.reader.manifest.ckpt_id == f"ckpt_{self.n_saves}"
        for name, rows in self.saved.items():
            assert read_rows(self.reader.table(name)) == rows
            assert read_rows(self.reader.dataset(name).to_batches()) == rows
            assert read_rows(self.reader.table(name, ids=asked)) == {id_: rows[id_] for id_ in asked if id_ in rows}
            values, found = self.reader.lookup(name, sorted(asked))
            assert found.tolist() == [id_ in rows for id_ in sorted(asked)]
            for id_, row in zip(sorted(asked), values, strict=True):
                assert row.tobytes() == (rows[id_]["embedding"] if id_ in rows else bytes(row.nbytes))

    @rule()
    def check(self):
        assert verify(self.place.name) == []
        assert not list_checkpoints(open_storage(self.place.name)).damaged


BesideARun.TestCase.settings = settings(deadline=None, max_examples=6, stateful_step_count=16)
TestBesideARun = BesideARun.TestCase


@mostly_slow()
def test_a_run_with_deltas_is_read_at_each_of_its_saves_and_all_of_it_is_good(url):
    run = Run(url, interval=3, max_keep=4, deltas=True)
    kinds = set()
    reader = None
    for _ in range(8):
        run.train(3)
        reader = reader or CheckpointReader(url)
        reader.refresh()
        kinds.add(reader.manifest.kind)
        for table in run.model.tables:
            assert read_rows(reader.table(table.name)) == live_rows(table)
    assert kinds == {"full", "delta"}
    assert verify(url) == []
    reader.close()


@mostly_slow()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_dtypes_and_shapes_of_any_kind_come_back(tmp_path, dtype):
    table = HashTable((2, 3), name="t", dtype=dtype)
    table.add_slot("scalar", (), dtype)
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), max_keep=None, deltas=Deltas(max_dirty=1.0))
    for number in range(4):
        ids = torch.randperm(50)[:30]
        table.insert(ids, (torch.randn(30, 2, 3) * 9).to(dtype), {"scalar": (torch.randn(30) * 9).to(dtype)})
        table.erase(torch.randperm(50)[:3])
        saver.save(f"c{number}")
        with CheckpointReader(tmp_path) as reader:
            expected = live_rows(table)
            assert read_rows(reader.table("t")) == expected
            assert read_rows(reader.dataset("t").to_batches()) == expected
    assert reader.manifest.kind == "delta"


def test_an_adopted_form_gives_what_its_delta_gave_and_is_good(tmp_path):
    run = Run(tmp_path, interval=3, max_keep=3, deltas=Deltas(max_dirty=1.0, max_chain_bytes=100.0)).train(6)
    rows = {table.name: live_rows(table) for table in run.model.tables}
    offer = recckpt.compact(tmp_path)
    assert verify(str(tmp_path)) == []
    run.train(3)
    adopted = list_checkpoints(open_storage(str(tmp_path))).find("ckpt_6")
    assert (adopted.manifest.kind, adopted.directory) == ("full", offer.directory)
    assert verify(str(tmp_path)) == verify(str(tmp_path / adopted.directory)) == []
    with CheckpointReader(tmp_path / "ckpt_6") as reader, CheckpointReader(tmp_path) as newest:
        for table in run.model.tables:
            assert read_rows(reader.table(table.name)) == rows[table.name]
            assert read_rows(newest.table(table.name)) == live_rows(table)
