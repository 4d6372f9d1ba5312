"""A live table with its door, as a saver takes it and as a load fills it."""

import numpy as np
import pytest
import torch
from support.builders import flip_bit
from support.gate import Gate
from support.live_runs import DIM, N_ROWS, Run, assert_same, read_rows
from torch import nn, optim

from recckpt import Deltas, Saver
from recckpt.errors import LiveTableError, LoadConfError, PartlyLoadedError
from recckpt.live import live_tables
from recckpt.policies import Choose
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdam
from recckpt.types import RowShare, is_hashtable

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def table():
    model = nn.Sequential(nn.Embedding(20, 2, sparse=True))
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    return live_tables(model, optimizer, min_rows=1)["0"]


def test_it_is_a_table_that_can_be_saved_whose_rows_are_written_where_they_lie_and_not_dropped(table):
    assert is_hashtable(table)
    assert len(table) == 20
    assert table.ids().tolist() == list(range(20))
    weight = table.live.weight
    assert torch.equal(table.embeddings(), weight)
    assert list(table.slots) == ["sparse_adagrad_sum"]
    assert table.share == RowShare(0, 20, 20)
    table.insert(torch.tensor([4, 2]), torch.ones(2, 2), {"sparse_adagrad_sum": torch.full((2, 2), 3.0)})
    assert table.live.weight is weight
    assert weight[[2, 4]].tolist() == [[1, 1], [1, 1]]
    assert table.slots["sparse_adagrad_sum"][:5].sum(1).tolist() == [0, 0, 6, 0, 6]
    before = table.embeddings().clone()
    for ids in ([20], [3, -1], [1 << 40]):
        with pytest.raises(LiveTableError, match=r"found rows .* to .*, expected rows 0 to 19"):
            table.insert(torch.tensor(ids), torch.ones(len(ids), 2))
    with pytest.raises(LiveTableError, match="not recckpt's to drop"):
        table.clear()
    assert torch.equal(table.embeddings(), before)
    table.close()
    table.close()
    with pytest.raises(LiveTableError, match="is closed"):
        table.prepare()


def of_ours(ids, dim=DIM, rule=SparseAdagrad):
    """Return a trained HashTable of these ids in a model, and its optimizer."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"users": HashTable(dim, name="users")})
    optimizer = rule([model["users"]], lr=0.1)
    model["users"](torch.tensor(ids)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved_by_ours(tmp_path, ids, **options):
    model, optimizer = of_ours(ids, **options)
    Saver(model, optimizer, str(tmp_path / "ours")).save("a")
    return str(tmp_path / "ours"), model["users"]


def rows_of(table):
    return {
        id_: [table.embeddings()[i].tolist(), *(table.slots[slot][i].tolist() for slot in sorted(table.slots))]
        for i, id_ in enumerate(table.ids().tolist())
    }


@pytest.mark.parametrize(("rule", "ours"), [("sparse Adagrad", SparseAdagrad), ("SparseAdam", SparseAdam)])
def test_rows_of_our_tables_warm_start_a_live_one_and_go_back(tmp_path, rule, ours):
    path, table = saved_by_ours(tmp_path, [3, 5, 9], rule=ours)
    run = Run(tmp_path / "live", rule)
    before = rows_of(run.tables["users"])
    report = run.saver.load_by_config({"path": path, "load": ["users@*"]})
    assert report.rows_taken["users"] == 3
    now = rows_of(run.tables["users"])
    assert {id_: now[id_] for id_ in (3, 5, 9)} == rows_of(table)
    assert {id_: row for id_, row in now.items() if id_ not in (3, 5, 9)} == {
        id_: row for id_, row in before.items() if id_ not in (3, 5, 9)
    }
    run.train(2)
    run.saver.save("live")
    model, optimizer = of_ours([100], rule=ours)
    Saver(model, optimizer, str(tmp_path / "back")).load_by_config(
        {"path": str(tmp_path / "live"), "load": ["users@*"]}
    )
    assert rows_of(model["users"]) == rows_of(run.tables["users"])


def test_ids_without_a_row_are_refused_before_anything_is_written_or_left_out(tmp_path):
    path, table = saved_by_ours(tmp_path, [3, N_ROWS, 10**9])
    run = Run(tmp_path / "live")
    state, conf = run.state(), {"path": path, "load": ["users@*"]}
    with pytest.raises(
        LiveTableError,
        match=r"'users': found ids from 3 to 1000000000, expected ids from 0 to 59.*'on_mismatch': 'resize'",
    ):
        run.saver.load_by_config(conf)
    with pytest.raises(LoadConfError, match="found 'drop', expected 'error' or 'skip'"):
        run.saver.load_by_config({**conf, "out_of_range": "drop"})
    wide, _ = saved_by_ours(tmp_path / "wide", [1], dim=DIM + 1)
    with pytest.raises(ValueError, match="users@embedding"):
        run.saver.load_by_config({**conf, "path": wide})
    assert_same(run.state(), state)
    report = run.saver.load_by_config({**conf, "out_of_range": "skip"})
    assert (report.rows_taken["users"], report.rows_filtered["users"]) == (1, 2)
    assert rows_of(run.tables["users"])[3] == rows_of(table)[3]


@pytest.mark.parametrize(
    ("where", "kind"), [(None, "delta"), ({"users": {"ids": list(range(30))}}, "full")], ids=["all", "some"]
)
def test_a_whole_restore_makes_a_base_for_deltas_and_one_of_some_rows_none(tmp_path, where, kind):
    run = Run(tmp_path, "Adagrad", deltas=True, choose=Choose(where=where))
    run.train()
    run.saver.save("a")
    other = Run(tmp_path, "Adagrad", seed=1, deltas=True)
    other.saver.load()
    other.train()
    assert other.saver.save("b").kind == kind


def test_a_restore_that_fails_in_the_middle_says_so_and_another_mends_it(tmp_path):
    run = Run(tmp_path, max_keep=None)
    run.train()
    run.saver.save("a")
    state = run.state()
    run.train()
    run.saver.save("b")
    damaged = next((tmp_path / "b").rglob("*.arrow"))
    flip_bit(damaged, damaged.stat().st_size // 2)
    before = run.state()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run.saver.load(str(tmp_path / "b"), direct_path=True)
    assert "checksum" in str(caught.value)
    assert not isinstance(caught.value, PartlyLoadedError)  # all is read before the first row is written
    assert_same(run.state(), before)
    run.saver.load(ckpt_id="a")
    assert_same(run.state(), state)


def test_a_load_beside_the_save_of_another_saver_leaves_that_its_rows(tmp_path, monkeypatch):
    run = Run(tmp_path / "one", "Adagrad", max_keep=None)
    other = run.new_saver(tmp_path / "two")
    run.saver.save("a")
    run.train()
    expected = run.rows()
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = other.save_async("b")
    run.saver.load(ckpt_id="a")
    gate.open()
    handle.wait()
    run.url = tmp_path / "two"
    assert read_rows(run, "b") == expected
    assert run.rows() != expected


def test_single_slots_are_loaded_by_their_names(tmp_path):
    run = Run(tmp_path)
    run.train()
    run.saver.save("a")
    state = run.state()
    run.train()
    trained = run.state()
    run.saver.load(load_conf={"load": ["users@sparse_adagrad_sum"], "hashtable_clear": False})
    assert_same(run.row_optim.state[run.model.users.weight]["sum"], state["0"]["state"][0]["sum"])
    assert_same(run.state()["model"], trained["model"])


def test_wider_numbers_are_cast_where_that_is_asked_for(tmp_path):
    torch.manual_seed(0)
    wide = nn.ModuleDict({"users": nn.Embedding(N_ROWS, DIM, dtype=torch.float64)})
    tables = live_tables(wide, optim.SGD(wide.parameters(), lr=0.1), min_rows=1)
    Saver(wide, output_dir=str(tmp_path / "wide"), tables=tables).save("a")
    run = Run(tmp_path / "live", "SGD")
    run.saver.load_by_config({"path": str(tmp_path / "wide"), "load": ["users@embedding"], "on_mismatch": "cast"})
    assert np.array_equal(run.model.users.weight.detach().cpu(), wide["users"].weight.detach().float())


def test_deltas_are_loaded_over_their_full_checkpoint(tmp_path):
    run = Run(tmp_path, "Adagrad", deltas=Deltas(max_dirty=1, max_chain_bytes=100), max_keep=None)
    states = []
    for i in range(4):
        run.train(1, 2)
        states.append(run.state())
        record = run.saver.save(f"c{i}", step=i)
    assert record.kind == "delta"
    for i in (2, 0, 3):
        run.saver.load(ckpt_id=f"c{i}")
        assert_same(run.state(), states[i])
