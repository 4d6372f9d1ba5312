"""What a delta restores to is what a full save of the same moment restores to, bit for bit, on any number of ranks."""

import tracemalloc

import pytest
import torch
from support.builders import OPTIMIZERS, ClickModel, Run, bits, state_of
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.policies import Transfers
from recckpt.sparse import HashTable, gen_slice

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)


class Rank:
    """A model on one rank of several, which a thread trains, with a saver of deltas and one of full checkpoints."""

    def __init__(self, root, rank, size, connect, seed=0):
        torch.manual_seed(seed)
        self.slice = gen_slice(rank, size)
        self.model = ClickModel(slice=self.slice)
        self.optimizer = OPTIMIZERS["adam"](self.model.tables)
        self.savers = [
            connect(Saver(self.model, self.optimizer, str(root / name), max_keep=None, deltas=deltas))
            for name, deltas in (("deltas", ALWAYS), ("full", False))
        ]
        numbers = {"shard_id": rank, "shard_num": size}
        self.managers = [CheckpointManager(saver, 10_000, **numbers) for saver in self.savers]
        self.numbers = numbers

    def train(self, ids):
        """Train the ids that this rank owns, or, where there are none, replace a table."""
        if not len(ids):
            self.model.users.clear()
            ids = range(40, 80)
        ids = torch.tensor(ids, dtype=torch.int64)
        ids = ids[self.slice.owns(ids)]
        (self.model.users(ids) + self.model.items(ids)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.items.erase(ids[::3])

    def save(self, ckpt_id):
        """Save with both, and return what the one with deltas wrote."""
        record, _ = (saver.save(ckpt_id, **self.numbers) for saver in self.savers)
        return record.kind


def phase(root, size, moments, first):
    """Restore the newest delta on so many ranks, train, and save after each moment; return the kinds."""

    def work(rank, connect):
        run = Rank(root, rank, size, connect, seed=first)
        run.managers[0].restore()
        kinds = []
        for number, ids in enumerate(moments, start=first):
            run.train(ids)
            kinds.append(run.save(f"ckpt_{number}"))
        return kinds

    found = on_ranks(size, work)
    assert all(kinds == found[0] for kinds in found)
    return found[0]


def restored(root, name, step, size, before=(), conf=None):
    """Return the rows of all ranks, table -> id -> bytes of its slots."""

    def work(rank, connect):
        run = Rank(root, rank, size, connect, seed=99)
        ids = torch.tensor(before, dtype=torch.int64)
        for table in run.model.tables:
            own = ids[run.slice.owns(ids)]
            table.insert(own, torch.ones(len(own), 4))
        run.managers[name == "full"].restore(step, load_conf=conf)
        return {table.name: rows_of(table) for table in run.model.tables}

    rows = {}
    for of_rank in on_ranks(size, work):
        for table, found in of_rank.items():
            assert rows.setdefault(table, {}).keys().isdisjoint(found)
            rows[table] |= found
    return rows


def rows_of(table):
    columns = {"embedding": table.embeddings(), **table.slots}
    return {
        id_: {name: bits(column[row]) for name, column in columns.items()}
        for row, id_ in enumerate(table.ids().tolist())
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run on 1, on 3, on 2 and on 1 rank again, with deltas all the way; ids leave and come back, and a table."""
    root = tmp_path_factory.mktemp("run")
    kinds = phase(root, 1, [range(300), range(50, 100)], 1)
    kinds += phase(root, 3, [range(290, 320), range(60, 70)], 3)
    kinds += phase(root, 2, [range(0, 90, 3), [], range(-10, 10)], 5)
    kinds += phase(root, 1, [range(1000, 1010)], 8)
    assert kinds == ["full", *["delta"] * 7]
    return root


CONFS = [
    None,
    {"hashtable_clear": False},
    {"where": {"ids": list(range(0, 200, 2))}},
    {"load": ["sparse"]},
    {"load": ["sparse_opt"]},
    {"oname": [{"item": "user/1", "user/1": "item"}], "strict": False},
]


def each_once(sizes, others):
    """Return all pairs; in the default suite each of the others is there once, with the sizes in turn."""
    pairs = [(size, other, size == sizes[n % len(sizes)]) for n, other in enumerate(others) for size in sizes]
    return [pytest.param(size, other, marks=() if is_quick else pytest.mark.slow) for size, other, is_quick in pairs]


@mostly_slow()
@pytest.mark.parametrize(("size", "step"), each_once([3, 1], [2, 4, 7, 8]))
def test_a_delta_restores_to_the_bits_of_a_full_save_on_any_number_of_ranks(root, size, step):
    found = restored(root, "deltas", step, size)
    assert found == restored(root, "full", step, size)
    assert len(found["item"]) > 100


@mostly_slow()
@pytest.mark.parametrize(("size", "conf"), each_once([1, 3], CONFS))
def test_it_does_so_into_tables_with_rows_and_whatever_is_taken(root, size, conf):
    before = range(-30, 60)
    found = restored(root, "deltas", 8, size, before, conf)
    assert found == restored(root, "full", 8, size, before, conf)


def test_the_rows_of_all_ranks_are_those_of_one(root):
    assert restored(root, "deltas", 8, 3) == restored(root, "full", 8, 1)


@mostly_slow()
@pytest.mark.parametrize("pre_download", [False, True])
def test_a_run_resumes_from_deltas_in_an_object_store_bit_for_bit(tmp_path, memory_url, pre_download):
    options = {"interval": 5, "max_keep": None, "deltas": ALWAYS}
    expected = state_of(Run(tmp_path, **options).train(20))
    Run(memory_url, **options).train(13)
    resumed = Run(memory_url, seed=1, transfers=Transfers(pre_download=pre_download), **options)
    assert resumed.manager.restore() == 10
    assert state_of(resumed.train(10)) == expected


@pytest.mark.slow
def test_a_chain_needs_little_memory_beyond_the_table(tmp_path):
    table = HashTable(64, name="t")
    table.insert(torch.arange(100_000), torch.ones(100_000, 64))
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), max_keep=None, deltas=ALWAYS)
    saver.save("full")
    for number in range(3):
        changed = torch.arange(0, 100_000, 10 + number)
        table.insert(changed, torch.full((len(changed), 64), float(number)))
        table.erase(torch.arange(number, 10_000, 100))
        assert saver.save(f"delta {number}").kind == "delta"
    model = nn.ModuleDict({"t": HashTable(64, name="t")})
    loader = Saver(model, output_dir=str(tmp_path))
    loader.load()
    found = [each.embeddings()[torch.argsort(each.ids())] for each in (model["t"], table)]
    assert torch.equal(*found)
    model["t"].clear()
    tracemalloc.start()
    loader.load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.35 * table.nbytes, "one table, some batches, and the ids that are deleted"
