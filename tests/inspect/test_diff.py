"""Two checkpoints compared, held against rows that were read one by one."""

import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from support.builders import Run, flip_bit
from support.delta_runs import run_with_chain
from support.forge import Forge, filled, save_tables
from support.sweeps import mostly_slow

import recckpt
from recckpt import CheckpointReader, Saver
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format.buckets import bucket_of, gen_slice
from recckpt.inspect import diff_tables
from recckpt.sparse import HashTable
from recckpt.sparse.files.arrow_format import column_buffer, column_values


def rows_of(path, table):
    """Return id -> values of all slots in a row."""
    reader, found = CheckpointReader(path), {}
    slots = reader.manifest.named_table(table).slots
    for batch in reader.table(table):
        columns = [column_values(batch.column(slot.name), slot).reshape(batch.num_rows, -1) for slot in slots]
        values = np.concatenate(columns, axis=1, dtype=np.float64)
        found |= dict(zip(batch.column("id").to_pylist(), values, strict=True))
    return found


def agrees_with_rows(found, one, other, table):
    before, after = rows_of(one, table), rows_of(other, table)
    both = before.keys() & after.keys()
    changed = {id_ for id_ in both if (before[id_] != after[id_]).any()}
    counts = (len(after.keys() - both), len(before.keys() - both), len(changed), len(both - changed))
    assert (found.added, found.gone, found.changed, found.same) == counts
    assert (found.rows_before, found.rows_after) == (len(before), len(after))
    return before, after


def random_table(draw, n_ids, name="item"):
    table = HashTable(3, name=name)
    table.add_slot("sparse_m", (2, 2), torch.float32)
    ids = torch.from_numpy(draw.choice(2 * n_ids, n_ids, replace=False) - n_ids)
    pick = torch.from_numpy(draw.integers(0, 2, (n_ids, 3))).float()
    table.insert(ids, pick, {"sparse_m": pick[:, :1, None].expand(-1, 2, 2).contiguous()})
    return table


def in_shards(table, n_shards):
    """Return the rows of a table as those of several ranks."""
    shards = []
    for number in range(n_shards):
        part = gen_slice(number, n_shards)
        own = HashTable(3, name=table.name, slice=part)
        own.add_slot("sparse_m", (2, 2), torch.float32)
        mask = part.owns(table.ids())
        own.insert(table.ids()[mask], table.embeddings()[mask], {"sparse_m": table.slots["sparse_m"][mask]})
        shards.append([own])
    return shards


@pytest.mark.parametrize("shards", [(1, 1), (1, 3), (4, 2)])
def test_rows_are_compared_by_id_whatever_the_number_of_ranks(tmp_path, monkeypatch, shards):
    monkeypatch.setattr(diff_tables, "_BUDGET_BYTES", 4000)  # many ranges of buckets
    draw = np.random.default_rng(0)
    for name, n_shards in zip("ab", shards, strict=True):
        save_tables(tmp_path / name, *in_shards(random_table(draw, 400), n_shards), batch_bytes=1000)
    found = recckpt.diff(tmp_path / "a", tmp_path / "b").table("item")
    before, after = agrees_with_rows(found, tmp_path / "a", tmp_path / "b", "item")

    steps = {id_: after[id_] - before[id_] for id_ in before.keys() & after.keys()}
    for slot, columns in (("embedding", slice(0, 3)), ("sparse_m", slice(3, 7))):
        lengths = [np.linalg.norm(step[columns]) for step in steps.values() if step[columns].any()]
        [seen] = [each for each in found.slots if each.name == slot]
        assert (seen.changed, seen.l2.n) == (len(lengths), len(lengths))
        assert seen.l2.most == pytest.approx(max(lengths))
        assert seen.l2.quantiles[0.5] == pytest.approx(np.quantile(lengths, 0.5, method="inverted_cdf"), rel=0.004)
    farthest = sorted(((-np.linalg.norm(step[:3]), id_) for id_, step in steps.items()))[:10]
    assert [row.id for row in found.moved] == [id_ for _, id_ in farthest]


@mostly_slow()
@pytest.mark.parametrize("changed_slots", [("embedding",), ("sparse_m",), ("embedding", "sparse_m")])
def test_ranges_in_which_most_rows_changed_and_ranges_with_few_are_compared_alike(tmp_path, monkeypatch, changed_slots):
    monkeypatch.setattr(diff_tables, "_RANGE_BYTES", 8000)
    monkeypatch.setattr(diff_tables, "_CHUNK_BYTES", 200)
    monkeypatch.setattr(diff_tables, "_LEAST_ROWS", 1)
    draw, ids = np.random.default_rng(0), torch.arange(1000)
    buckets = bucket_of(ids.numpy())
    share = np.select([buckets < 20_000, buckets < 40_000], [0.02, 1.0], 0.0)
    changes = torch.from_numpy(draw.random(len(ids)) < share).float()[:, None]
    slots = {"embedding": torch.zeros(len(ids), 3), "sparse_m": torch.ones(len(ids), 2)}
    for name in "ab":
        table = HashTable(3, name="item")
        table.add_slot("sparse_m", (2,), torch.float32)
        table.insert(ids, slots["embedding"], {"sparse_m": slots["sparse_m"]})
        save_tables(tmp_path / name, [table], batch_bytes=1000)
        slots |= {slot: slots[slot] + changes for slot in changed_slots}
    found = recckpt.diff(tmp_path / "a", tmp_path / "b").table("item")
    agrees_with_rows(found, tmp_path / "a", tmp_path / "b", "item")
    assert 200 < found.changed == int(changes.sum())
    assert {slot.name: slot.changed for slot in found.slots} == {
        slot: found.changed if slot in changed_slots else 0 for slot in slots
    }


@pytest.mark.parametrize(("one", "other"), [("ckpt_1", "ckpt_3"), ("ckpt_3", "ckpt_2"), ("ckpt_3", "ckpt_1")])
def test_chains_are_compared_as_what_they_stand_for(tmp_path, one, other):
    run_with_chain(tmp_path)
    found = recckpt.diff(tmp_path / one, tmp_path / other)
    agrees_with_rows(found.table("item"), tmp_path / one, tmp_path / other, "item")
    assert {found.before.kind, found.after.kind} <= {"full", "delta"}
    assert recckpt.diff(tmp_path / one, tmp_path / one).is_equal


def test_two_runs_that_trained_the_same_are_equal_but_for_nothing_and_a_step_more_differs(tmp_path):
    for name in ("a", "b"):
        Run(tmp_path / name, deltas=name == "b", max_keep=None).train(20)
    assert recckpt.diff(tmp_path / "a", tmp_path / "b").differing == {}
    found = recckpt.diff(tmp_path / "a/ckpt_10", tmp_path / "b")
    assert found.differing.keys() == {"table", "tensor", "training state", "extra", "position", "random state"}
    states = {(each.group, each.name): each for each in found.values}
    assert (states["training state", "step"].before, states["training state", "step"].after) == (10, 20)
    assert states["extra", "dense_optim"].status == "changed"
    assert states["position", "stream"].status == "changed"
    status = {each.name: each.status for each in found.values if each.group == "random state"}
    assert status == {"torch": "changed", "cuda": "same", "numpy": "changed", "python": "changed"}


def test_the_generator_that_drew_is_named(tmp_path):
    saver = recckpt.Saver(torch.nn.Linear(1, 1), None, str(tmp_path), None)
    saver.save("0")

    def differing(number):
        found = recckpt.diff(tmp_path / str(number - 1), tmp_path / str(number))
        return [each.name for each in found.values if each.group == "random state" and each.status != "same"]

    draws = {"torch": torch.rand, "numpy": np.random.rand, "python": lambda n: random.gauss(0, n)}
    for number, (name, draw) in enumerate(draws.items(), 1):
        draw(1)
        saver.save(str(number))
        assert differing(number) == [name]
    Forge(tmp_path / "3").save("rng_0.pt", {"another": "form"})
    assert differing(3) == ["torch", "cuda", "numpy", "python"]


def test_dense_tensors_are_compared_value_by_value(tmp_path):
    def save(name, **tensors):
        model = torch.nn.Module()
        for key, value in tensors.items():
            model.register_buffer(key, value)
        recckpt.Saver(model, None, str(tmp_path / name)).save("ckpt_1")

    base = torch.arange(12.0).view(3, 4)
    moved = base.clone()
    moved[2, 1] += 3
    big = torch.tensor([2**62, 7])
    nan = torch.tensor([1.0, math.nan])
    alike = {"same": base, "nan": nan, "empty": torch.empty(0, 3)}
    save("a", **alike, moved=base, wide=base, big=big, gone=base, scalar=torch.tensor(2.0))
    save("b", **alike, moved=moved, wide=base[:2], big=big + 1, scalar=torch.tensor(2.5))
    found = {each.name: each for each in recckpt.diff(tmp_path / "a", tmp_path / "b").tensors}
    assert {name for name, each in found.items() if each.status == "same"} == {"same", "nan", "empty"}
    assert found["gone"].status == "gone"
    assert (found["wide"].status, found["wide"].relative) == ("changed", None)
    assert (found["moved"].largest, found["moved"].at) == (3.0, (2, 1))
    assert found["moved"].relative == pytest.approx(3 / float(base.norm()))
    assert (found["big"].largest, found["big"].at) == (1.0, (0,))
    assert (found["scalar"].largest, found["scalar"].at) == (0.5, ())
    near = {each.name: each for each in recckpt.diff(tmp_path / "a", tmp_path / "b", tolerance=0.5).tensors}
    assert near["scalar"].status == "same"


def test_what_is_not_finite_and_stays_does_not_hide_how_far_the_rest_of_a_tensor_moved(tmp_path, memory_url):
    for url, first in ((tmp_path, 3.0), (memory_url, 4.0)):
        model = torch.nn.Module()
        model.register_buffer("mask", torch.tensor([first, 4.0, -math.inf]))
        model.register_buffer("lost", torch.tensor([first, 4.0, math.nan]))
        recckpt.Saver(model, None, str(url), None).save("a")
    mask, lost = recckpt.diff(tmp_path, memory_url).tensors  # of a disk and a store
    assert (mask.relative, mask.largest, mask.at) == (0.2, 1.0, (0,))
    assert (lost.relative, lost.largest, lost.at) == (0.2, 1.0, (0,))


def test_tables_and_slots_that_do_not_fit_are_said_and_not_compared(tmp_path):
    ids = range(10)
    old = [filled("wide", ids, shape=4), filled("typed", ids), filled("gone", ids), filled("slot", ids)]
    new = [
        filled("wide", ids, shape=8),
        filled("typed", ids, dtype=torch.float64),
        filled("new", range(3)),
        filled("slot", ids, slots={"sparse_m": (2,)}),
    ]
    save_tables(tmp_path / "a", old)
    save_tables(tmp_path / "b", new)
    found = recckpt.diff(tmp_path / "a", tmp_path / "b")
    assert {table.name: table.status for table in found.tables} == {
        "wide": "changed", "typed": "changed", "gone": "gone", "slot": "changed", "new": "added"
    }  # fmt: skip
    [wide] = found.table("wide").slots
    assert (wide.before, wide.after, wide.changed) == ("float32[4]", "float32[8]", None)
    [typed] = found.table("typed").slots
    assert (typed.changed, typed.is_same, found.table("typed").same) == (0, False, 10)
    assert found.table("slot").slots[1].before is None
    assert (found.table("gone").gone, found.table("new").added) == (10, 3)
    assert "float32[4] -> float32[8]" in str(found)


def test_rows_that_became_nan_are_named_first(tmp_path):
    save_tables(tmp_path / "a", [filled("item", range(100))])
    broken = filled("item", range(100))
    broken.insert(torch.tensor([7, 8]), torch.tensor([[math.nan, 7.0], [1000.0, 8.0]]))
    save_tables(tmp_path / "b", [broken])
    found = recckpt.diff(tmp_path / "a", tmp_path / "b", top=2).table("item")
    assert [row.id for row in found.moved] == [7, 8]
    assert math.isnan(found.moved[0].l2)
    assert (found.slots[0].l2.n, found.slots[0].l2.not_finite, found.changed) == (1, 1, 2)
    assert recckpt.diff(tmp_path / "b", tmp_path / "b").is_equal


@mostly_slow()
@pytest.mark.parametrize("range_bytes", [1, 3000, 1 << 26])
@pytest.mark.parametrize("side", "ab")
def test_a_flip_in_any_batch_is_found_wherever_borders_of_ranges_cut_it(tmp_path, monkeypatch, side, range_bytes):
    monkeypatch.setattr(diff_tables, "_RANGE_BYTES", range_bytes)
    monkeypatch.setattr(diff_tables, "_CHUNK_BYTES", 100)
    for name in "ab":
        save_tables(tmp_path / name, [filled("item", range(30))], batch_bytes=120, concurrency=1)
    forge = Forge(tmp_path / side / "ckpt_1")
    path, data = forge.path(forge.parts[0]), forge.path(forge.parts[0]).read_bytes()
    with CheckpointReader(tmp_path / side) as reader:
        places = [data.index(column_buffer(batch["embedding"]).to_pybytes()) for batch in reader.table("item")]
    assert len(places) > 3
    for place in places:
        flip_bit(path, place)
        with pytest.raises(CorruptCheckpointError, match=r"column 'embedding'.*checksum"):
            recckpt.diff(tmp_path / "a", tmp_path / "b")
        path.write_bytes(data)
    assert recckpt.diff(tmp_path / "a", tmp_path / "b").table("item").status == "same"


def test_damage_is_an_error_that_names_it_and_nothing_is_said_of_the_rest(tmp_path):
    for ckpt_id in ("ckpt_1", "ckpt_2"):
        save_tables(tmp_path, [filled("item", range(100))], ckpt_id=ckpt_id, concurrency=1)
    forge = Forge(tmp_path / "ckpt_2")
    data = forge.path(forge.parts[0]).read_bytes()
    forge.path(forge.parts[0]).write_bytes(data.replace(b"\0\0\xe0\x40", b"\0\0\xe1\x40"))
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        recckpt.diff(tmp_path / "ckpt_1", tmp_path / "ckpt_2")
    forge.edit_manifest(lambda manifest: manifest["tables"][0].update(rows=101))
    forge.path(forge.parts[0]).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="101 rows"):
        recckpt.diff(tmp_path / "ckpt_1", tmp_path / "ckpt_2")
    for run in ("a", "b"):
        Run(tmp_path / run).train(10)
    for name in ("extra.pt", "io_state_0.pt", "rng_0.pt"):
        path = tmp_path / "b/ckpt_10" / name
        whole = path.read_bytes()
        flip_bit(path)
        with pytest.raises(CorruptCheckpointError, match=f"{name} at its checksum"):
            recckpt.diff(tmp_path / "a", tmp_path / "b")
        path.write_bytes(whole)


def one_cycle_run(path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    saver = Saver(model, None, str(path), max_keep=None)
    saver.register_for_checkpointing("optimizer", optimizer)
    saver.register_for_checkpointing("scheduler", scheduler)

    def step(ckpt_id):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        saver.save(ckpt_id)

    return saver, step


def test_a_run_that_went_on_from_a_checkpoint_equals_one_that_never_stopped(tmp_path):
    _, step = one_cycle_run(tmp_path / "one")
    step("a")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    resumed, other_step = one_cycle_run(tmp_path / "other")
    resumed.load()
    for go_on in (step, other_step):
        torch.manual_seed(0)
        go_on("b")
    found = recckpt.diff(tmp_path / "one/b", tmp_path / "other/b")
    assert found.differing == {}


def test_wrong_arguments_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(TypeError, match="3"):
        recckpt.diff(3, tmp_path)
    for wrong in ({"tolerance": -1}, {"tolerance": math.nan}, {"tolerance": True}, {"top": -1}, {"top": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            recckpt.diff(tmp_path, tmp_path, **wrong)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        recckpt.diff(tmp_path / "nowhere", tmp_path)


def test_it_is_data_that_prints_as_text_and_shows_as_a_page(tmp_path):
    Run(tmp_path, max_keep=None).train(20)
    found = recckpt.diff(tmp_path / "ckpt_10", tmp_path)
    assert repr(found).startswith("<CheckpointDiff 'ckpt_10' -> 'ckpt_20': 2 of table, ")
    assert "embeddings that moved most" in str(found)
    assert "<table>" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["equal"] is False
    with pytest.raises(AttributeError):
        found.tolerance = 1.0
