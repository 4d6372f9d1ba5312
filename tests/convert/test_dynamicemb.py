"""Dumps of dynamicemb, in and out, by the files that its DynamicEmbDump writes; the library needs a GPU."""

import json

import numpy as np
import pytest
import torch
from support.conversions import refused, rows_bytes, table_bytes
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint
from recckpt.errors import ConversionError
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdam, SparseRowWiseAdagrad, SparseSGD

COLLECTION, VALUES = "model.sparse.ec", "t_emb_values.rank_1.world_size_2"
ADAM = {"opt_type": "adam", "lr": 0.1, "iters": 7, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
RANDOM = np.random.default_rng(0)


def floats(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def dump(path, table, ranks, settings=None, collection=COLLECTION, states="emb_opt_values"):
    """Write files as a dump of some ranks has them: of each (keys, values, scores, states), None where it has none."""
    directory = path / "dump" / collection
    directory.mkdir(parents=True, exist_ok=True)
    for rank, columns in enumerate(ranks):
        for item, values in zip(("emb_keys", "emb_values", "emb_scores", states), columns, strict=True):
            if values is not None:
                values.tofile(directory / f"{table}_{item}.rank_{rank}.world_size_{len(ranks)}")
    if settings is not None:
        (directory / f"{table}_opt_args.json").write_text(json.dumps(settings))
    return path / "dump"


def ids(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize("states", ["emb_opt_values", "opt_values"])
def test_rows_of_all_ranks_come_with_scores_and_both_moments(tmp_path, states):
    values, both, scores = floats(5, 3), floats(5, 6), ids(9, 8, 7, 6, 5)
    ranks = [(ids(-4, 2), values[:2], scores[:2], both[:2]), (ids(1, 2**62, -3), values[2:], scores[2:], both[2:])]
    source = dump(tmp_path, "item", ranks, {**ADAM, "evict_strategy": "EvictStrategy.KLfu"}, states=states)
    done = import_checkpoint(source, tmp_path / "out", budget_bytes=100)
    expected = {"id": ids(-4, 2, 1, 2**62, -3), "embedding": values, "count": scores}
    expected |= {"sparse_adam_exp_avg": both[:, :3].copy(), "sparse_adam_exp_avg_sq": both[:, 3:].copy()}
    assert table_bytes(tmp_path / "out", "item") == rows_bytes(expected)
    assert done.contents.format == "dynamicemb"
    assert done.contents.extra["sparse_optim"]["state"] == {"item": {"step": 7}}
    assert [left.name for left in done.contents.left_out] == ["table item, scores", "table item, settings"]


def test_old_states_of_a_table_whose_name_ends_as_those_of_files_begin_are_its_own(tmp_path):
    values, both = floats(2, 3), floats(2, 6)
    source = dump(tmp_path, "user_emb", [(ids(1, 2), values, None, both)], ADAM, states="opt_values")
    done = import_checkpoint(source, tmp_path / "out")
    assert [slot.name for slot in done.contents.tables[0].slots][1:] == [
        "sparse_adam_exp_avg",
        "sparse_adam_exp_avg_sq",
    ]
    assert done.rows == {"user_emb": 2}


@pytest.mark.parametrize(
    ("kind", "width", "slot"),
    [
        ("exact_adagrad", 3, "sparse_adagrad_sum"),
        ("exact_row_wise_adagrad", 1, "sparse_rowwise_adagrad_sum"),
        ("ftrl", 6, None),
        (None, 6, None),
    ],
)
def test_states_become_the_slots_of_their_optimizer_or_are_listed(tmp_path, kind, width, slot):
    values, states = floats(2, 3), floats(2, width)
    source = dump(tmp_path, "t", [(ids(1, 2), values, None, states)], kind and {"opt_type": kind})
    done = import_checkpoint(source, tmp_path / "out")
    expected = {"id": ids(1, 2), "embedding": values}
    if slot:
        expected[slot] = states[:, 0].copy() if width == 1 else states
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(expected)
    assert any("optimizer states" in left.name for left in done.contents.left_out) == (slot is None)


def test_scores_of_several_words_and_of_other_strategies_are_kept_as_they_are(tmp_path):
    scores = ids(1, 2, 3, 4).reshape(2, 2)
    import_checkpoint(dump(tmp_path, "t", [(ids(1, 2), floats(2, 3), scores, None)]), tmp_path / "out")
    with CheckpointReader(tmp_path / "out") as reader:
        slots = {slot.name: (slot.dtype, slot.shape) for slot in reader.manifest.tables[0].slots}
    assert slots["score"] == ("int64", (2,))


def test_what_a_dump_has_beside_rows_is_listed(tmp_path):
    source = dump(tmp_path, "t", [(ids(1), floats(1, 2), None, None), (ids(), floats(0, 2), None, None)])
    dump(tmp_path, "empty", [(ids(), floats(0, 2), None, None)])
    for rank in (0, 1):
        for item in ("counter_keys", "counter_frequencies"):
            ids(5).tofile(source / COLLECTION / f"t_{item}.rank_{rank}.world_size_2")
    (source / "plan").write_text("x")
    done = import_checkpoint(source, tmp_path / "out")
    assert done.rows == {"t": 1}
    assert {left.name for left in done.contents.left_out} == {"table t, counters", "table empty", "plan"}


def test_tables_of_one_name_in_two_collections_get_names(tmp_path):
    rows = {name: floats(2, 3) for name in ("model.a", "model.b")}
    for name, values in rows.items():
        source = dump(tmp_path, "t", [(ids(1, 2), values, None, None)], collection=name)
    done = import_checkpoint(source, tmp_path / "out", options=ImportOptions(names={"model.b/t": "b"}))
    assert done.rows == {"model.a/t": 2, "b": 2}
    assert table_bytes(tmp_path / "out", "b") == rows_bytes({"id": ids(1, 2), "embedding": rows["model.b"]})


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: floats(23).astype("i1").tofile(d / VALUES), "23 bytes, expected 2 rows, one for each key"),
        (lambda d: ids(1).tofile(d / "t_emb_keys.rank_0.world_size_4"), "files of dumps of 2 and of 4 ranks"),
        (lambda d: (d / VALUES).unlink(), r"ranks \[0\], expected one of each of 2 ranks"),
        (lambda d: [path.unlink() for path in d.glob("*values*")], "files of emb_keys, emb_scores"),
        (lambda d: (d / "t_opt_args.json").write_text("{"), "invalid JSON"),
        (lambda d: (d / "t_opt_args.json").write_text("[]"), "a list, expected a dict"),
        (lambda d: (d / "t_emb_keys.rank_0.world_size_2").write_bytes(b"1234"), "whole int64 keys"),
        (lambda d: ids(1).tofile(d / "t_emb_scores.rank_0.world_size_2"), "8 bytes, expected 2 rows"),
        (lambda d: ids(1, 2).tofile(d / "t_emb_keys.rank_1.world_size_2"), "id 1 twice|twice"),
    ],
)
def test_a_dump_that_is_damaged_is_refused_and_nothing_is_written(tmp_path, damage, match):
    ranks = [(ids(1, 2), floats(2, 3), ids(1, 2), None), (ids(3, 4), floats(2, 3), ids(1, 2), None)]
    source = dump(tmp_path, "t", ranks, ADAM)
    damage(source / COLLECTION)
    refused(source, match)


def test_rows_of_two_lengths_are_refused(tmp_path):
    ranks = [(ids(1), floats(1, 3), None, None), (ids(2), floats(1, 4), None, None)]
    refused(dump(tmp_path, "t", ranks), "rows of 3 and of 4 values")


# out

OPTIMIZERS = {
    "adam": lambda tables: SparseAdam(tables, lr=0.1),
    "exact_adagrad": lambda tables: SparseAdagrad(tables, lr=0.1, initial_accumulator_value=0.5),
    "exact_row_wise_adagrad": lambda tables: SparseRowWiseAdagrad(tables, lr=0.1),
    "": lambda tables: SparseSGD(tables, lr=0.1),
}


def trained(path, kind, track=("count",), dtype=torch.float32, steps=2):
    """Return an output dir of a run."""
    model = nn.ModuleDict({"t": HashTable(4, name="t", track=track, dtype=dtype)})
    optim = OPTIMIZERS[kind](list(model.values()))
    for step in range(steps):
        train(model, optim, step)
    Saver(model, optim, output_dir=path / "run").save("1")
    return path / "run", model, optim


def train(model, optim, step):
    optim.zero_grad()
    rows = model["t"](torch.arange(step, step + 5))
    (rows.float() * torch.arange(20.0).view(5, 4)).sum().backward()
    optim.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_from_what_was_exported_and_imported_again(tmp_path, kind):
    run, model, optim = trained(tmp_path, kind)
    export_checkpoint(run, tmp_path / "dump" / COLLECTION, to="dynamicemb")
    done = import_checkpoint(tmp_path / "dump", tmp_path / "back")
    assert table_bytes(tmp_path / "back", "t") == table_bytes(run, "t")
    assert done.contents.format == "dynamicemb"
    again = nn.ModuleDict({"t": HashTable(4, name="t", track=("count",))})
    own = OPTIMIZERS[kind](list(again.values()))
    Saver(again, own, output_dir=tmp_path / "new").load_by_config([{"path": str(tmp_path / "back")}])
    for one, of_it in ((model, optim), (again, own)):
        train(one, of_it, 9)
    rows = (one["t"].eval()(torch.arange(14)) for one in (model, again))
    assert torch.equal(*rows)


def test_the_files_are_those_that_dynamicemb_loads(tmp_path):
    run, model, _ = trained(tmp_path, "adam")
    done = export_checkpoint(run, tmp_path / "out", to="dynamicemb")
    names = {path.name: path for path in (tmp_path / "out").iterdir()}
    items = ("emb_keys", "emb_opt_values", "emb_scores", "emb_values")
    assert sorted(names) == sorted([*(f"t_{item}.rank_0.world_size_1" for item in items), "t_opt_args.json"])
    keys = np.fromfile(names["t_emb_keys.rank_0.world_size_1"], np.int64)
    values = np.fromfile(names["t_emb_values.rank_0.world_size_1"], np.float32).reshape(-1, 4)
    assert np.array_equal(values, model["t"].lookup(torch.from_numpy(keys))[0].numpy())
    settings = json.loads(names["t_opt_args.json"].read_text())
    expected = {**ADAM, "iters": 2, "evict_strategy": "EvictStrategy.KLfu"}
    assert settings == expected
    assert [left.name for left in done.left_out] == ["sparse_optim"]


def test_other_floats_become_float32_and_what_has_no_place_is_listed(tmp_path):
    run, model, _ = trained(tmp_path, "", track=("time",), dtype=torch.bfloat16)
    done = export_checkpoint(run, tmp_path / "out", to="dynamicemb")
    values = np.fromfile(tmp_path / "out/t_emb_values.rank_0.world_size_1", np.float32)
    keys = np.fromfile(tmp_path / "out/t_emb_keys.rank_0.world_size_1", np.int64)
    assert values.tolist() == model["t"].lookup(torch.from_numpy(keys))[0].float().flatten().tolist()
    assert "table t, slot last_time" in [left.name for left in done.left_out]


def test_states_whose_settings_nobody_knows_are_left_out(tmp_path):
    both = floats(1, 4)
    import_checkpoint(dump(tmp_path, "t", [(ids(1), floats(1, 2), None, both)], ADAM), tmp_path / "run")
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", to="dynamicemb")
    assert [left.name for left in done.left_out if "sparse_optim" not in left.name] == ["table t, optimizer states"]
    assert not list((tmp_path / "out").glob("*opt*"))


@pytest.mark.parametrize("shape", [(2, 2), ()])
def test_vectors_that_a_dump_cannot_hold_are_refused(tmp_path, shape):
    np.savez(tmp_path / "t.npz", id=ids(1, 2), embedding=np.ones((2, *shape), np.float32))
    import_checkpoint(tmp_path / "t.npz", tmp_path / "run")
    with pytest.raises(ConversionError, match="expected one dimension of float32"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="dynamicemb")
    assert not (tmp_path / "out").exists()
