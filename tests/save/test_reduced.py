"""Checkpoints without some slots, without some rows, and with narrower ones: each is what a dict says, and says so."""

import logging
import math
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
import torch
from hypothesis import strategies as st
from support import spec_reader
from support.drawn import drawn
from support.foreign import ForeignTable
from support.forge import Tables
from support.thread_ranks import on_ranks

import recckpt
from recckpt import CheckpointManager, CheckpointReader, Deltas, Saver
from recckpt.cli.ls import run_ls as ls
from recckpt.convert import export_checkpoint
from recckpt.errors import SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import locate
from recckpt.policies import Choose
from recckpt.sparse import Constant, HashTable, SparseAdam, gen_slice
from recckpt.storage import open_storage

COUNT_2, SAMPLE = {"t": {"count": {"min": 2}}}, {"*": {"sample": 0.5, "count": {"min": 1}}}
ALWAYS = Deltas(full_every=100, max_chain_bytes=1e6, max_dirty=1.0)
IDS = st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from(["set", "set", "count", "erase", "look up"]), IDS), max_size=4)
OPTIONS = st.fixed_dictionaries(
    {
        "slots": st.sampled_from([None, [], ["*@count"], ["!*@late"]]),
        "where": st.sampled_from([None, COUNT_2, {"*": {"sample": 0.5, "count": {"min": 1}}}, {"t": list(range(30))}]),
        "store": st.sampled_from([None, {"*@embedding": "bfloat16"}, {"*@embedding": "float16", "t@late": "bfloat16"}]),
    }
)
STEPS = st.lists(
    st.tuples(CHANGES, st.sampled_from(["save", "save", "save", "background", "resume", "fail"]), st.booleans()),
    min_size=1,
    max_size=6,
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Trainer:
    """A rank that changes its table, and knows of each checkpoint what it has to be."""

    def __init__(self, root, rank, size, connect):
        self.root, self.rank, self.size, self.connect = root, rank, size, connect
        self.clock, self.saved, self.infos = 0.0, {}, []

    def start(self, options):
        self.options = options
        self.table = HashTable(2, name="t", initializer=Constant(0.25), slice=gen_slice(self.rank, self.size))
        self.table.add_slot("count", (), torch.int64)
        self.table.add_slot("late", (2,), torch.float32, initial=1 / 3)
        said = {"deltas": ALWAYS, "max_keep": None, "concurrency": 1, "on_save": self.infos.append}
        self.saver = Saver(Tables([self.table]), output_dir=str(self.root), choose=Choose(**options), **said)
        self.connect(self.saver)

    def change(self, what, ids):
        ids = torch.tensor(
            [id_ for id_ in ids if self.table.slice.owns(torch.tensor([id_]).numpy())[0]], dtype=torch.int64
        )
        self.clock += 1
        if what == "set":
            values = torch.full((len(ids), 2), self.clock / 7) + ids[:, None] / 64
            self.table.insert(ids, values, {"late": values * 3})
        elif what == "count":
            rows, (_, found) = self.table.store.find(ids.numpy()), self.table.lookup(ids)
            counts = self.table.slots["count"][torch.from_numpy(rows[found.numpy()])]
            self.table.store.write(rows[found.numpy()], {"count": counts + 1})
        elif what == "erase":
            self.table.erase(ids)
        else:
            self.table(ids)

    def save(self, ckpt_id, how):
        self.saved[ckpt_id] = self.expected()
        if how == "background":
            handle = self.saver.save_async(ckpt_id, self.rank, self.size)
            self.change("set", list(range(60)))
            return handle.wait()
        return self.saver.save(ckpt_id, self.rank, self.size)

    def expected(self):
        """Return id -> slot -> the bytes that are to be in the files."""
        where, store, slots = (self.options[name] for name in ("where", "store", "slots"))
        kept = {"embedding", "count", "late"} if slots is None else {"embedding", *(["count"] if slots else [])}
        count = self.table.slots["count"]
        columns = {"embedding": self.table.embeddings(), **self.table.slots}
        for pattern, dtype in (store or {}).items():
            slot = pattern.rpartition("@")[2]
            columns[slot] = columns[slot].to(DTYPES[dtype])
        ids = self.table.ids()
        conditions = next(iter(where.values())) if where else {}
        is_kept = torch.ones(len(ids), dtype=torch.bool)
        if isinstance(conditions, list):
            is_kept = torch.isin(ids, torch.tensor(conditions))
        elif conditions:
            is_kept = count >= conditions["count"]["min"]
        return {
            id_: {name: bytes_of(columns[name][row]) for name in kept}
            for row, id_ in enumerate(ids.tolist())
            if is_kept[row] and (not isinstance(conditions, dict) or "sample" not in conditions or in_sample(id_))
        }


def in_sample(id_):
    z, mask = (id_ ^ 0x9E3779B97F4A7C15) & (2**64 - 1), 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return (z ^ (z >> 31)) < 2**63


def bytes_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def go(root, options, steps, size):
    """Train and save on some ranks; return what each of them has saved, and the kinds of the saves."""

    def work(rank, connect):
        trainer, kinds = Trainer(root, rank, size, connect), []
        trainer.start(options[0])
        trainer.change("set", list(range(40)))
        trainer.change("count", list(range(20)))
        for number, (changes, how, other) in enumerate(steps):
            for change in changes:
                trainer.change(*change)
            if how == "resume" and number:
                trainer.start(options[other])
                trainer.saver.load()
                held = set(trainer.table.ids().tolist())
                assert held == set(list(trainer.saved.values())[-1])
            if how == "fail":
                fails(trainer, number)
            kinds.append(trainer.save(f"c{number}", how))
        return trainer.saved, kinds

    return on_ranks(size, work)


def fails(trainer, number):
    create = trainer.saver.storage.create

    def fail(name):
        raise OSError(5, "Input/output error", name)

    trainer.saver.storage.create = fail
    with pytest.raises(SaveFailedError):
        trainer.saver.save(f"failed{number}", trainer.rank, trainer.size)
    trainer.saver.storage.create = create


def holds(drawn_run):
    options, steps, size = drawn_run
    with TemporaryDirectory() as directory:
        root = Path(directory)
        of_ranks = go(root, options, steps, size)
        for ckpt_id in of_ranks[0][0]:
            expected = {id_: row for saved, _ in of_ranks for id_, row in saved[ckpt_id].items()}
            assert spec_reader.read(root, ckpt_id, "t") == expected, ckpt_id
        with CheckpointReader(str(root)) as reader:
            found = reader.lookup("t", list(range(61))).found
            assert [id_ for id_ in range(61) if found[id_]] == sorted(expected)
        newest = of_ranks[0][1][-1]
        if newest.kind == "delta":
            recckpt.rewrite.compact(str(root), out=str(root / "whole"), threads=1)
            assert spec_reader.read(root / "whole", newest.ckpt_id, "t") == expected
            assert (
                locate(open_storage(str(root / "whole")), newest.ckpt_id).manifest.tables[0].reduced
                == newest.tables[0].reduced
            )
        assert verify(str(root), threads=1) == []


test_every_checkpoint_of_a_chain_holds_what_was_asked_for = drawn(
    st.tuples(st.tuples(OPTIONS, OPTIONS), STEPS, st.sampled_from([1, 1, 2, 3])), few=8, many=600
)(holds)


def saver_of(root, **options):
    """Return a saver of a table with a count of its own id in each row, and what its saves say."""
    table, infos = HashTable(2, name="t", initializer=Constant(0.25)), []
    table.add_slot("count", (), torch.int64)
    table.add_slot("late", (2,))
    said = {"deltas": ALWAYS, "max_keep": None, "on_save": infos.append, **options}
    return Saver(Tables([table]), output_dir=str(root), **said), table, infos


def fill(table, counts):
    ids = torch.tensor(list(counts))
    table.insert(ids, ids[:, None] / torch.tensor([3.0, 7.0]), {"count": torch.tensor(list(counts.values()))})


def test_a_row_that_leaves_the_filter_is_a_delete_and_one_that_enters_is_a_whole_row(tmp_path):
    saver, table, infos = saver_of(tmp_path, choose=Choose(where=COUNT_2))
    fill(table, {1: 2, 2: 2, 3: 1, 4: 1})
    assert saver.save("a").tables[0].rows == 2
    fill(table, {2: 1, 3: 2})
    [entry] = saver.save("b").tables
    assert (entry.rows, entry.delta.upserts, entry.delta.deletes, entry.reduced.rows) == (2, 1, 1, 2)
    assert spec_reader.read(tmp_path, "b", "t").keys() == {1, 3}
    assert (infos[-1].kind, infos[-1].n_left_out) == ("delta", 2)


@pytest.mark.parametrize(
    "other",
    [Choose(where={"t": {"count": {"min": 3}}}), Choose(where=COUNT_2, store={"*@late": "bfloat16"}), None],
)
def test_a_chain_ends_where_other_rows_or_dtypes_are_asked_for(tmp_path, other):
    saver, table, _ = saver_of(tmp_path, choose=Choose(where=COUNT_2))
    fill(table, {1: 2, 2: 3})
    saver.save("a")
    again, table, infos = saver_of(tmp_path, choose=other)
    again.load()
    assert again.save("b").kind == "full"
    assert "is saved differently: choose= has changed" in infos[-1].why_full
    assert saver_of(tmp_path, choose=other)[0].load().rows_taken["t"] == (1 if "3" in str(other) else 2)


@pytest.mark.parametrize(
    ("slots", "store", "kind", "rows"),
    [(["*@count"], {"*@embedding": "bfloat16"}, "delta", {1, 2, 5}), ([], None, "full", {5})],
    ids=["with the counts", "without the counts, so that no row is known to have been saved"],
)
def test_a_resumed_run_goes_on_with_deltas_where_it_can_tell_which_of_its_rows_were_saved(
    tmp_path, slots, store, kind, rows
):
    choose = Choose(slots=slots, where=COUNT_2, store=store)
    saver, table, _ = saver_of(tmp_path, choose=choose)
    fill(table, {1: 2, 2: 3, 3: 1})
    saver.save("a")
    assert spec_reader.read(tmp_path, "a", "t").keys() == {1, 2}
    again, table, _ = saver_of(tmp_path, choose=choose)
    again.load()
    fill(table, {5: 5})
    record = again.save("b")
    assert record.kind == kind
    assert kind == "full" or record.tables[0].delta.upserts == 1
    assert spec_reader.read(tmp_path, "b", "t").keys() == rows


def test_open_files_and_the_reader_show_the_slots_and_dtypes_that_are_stored(tmp_path, caplog):
    saver, table, _ = saver_of(tmp_path / "weights", choose=Choose(slots=[]))
    fill(table, {1: 1})
    assert saver.save("a").tables[0].slots == (table.spec,)
    assert list(spec_reader.read(tmp_path / "weights", "a", "t")[1]) == ["embedding"]
    path = str(tmp_path / "narrow")
    saver, table, _ = saver_of(path, choose=Choose(store={"*@embedding": "float16"}))
    fill(table, {3: 1})
    saver.save("a")
    assert pl.from_arrow(recckpt.inspect.dataset(path, "t").to_table())["embedding"].dtype.inner == pl.Float16
    assert CheckpointReader(path).lookup("t", [3]).values.dtype == "float16"
    saver, table, _ = saver_of(tmp_path / "as it is")
    fill(table, {1: 2})
    assert saver.save("a").tables[0].reduced is None
    saver_of(tmp_path / "as it is")[0].load()
    assert not [text for text in caplog.messages if "bit for bit" in text]


def test_a_resume_says_in_plain_words_what_is_not_as_it_was(tmp_path, caplog):
    saver, table, _ = saver_of(
        tmp_path, choose=Choose(slots=["*@count"], where=COUNT_2, store={"*@embedding": "bfloat16"})
    )
    fill(table, {1: 2, 2: 3, 3: 1})
    manager = CheckpointManager(saver, 10)
    manager.save()
    again, restored, _ = saver_of(tmp_path)
    caplog.set_level(logging.WARNING)
    CheckpointManager(again, 10).restore()
    [said] = [text for text in caplog.messages if "bit for bit" in text]
    assert "table 't' without late; without 1 row (saved: count of at least 2); embedding narrower than float32" in said
    assert restored.embeddings().dtype == torch.float32
    rows = dict(zip(restored.ids().tolist(), restored.embeddings().tolist(), strict=True))
    assert rows == {id_: torch.tensor([id_ / 3, id_ / 7]).bfloat16().tolist() for id_ in (1, 2)}
    assert restored.slots["late"].tolist() == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("slots", "steps"),
    [
        (["!sparse_opt"], {}),
        (["!t@*exp_avg*"], {"u": {"step": 3}}),
        (["!*@*exp_avg"], {"t": {"step": 3}, "u": {"step": 3}}),
    ],
)
def test_an_optimizer_keeps_its_settings_and_where_all_of_a_tables_moments_are_left_out_starts_its_steps_anew(
    tmp_path, slots, steps
):
    def made():
        tables = [HashTable(2, name="t"), HashTable(2, name="u")]
        optimizer = SparseAdam(tables, lr=0.1)
        return tables, optimizer, Saver(Tables(tables), optimizer, str(tmp_path), choose=Choose(slots=slots))

    tables, optimizer, saver = made()
    for _ in range(3):
        sum(table(torch.arange(4)).sum() for table in tables).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.025  # as a schedule does
    saver.save("a")
    _, resumed, again = made()
    again.load()
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert resumed.state_dict()["state"] == steps


def test_whoever_looks_compares_or_exports_is_told_what_was_not_saved(tmp_path):
    saver, table, _ = saver_of(tmp_path / "run", choose=Choose(slots=["*@count"], where=COUNT_2), deltas=False)
    fill(table, {1: 2, 2: 3, 3: 1})
    saver.save("a")
    whole, other, _ = saver_of(tmp_path / "whole", deltas=False)
    fill(other, {1: 2, 2: 3, 3: 1})
    whole.save("a")
    said = "without late; without 1 row (saved: count of at least 2)"
    assert ls(Namespace(dir=str(tmp_path / "run"), near=None)).data["checkpoints"][0]["marks"] == ["newest", "reduced"]
    assert ls(Namespace(dir=str(tmp_path / "whole"), near=None)).data["checkpoints"][0]["marks"] == ["newest"]
    found = recckpt.diff(tmp_path / "whole", tmp_path / "run")
    assert (found.before.reduced, found.after.reduced) == ((), (f"table 't' {said}",))
    assert f"; saved with table 't' {said}" in str(found)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", to="parquet")
    assert [(left.name, left.reason) for left in done.left_out] == [("table t", f"was saved {said}")]
    done = export_checkpoint(tmp_path / "whole", tmp_path / "out_whole", to="parquet")
    assert done.left_out == ()


def test_the_largest_error_is_that_of_any_row_of_the_chain(tmp_path):
    saver, table, infos = saver_of(tmp_path, choose=Choose(store={"*@embedding": "bfloat16", "t@late": "float16"}))
    table.insert(torch.tensor([1, 2]), torch.tensor([[1.0, 1 + 2**-9], [4.0, 8.0]]))
    saver.save("a")
    assert infos[-1].largest_errors == {"t@embedding": 2**-9, "t@late": 0.0}
    table.insert(torch.tensor([2]), torch.tensor([[1 + 2**-10, 8.0]]))
    record = saver.save("b")
    assert record.kind == "delta"
    assert infos[-1].largest_errors == {"t@embedding": 2**-9, "t@late": 0.0}, "row 1 is part of it"
    table.clear()
    table.insert(torch.tensor([2]), torch.tensor([[1 + 2**-10, math.nan]]))
    saver.save("c")
    assert infos[-1].largest_errors == {"t@embedding": 2**-10, "t@late": 0.0}


def test_tables_of_users_own_are_reduced_too_and_loaded_in_their_dtype(tmp_path):
    def model(*ids):
        table = ForeignTable(
            "t", torch.tensor(ids, dtype=torch.int64), torch.tensor([[i / 3] * 2 for i in ids]).view(-1, 2)
        )
        return table, Tables([table])

    choose = Choose(where={"t": [1, 2, 9]}, store={"*@embedding": "bfloat16"})
    Saver(model(1, 2, 3)[1], output_dir=str(tmp_path), choose=choose).save("a")
    table, live = model()
    Saver(live, output_dir=str(tmp_path)).load()
    assert sorted(table.ids().tolist()) == [1, 2]
    assert table.embeddings().dtype == torch.float32


def test_ranks_that_are_asked_for_different_rows_save_nothing(tmp_path):
    def save(rank, connect):
        table = HashTable(2, name="t", slice=gen_slice(rank, 2))
        table.add_slot("count", ())
        least = {"t": {"count": {"min": rank}}}
        saver = connect(Saver(Tables([table]), output_dir=str(tmp_path), choose=Choose(where=least)))
        with pytest.raises(SaveFailedError, match="rank 1: its choose= differs from that of rank 0"):
            saver.save("a", rank, 2)

    on_ranks(2, save)
    assert not (tmp_path / "a").exists()
