"""Tables behind TorchRec's managed collision are saved and restored by their raw ids, with deltas and deletes."""

import copy
from pathlib import Path

import pytest
import torch
from support import live_collisions as models
from support.rank_processes import run_script
from support.spec_reader import DamagedError
from torch import optim
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from recckpt import Deltas, Saver
from recckpt.convert import import_checkpoint
from recckpt.errors import LiveTableError, StateMismatchError
from recckpt.inspect.verify import verify
from recckpt.live import live_tables

RULES = {
    "adagrad": lambda model: optim.Adagrad([model.users.weight], lr=0.1),
    "sgd": lambda model: optim.SGD([model.users.weight], lr=0.1),
    "adam": lambda model: optim.Adam([model.users.weight], lr=0.01),
}
ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1)
NAMES = ["users", "users.unassigned"]


def made(output_dir, zch_size=64, policy="distance", rule="adagrad", seed=0, **options):
    torch.manual_seed(seed)
    model = models.Colliding(zch_size, policy, **options)
    optimizers = [RULES[rule](model), optim.SGD(model.top.parameters(), lr=0.1)]
    tables = live_tables(model, optimizers, min_rows=1)
    saver = Saver(model, output_dir=str(output_dir), tables=tables, deltas=ALWAYS, max_keep=50)
    saver.register_for_checkpointing("dense_optim", optimizers[1])
    return model, optimizers, tables, saver


def train(model, optimizers, first, end, **how):
    for number in range(first, end):
        models.step(model, optimizers, number, **how)


def saved(tmp_path, n_steps=40, **how):
    model, optimizers, tables, saver = made(tmp_path, **how)
    train(model, optimizers, 0, n_steps)
    saver.save("c", step=n_steps)
    return model, optimizers, tables, saver


@pytest.mark.parametrize(
    ("policy", "rule", "is_bagged", "least_deletes", "least_again"),
    [
        ("distance", "adagrad", True, 100, 50),
        pytest.param("lru", "sgd", False, 100, 50, marks=pytest.mark.slow),
        pytest.param("lfu", "adam", True, 5, 0, marks=pytest.mark.slow),
    ],
)
def test_replaying_a_chain_of_saves_in_the_background_gives_the_ids_and_rows_of_each_moment(
    policy, rule, is_bagged, least_deletes, least_again, tmp_path
):
    model, optimizers, tables, saver = made(tmp_path, policy=policy, rule=rule, is_bagged=is_bagged)
    n_deletes, before, gone, n_again, kinds = 0, set(), set(), 0, []
    while kinds.count("delta") < 20:
        number = len(kinds)
        train(model, optimizers, 3 * number, 3 * number + 2)
        truth = models.truth_of(tables)
        handle = saver.save_async(f"c{number}", step=number)
        train(model, optimizers, 3 * number + 2, 3 * number + 3)
        info = handle.wait()
        kinds.append(info.kind)
        assert models.saved_in(tmp_path, f"c{number}", NAMES) == truth
        n_again += len(gone & truth["users"].keys())
        gone -= truth["users"].keys()
        left = before - truth["users"].keys()
        gone |= left
        n_deletes += len(left)
        before = truth["users"].keys()
    assert n_deletes > least_deletes
    assert n_again >= least_again
    assert verify(str(tmp_path)) == []
    saver.close()


@pytest.mark.parametrize("policy", ["distance", pytest.param("lru", marks=pytest.mark.slow), "lfu"])
def test_a_run_that_is_restored_goes_on_with_the_same_bits(policy, tmp_path):
    model, optimizers, tables, _ = saved(tmp_path, policy=policy)
    truth = models.truth_of(tables)
    train(model, optimizers, 40, 60)
    other, others, restored, other_saver = made(tmp_path, policy=policy, seed=1)
    train(other, others, 0, 3, n_raw=50)
    other_saver.load()
    assert models.truth_of(restored) == truth
    train(other, others, 40, 60)
    expected, found = (models.state_of(*some) for some in ((model, optimizers), (other, others)))
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_the_save_after_a_restore_is_a_delta_of_what_has_changed_since(tmp_path):
    saved(tmp_path)
    model, optimizers, tables, saver = made(tmp_path, seed=1)
    saver.load()
    assert [table.delta.upserts for table in saver.save("d").tables] == [0, 0]
    train(model, optimizers, 40, 41)
    info = saver.save("e")
    assert info.kind == "delta"
    assert 0 < info.tables[0].delta.upserts < 30
    assert models.saved_in(tmp_path, "e", NAMES) == models.truth_of(tables)


@pytest.mark.parametrize("zch_size", [128, 200])
def test_a_larger_table_finds_every_id_with_its_row_and_misses_with_the_shared_one(zch_size, tmp_path):
    model, _, tables, _ = saved(tmp_path)
    other, others, restored, saver = made(tmp_path, zch_size=zch_size, seed=1)
    report = saver.load()
    assert report.rows_taken["users"] == 63
    raw = list(range(models.N_RAW))
    assert torch.equal(models.looked_up(other, raw), models.looked_up(model, raw))
    assert models.truth_of(restored)["users"].keys() == models.truth_of(tables)["users"].keys()
    train(other, others, 40, 80)
    truth = models.truth_of(restored)
    assert len(truth["users"]) > 63
    info = saver.save("larger")
    assert [table.delta for table in info.tables] == [None, None] or info.kind == "full"
    assert models.saved_in(tmp_path, "larger", NAMES) == truth


def test_a_smaller_table_with_room_for_all_ids_finds_them_and_leaves_the_rows_that_it_lacks(tmp_path):
    model, optimizers, tables, saver = made(tmp_path, zch_size=200)
    train(model, optimizers, 0, 16, n_raw=40)
    saver.save("c")
    train(model, optimizers, 16, 18, n_raw=40)
    assert saver.save("d").kind == "delta"
    other, others, restored, saver = made(tmp_path, zch_size=64, seed=1)
    report = saver.load()
    assert [report.rows_taken[name] for name in NAMES] == [40, 1]
    assert report.rows_filtered["users.unassigned"] == 159
    raw = list(range(models.N_RAW))
    assert torch.equal(models.looked_up(other, raw), models.looked_up(model, raw))
    assert models.truth_of(restored)["users"].keys() == models.truth_of(tables)["users"].keys()
    train(other, others, 16, 20)


def test_fewer_rows_than_ids_are_refused_or_keep_those_that_count_most(tmp_path):
    model, _, tables, _ = saved(tmp_path)
    other, others, restored, saver = made(tmp_path, zch_size=48, seed=1)
    before = copy.deepcopy(models.state_of(other, others))
    with pytest.raises(StateMismatchError, match=r"(?s)users.*63 ids.*at most 47.*'zch': 'drop'"):
        saver.load()
    assert all(torch.equal(before[name], value) for name, value in models.state_of(other, others).items())
    report = saver.load(load_conf={"zch": "drop"})
    assert (report.rows_taken["users"], report.rows_filtered["users"]) == (47, 16)
    there, here = (models.truth_of(some)["users"] for some in (tables, restored))
    counts = {id_: int.from_bytes(slots["zch_counts"], "little") for id_, slots in there.items()}
    assert min(counts[id_] for id_ in here) >= max(counts[id_] for id_ in there.keys() - here.keys())
    ids = sorted(here)
    assert torch.equal(models.looked_up(other, ids), models.looked_up(model, ids))
    train(other, others, 40, 60)


def test_the_table_of_a_hashtable_loads_into_one_of_raw_ids_and_back(tmp_path):
    from recckpt.sparse import HashTable

    model, _, tables, _ = saved(tmp_path / "zch")
    ours = torch.nn.ModuleDict({"users": HashTable(models.DIM, name="users")})
    Saver(ours, output_dir=str(tmp_path / "ours")).load_by_config({"path": str(tmp_path / "zch"), "load": ["users@*"]})
    ids = sorted(models.truth_of(tables)["users"])
    assert torch.equal(ours["users"](torch.tensor(ids)), models.looked_up(model, ids))
    Saver(ours, output_dir=str(tmp_path / "ours")).save("c")
    other, _, _, saver = made(tmp_path / "other", seed=1)
    conf = {"path": str(tmp_path / "ours"), "load": ["users@embedding"]}
    assert saver.load_by_config(conf).rows_taken["users"] == 63
    assert torch.equal(models.looked_up(other, ids), models.looked_up(model, ids))


def test_what_an_import_found_loads_with_rows_and_counts(tmp_path):
    model, optimizers, tables, _ = made(tmp_path / "unused")
    train(model, optimizers, 0, 40)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    import_checkpoint(tmp_path / "model.pt", tmp_path / "imported", format="torchrec")
    other, others, restored, saver = made(tmp_path / "other", zch_size=128, seed=1)
    saver.load_by_config({"path": str(tmp_path / "imported"), "load": ["users@*"]})
    there, here = (models.truth_of(some)["users"] for some in (tables, restored))
    kept = "embedding", "zch_counts", "zch_last_access_iter"
    expected, found = ({id_: [row[name] for name in kept] for id_, row in rows.items()} for rows in (there, here))
    assert found == expected
    train(other, others, 40, 60)


def test_ids_are_merged_with_those_that_are_there(tmp_path):
    saved(tmp_path / "one", n_steps=4)
    other, others, tables, saver = made(tmp_path / "other", zch_size=200, seed=1)
    train(other, others, 20, 22)
    before = models.truth_of(tables)["users"]
    saver.load_by_config({"path": str(tmp_path / "one"), "load": ["users@*"], "hashtable_clear": False})
    loaded, now = models.saved_in(tmp_path / "one", "c", ["users"])["users"], models.truth_of(tables)["users"]
    assert now.keys() == before.keys() | loaded.keys()
    for id_ in now:
        assert now[id_]["embedding"] == (loaded.get(id_) or before[id_])["embedding"]


def test_what_is_printed_says_what_the_map_costs(tmp_path):
    text = str(made(tmp_path)[2])
    assert "EmbeddingBag by raw ids" in text
    assert "zch_counts, zch_last_access_iter, zch_row" in text
    assert "the map of its ids, 32 bytes per id, is copied at each save while training waits" in text
    assert "users.unassigned" in text


class Other(models.MCHManagedCollisionModule):
    """A map that may be another."""


def multi_probe(fill=0):
    """Return a model whose ids are remapped by MPZCH, which trains on GPUs alone; its identities are ``fill``."""
    model = models.Colliding()
    ids = HashZchManagedCollisionModule(64, models.CPU, total_num_buckets=1, input_hash_size=models.N_RAW)
    ids._hash_zch_identities.data.fill_(fill)
    model.sparse._managed_collision_collection._managed_collision_modules["users"] = ids
    return model


def of_another_class():
    model = models.Colliding()
    model.ids.__class__ = Other
    return model


@pytest.mark.parametrize(
    ("make", "name"), [(of_another_class, "Other"), (multi_probe, "HashZchManagedCollisionModule")]
)
def test_other_maps_stay_dense_and_say_which_would_not(make, name):
    model = make()
    text = str(live_tables(model, RULES["sgd"](model), min_rows=1))
    assert f"users: its ids are remapped by a {name}, whose map recckpt does not read, so table and map" in text
    assert "remap them by MCHManagedCollisionModule to save them by raw id" in text
    assert "no live tables" in text


def test_a_table_behind_mpzch_is_restored_with_its_map_as_dense_tensors(tmp_path):
    one, other = multi_probe(fill=7), multi_probe()
    Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1)).save("c")
    Saver(other, output_dir=str(tmp_path), tables=live_tables(other, min_rows=1)).load()
    before, after = (models.state_of(model, []) for model in (one, other))
    assert len(before) > 4
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_map_that_somebody_else_has_written_is_refused(tmp_path):
    model, _, _, saver = made(tmp_path)
    with torch.no_grad():
        model.ids._mch_remapped_ids_mapping[-1] = 0
    with pytest.raises(LiveTableError, match="'users': found row 0 at the end of _mch_remapped_ids_mapping"):
        saver.save("c")


@pytest.mark.parametrize("bug", ["moved", "gone"])
def test_without_either_half_of_the_comparison_of_maps_a_replay_is_wrong(bug, tmp_path, monkeypatch):
    """Planted: ids that have another row now, whose values nobody has written; and ids that are gone."""
    model, optimizers, tables, saver = saved(tmp_path)
    none = {"moved": lambda self, before: self.ids < 0, "gone": lambda self, before: self.ids[:0]}[bug]
    monkeypatch.setattr(f"recckpt.sparse.table.placed.IdPlaces.{bug}", none)
    train(model, optimizers, 40, 42)
    assert saver.save("d").kind == "delta"
    try:
        found = models.saved_in(tmp_path, "d", ["users"])
    except DamagedError:
        return  # there are more ids than rows, or fewer
    assert found["users"] != models.truth_of(tables)["users"]


def test_rows_without_an_id_can_be_left_out(tmp_path):
    model = models.Colliding()
    path = "sparse._embedding_module.embedding_bags.users.unassigned"
    tables = live_tables(model, RULES["sgd"](model), min_rows=1, exclude=[path])
    assert list(tables) == ["users"]
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    assert not [name for name in saver.names() if "_mch_" in name or "embedding_bags" in name]
    with pytest.raises(LiveTableError, match=r"'users\.unassigned' is not the path of an embedding"):
        live_tables(models.Colliding(), min_rows=1, exclude=["users.unassigned"])


def test_tables_that_ranks_share_by_rows_are_saved_by_raw_id_and_restored_on_other_ranks(tmp_path):
    run_script(Path(__file__).with_name("live_collisions_ranks.py"), tmp_path, 2, 1, 3, 2, seconds=900)
    runs = sorted(path.parent for path in tmp_path.glob("*/truth.pt"))
    assert len(runs) == 9
    for path in runs:
        assert verify(str(path)) == []
    _, _, n_deletes, n_again = zip(*(torch.load(path / "truth.pt", weights_only=False) for path in runs), strict=True)
    assert sum(n_deletes) > 300
    assert sum(n_again) > 100
    model, _, tables, saver = made(tmp_path / "plain", zch_size=200, seed=1)
    saver.load_by_config({"path": str(tmp_path / "case-0-2" / "last"), "load": ["users*@*"]})
    truth, seen, *_ = torch.load(tmp_path / "case-0-2" / "truth.pt", weights_only=False)
    ids = sorted(truth["users"])
    assert models.truth_of(tables)["users"].keys() == {*ids}
    assert torch.equal(models.looked_up(model, ids), seen[ids])
