"""Sharded tables on two and on four real processes."""

from pathlib import Path

import pytest
import torch
from support.rank_processes import results, run_script

from recckpt import Saver
from recckpt.sparse import HashTable, SparseAdam

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SIZES = (2, 4)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the ranks have left what they found."""
    root = tmp_path_factory.mktemp("ranks")
    run_script(HERE / "sharded_ranks.py", root, *SIZES)
    return root


@pytest.fixture(params=SIZES)
def size(request):
    return request.param


@pytest.fixture
def scene(root, size):
    found = results(root, size)
    return lambda name: [rank[name] for rank in found]


@pytest.fixture
def alone(monkeypatch):
    """A run of one rank on plain tables: the model, its optimizer and its losses."""
    monkeypatch.syspath_prepend(str(HERE))
    from sharded_ranks import Model, train

    torch.manual_seed(0)
    model = Model(HashTable)
    optim = SparseAdam(list(model.tables), lr=0.05)
    return model, optim, [train(model, optim, model, step, 0, 1) for step in range(5)]


def merged(shards):
    """Return the rows of all ranks, table by table, after making sure that no id is on two."""
    tables = {}
    for shard in shards:
        for name, rows in shard.items():
            assert not tables.setdefault(name, {}).keys() & rows.keys()
            tables[name] |= rows
    return tables


def assert_same_rows(found, expected):
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert found[name].keys() == rows.keys()
        for id_, values in rows.items():
            assert found[name][id_] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_beside_ddp_they_learn_what_one_rank_learns_from_all_batches(scene, alone):
    from sharded_ranks import rows_of

    ranks, (model, _, losses) = scene("beside_ddp"), alone
    assert_same_rows(merged(rank["rows"] for rank in ranks), rows_of(model))
    for step, loss in enumerate(losses):
        assert sum(rank["losses"][step] for rank in ranks) / len(ranks) == pytest.approx(loss, rel=1e-5)
    for rank in ranks:
        assert rank["dense"] == ranks[0]["dense"]
        for found, parameter in zip(rank["dense"], model.top.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(found), parameter.detach())


def test_tables_of_wrapped_models_are_left_out_of_steps_frozen_and_thawed(scene):
    for rank in scene("freeze_what_is_wrapped"):
        assert len(rank) == 4
        for moved in rank.values():
            assert moved == [["user", "item"], ["user"], ["user"], ["item"]]


def test_what_they_save_is_a_table_that_one_rank_loads(scene, root, size, alone):
    from sharded_ranks import rows_of

    model, optim, _ = alone
    Saver(model, optim, str(root / "own")).load(root / f"runs-{size}" / "trained", load_conf={"load": ["sparse"]})
    saved = merged(rank["rows"] for rank in scene("beside_ddp"))
    assert {name: rows.keys() for name, rows in rows_of(model).items()} == {k: v.keys() for k, v in saved.items()}
    for name, rows in rows_of(model).items():
        dim = len(next(iter(rows.values()))) // 3
        assert {id_: values[:dim] for id_, values in rows.items()} == {
            id_: values[:dim] for id_, values in saved[name].items()
        }


def test_wrong_ids_on_one_rank_raise_on_all_and_the_next_lookup_works(scene):
    for failed, _, rows in scene("fail_and_go_on"):
        rank, text, n_rows = failed
        assert (rank, n_rows) == (1, 0)
        assert "failed on rank 1: ValueError: ids must be int64, found torch.int16" in text
        assert rows == scene("fail_and_go_on")[0][2]


def test_a_forgotten_backward_pass_on_one_rank_raises_on_all(scene):
    for _, (rank, text), _ in scene("fail_and_go_on"):
        assert rank == 1
        assert text.startswith("the backward pass through 't'")
        assert "failed on rank 1: it is at looking up 't'" in text


def test_many_rows_from_one_rank_few_from_others_and_none_at_all_find_their_way(scene, size):
    ranks = scene("send_all_and_nothing")
    for number, dim, has_gradients in ((0, 300, True), (1, 1, True), (2, 3, False)):
        of_table = [rank[4 * number : 4 * number + 4] for rank in ranks]
        for rank, (first, second, third, _) in enumerate(of_table):
            assert (first, second, third) == ((0, dim), (5000 if rank == 0 else 0, dim), (1 + rank, dim))
        assert sum(n_rows for *_, (n_rows, _) in of_table) == 5000
        if has_gradients:
            asked = 5000 + sum(1 + rank for rank in range(size))
            assert sum(total for *_, (_, total) in of_table) == pytest.approx(asked * dim / size)


def test_a_group_of_some_ranks_shares_a_table_and_no_other_rank_can(scene, size):
    ranks = scene("share_between_two")
    for first in range(0, size, 2):
        pair = ranks[first : first + 2]
        assert sorted(pair[0][0] + pair[1][0]) == [id_ + first // 2 * 100 for id_ in range(10)]
        assert set(pair[0][1] + pair[1][1]) == {2.0}
    for _, _, outside in ranks if size > 2 else []:
        assert "expected a process group that this process belongs to" in outside


def test_occurrences_are_counted_over_all_ranks(scene, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    from sharded_ranks import count_together

    assert merged(scene("count_together")) == count_together(0, 1, None)


def test_they_admit_the_ids_that_one_rank_admits_also_after_a_save_of_another_number_of_ranks(
    scene, root, size, monkeypatch
):
    monkeypatch.syspath_prepend(str(HERE))
    from sharded_ranks import Admitting

    alone = Admitting(HashTable)
    alone.train_on(range(6), 0, 1)
    again = Admitting(HashTable)
    Saver(again, None, str(root / "own")).load(root / f"admitting-{size}" / "half")
    again.train_on(range(3, 6), 0, 1)
    straight, resharded = zip(*scene("admit_together"), strict=True)
    for found in (merged(straight), merged(resharded), again.rows()):
        assert found.keys() == alone.rows().keys()
        for name, rows in alone.rows().items():
            assert found[name].keys() == rows.keys()
            assert {i: values[2:] for i, values in found[name].items()} == {i: v[2:] for i, v in rows.items()}
    assert merged(straight)["bloom.candidates_1x1"] == alone.rows()["bloom.candidates_1x1"]
    assert len(alone.rows()["exact"]) < len(alone.rows()["all"])
