"""Whatever happens between the saves of two savers, all checkpoints that stay are the rows of their moment."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support import spec_reader
from support.forge import Tables
from support.sweeps import SWEEP_STRIDE

import recckpt
from recckpt import Deltas, Saver
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.sparse import Constant, HashTable

SEEN: Counter[str] = Counter()
IDS = st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True)
CHANGE = st.tuples(st.sampled_from(["insert", "insert", "look_up", "erase", "erase"]), IDS, st.integers(0, 1))
CHANGES = st.lists(CHANGE, max_size=4)


def rows_of(table):
    """Return the rows of a table as the judge gives them."""
    columns = {"embedding": table.embeddings(), **table.slots}
    return {
        id_: {name: column[row].detach().numpy().tobytes() for name, column in columns.items()}
        for row, id_ in enumerate(table.ids().tolist())
    }


class Owner:
    """A saver of an output dir, of which there may be several, one after the other."""

    def __init__(self, url, model, options):
        self.url, self.model, self.options = url, model, options
        self.contents = {}  # save id -> table -> rows
        self.pending = None  # a save in the background, and what it is of
        self.start()

    def start(self):
        self.saver = Saver(self.model, output_dir=str(self.url), **self.options)

    def settle(self):
        if self.pending is not None:
            (handle, rows), self.pending = self.pending, None
            self.committed(handle.wait(), rows)

    def committed(self, record, rows):
        SEEN[record.kind] += 1
        SEEN["deletes"] += any(table.delta and table.delta.deletes for table in record.tables)
        SEEN["replaced"] += any(table.delta and table.delta.replaced for table in record.tables)
        self.contents[record.save_id] = rows
        self.check()

    def check(self):
        """Read all that counts by the page alone."""
        newest = {c.manifest["ckpt_id"]: c.name[0] for c in self.oldest_first()}
        SEEN["through a form"] += any(c.supersedes for c in self.oldest_first())
        for ckpt_id, save_id in newest.items():
            for table, rows in self.contents[save_id].items():
                assert spec_reader.read(self.url, ckpt_id, table) == rows

    def oldest_first(self):
        return sorted(spec_reader.counting(self.url), key=lambda c: c.place)


class Saving(RuleBasedStateMachine):
    @initialize(
        max_keep=st.sampled_from([1, 2, None]), full_every=st.integers(1, 6), max_dirty=st.sampled_from([0.5, 1])
    )
    def begin(self, max_keep, full_every, max_dirty):
        self.root, self.n_saves, self.clock = Path(tempfile.mkdtemp()), 0, 1.0
        self.tables = [HashTable(2, name=name, initializer=Constant(0.5)) for name in ("a", "b")]
        self.model = Tables(self.tables)
        deltas = Deltas(full_every, max_chain_bytes=100, max_dirty=max_dirty)
        options = {"max_keep": max_keep, "deltas": deltas, "concurrency": 1}
        self.owners = [Owner(self.root / name, self.model, options) for name in ("one", "two")]
        self.train([("insert", list(range(80)), 0), ("insert", list(range(20)), 1)])

    @rule(changes=CHANGES)
    def train(self, changes):
        for what, ids, number in changes:
            table, ids = self.tables[number], torch.tensor(ids)
            self.clock += 1
            if what == "insert":
                table.insert(ids, torch.full((len(ids), 2), self.clock) + torch.arange(len(ids))[:, None] / 64)
            elif what == "look_up":
                table(ids)
            else:
                table.erase(ids)

    @rule(what=st.sampled_from(["clear", "add_slot", "swap"]), table=st.integers(0, 1), often=st.integers(0, 3))
    def something_rare(self, what, table, often):
        if often:
            return
        table = self.tables[table]
        if what == "clear":
            table.clear()
        elif what == "swap":
            table.store = table.store.to(table.device)
        elif not table.slots:
            table.add_slot("late", (), initial=3)

    @rule(
        changes=CHANGES,
        number=st.integers(0, 1),
        ephemeral=st.sampled_from([False, False, True]),
        background=st.booleans(),
        again=st.sampled_from([False, False, False, True]),
    )
    def save(self, changes, number, ephemeral, background, again):
        owner = self.owners[number]
        owner.settle()
        self.train(changes)
        self.n_saves += not again
        rows, ckpt_id = {table.name: rows_of(table) for table in self.tables}, f"c{self.n_saves}"
        if background:
            handle = owner.saver.save_async(ckpt_id, ephemeral=ephemeral, overwrite=True)
            owner.pending = handle, rows
        else:
            record = owner.saver.save(ckpt_id, ephemeral=ephemeral, overwrite=True)
            owner.committed(record, rows)

    @rule(number=st.integers(0, 1), how=st.sampled_from(["create", "put_if_absent", "sync_dir"]))
    def save_that_fails(self, number, how):
        owner = self.owners[number]
        owner.settle()
        self.n_saves += 1
        rows, ckpt_id = {table.name: rows_of(table) for table in self.tables}, f"c{self.n_saves}"
        storage, has_put = owner.saver.storage, []

        def fail(name, *args):
            if (how == "create" and ckpt_id in name) or (how != "create" and name.endswith("manifest.json")):
                raise OSError(5, "Input/output error", name)
            return real(name, *args)

        def put(name, *args):
            has_put.append(name.endswith("manifest.json"))
            return real_put(name, *args)

        def fail_after_put(name):
            if any(has_put):
                raise OSError(5, "Input/output error", name)
            return real(name)

        with pytest.MonkeyPatch.context() as patch:
            real, real_put = getattr(storage, how), storage.put_if_absent
            if how == "sync_dir":
                patch.setattr(storage, "put_if_absent", put)
            patch.setattr(storage, how, fail_after_put if how == "sync_dir" else fail)
            with pytest.raises(SaveFailedError) as failure:
                owner.saver.save(ckpt_id)
        if isinstance(failure.value, CommitNotDurableError):
            owner.contents[owner.oldest_first()[-1].name[0]] = rows
            owner.check()
            SEEN["not durable"] += 1

    @rule(number=st.integers(0, 1), changes=CHANGES)
    def compact(self, number, changes):
        """Make an offer of the newest, and save, which adopts it unless its delta goes."""
        owner = self.owners[number]
        owner.settle()
        newest = (owner.oldest_first() or [None])[-1]
        if newest is not None and newest.manifest["kind"] == "delta":
            recckpt.compact(str(owner.url), threads=1)
            SEEN["offered"] += 1
            self.save(changes, number, False, False, False)

    @rule(number=st.integers(0, 1), other=st.booleans())
    def restart(self, number, other):
        """Let another process take over, which loads all of what is the newest; or the same one."""
        owner = self.owners[number]
        for each in self.owners:
            each.settle()
        self.model._tables = self.tables = [HashTable(2, name=table.name) for table in self.tables]
        newest = (owner.oldest_first() or [None])[-1]
        if other:
            owner.start()
        for table in self.tables:
            has_slot = newest and any(slot["name"] == "late" for slot in newest.table(table.name)["slots"])
            if has_slot:
                table.add_slot("late", (), initial=3)
        if newest is not None:
            owner.saver.load()
            loaded = {table.name: rows_of(table) for table in self.tables}
            assert loaded == owner.contents[newest.name[0]]
            SEEN["restored"] += 1

    def teardown(self):
        for owner in getattr(self, "owners", []):
            owner.settle()
            owner.check()
            assert not owner.contents or verify(str(owner.url), threads=1) == []
        shutil.rmtree(getattr(self, "root", Path("nowhere")), ignore_errors=True)


def run(examples: int, machine: type[Saving] = Saving, **options: Any) -> None:
    # without phases that make a failing run shorter, which takes minutes
    options |= {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=25, **options))


def test_all_checkpoints_that_stay_are_the_rows_of_their_moment():
    expected = ("full", "delta", "restored", "offered", "through a form")
    SEEN.clear()
    for number in range(10):  # nearly always one is enough; what is drawn depends on the constants of the source too
        if not all(SEEN[word] for word in expected):
            run(10, seed(number)(type("SeededSaving", (Saving,), {})), derandomize=True)
    assert all(SEEN[word] for word in expected), SEEN


@pytest.mark.slow
def test_all_checkpoints_that_stay_are_the_rows_of_their_moment_in_many_runs(record_property):
    SEEN.clear()
    run(300 // SWEEP_STRIDE)
    record_property("figures", {"saves": dict(SEEN)})
