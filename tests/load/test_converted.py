"""Dense tensors that are rows of live tables here, and tables that are dense tensors here, with their optimizers."""

import logging
import warnings

import pyarrow.dataset
import pytest
import torch
from support.builders import flip_bit
from support.live_runs import DIM, N_ROWS, OPTIMIZERS, Run, assert_same
from support.sweeps import mostly_slow
from torch import nn, optim
from torch.distributed import checkpoint as dcp

from recckpt import CheckpointManager, CheckpointReader, Saver, load_into
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint
from recckpt.errors import CorruptCheckpointError, LiveTableError, StateMismatchError
from recckpt.inspect.verify import verify
from recckpt.live import live_tables
from recckpt.load.inventory import list_inventory, listed_inventory
from recckpt.sparse import HashTable


def saved_before(tmp_path, rule="SparseAdam", **options):
    """Return a run that has trained and whose weights were saved as dense tensors, at step 3."""
    run = Run(tmp_path / "run", rule, seed=1)
    run.train(3)
    run.dense_saver(tmp_path / "run", **options).save("ckpt_3", step=3)
    return run


@mostly_slow()
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_run_goes_on_from_the_dense_tensors_of_before_bit_for_bit(tmp_path, rule):
    run, other = saved_before(tmp_path, rule), Run(tmp_path / "run", rule)
    other.train(2)
    assert CheckpointManager(other.saver, 10).restore() == 3
    assert_same(other.state(), run.state())
    other.random.set_state(run.random.get_state())
    for each in (run, other):
        each.train(3)
    assert_same(other.state(), run.state())


def test_a_plan_says_which_tensors_become_rows(tmp_path):
    saved_before(tmp_path)
    run = Run(tmp_path / "other")
    inventory = listed_inventory(run.saver.names())
    [embedding] = [thing for name, thing in inventory.items() if name.text == "users@embedding"]
    assert embedding.tied == ("users.weight",), "the names of a model say it too"
    assert listed_inventory(list_inventory(inventory)) == inventory
    plan = run.saver.plan({"path": str(tmp_path / "run")})
    items = {item.name.text: item for item in plan.items}
    assert items["users@embedding"].conversion == "dense tensor 'users.weight' -> rows of table 'users'"
    assert items["users@id"].thing.rows == N_ROWS
    assert "not in the model" not in str(plan)
    same = Run(tmp_path / "same", "SparseAdam")
    state = same.saver.plan({"path": str(tmp_path / "run")})
    conversions = {item.name.text: item.conversion for item in state.items}
    assert conversions["users@sparse_adam_exp_avg"].startswith("state in 'row_optim' of dense tensor 'users.weight'")


def test_state_that_nobody_saved_begins_anew_and_is_named(tmp_path, caplog):
    run, other = saved_before(tmp_path, registered=False), Run(tmp_path / "run", "SparseAdam")
    other.train(2)
    with caplog.at_level(logging.WARNING, "recckpt"):
        other.saver.load()
    assert "from scratch: 'items@sparse_adam_exp_avg'" in caplog.text
    assert_same(other.state()["model"], run.state()["model"])
    state = other.row_optim.state[other.model.users.weight]
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert state["step"] == 0


def test_the_state_of_an_optimizer_before_its_first_step_begins_anew(tmp_path):
    run = Run(tmp_path / "run", "SparseAdam", seed=1)
    for state in run.row_optim.state.values():
        state.clear()  # as it is before the first step
    run.dense_saver(tmp_path / "run").save("a")
    other = Run(tmp_path / "run", "SparseAdam")
    other.train(2)
    report = other.saver.load()
    assert not other.tables["users"].slots["sparse_adam_exp_avg"].any()
    assert "'row_optim' in the checkpoint has no such state of 'users.weight'" in str(report)


def test_the_state_of_an_optimizer_of_another_class_is_not_taken(tmp_path):
    saved_before(tmp_path, "Adagrad")
    other = Run(tmp_path / "run", "AdamW")
    other.train(2)
    report = other.saver.load()
    fresh = {item.name.text for item in report.fresh}
    assert {"users@sparse_adamw_exp_avg", "items@sparse_adamw_exp_avg_sq", "sparse_optim"} <= fresh
    assert not other.tables["users"].slots["sparse_adamw_exp_avg"].any()
    assert other.row_optim.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (lambda weights: optim.SGD(weights, lr=0.2, momentum=0.9), "momentum_buffer"),
        (lambda weights: optim.Adam(weights, lr=0.2, amsgrad=True), "max_exp_avg_sq"),
    ],
)
def test_settings_of_before_bring_the_state_that_they_need(tmp_path, monkeypatch, made, key):
    rule = "SGD" if key == "momentum_buffer" else "Adam"
    with monkeypatch.context() as patch:
        patch.setitem(OPTIMIZERS, rule, made)
        run = saved_before(tmp_path, rule)
    other = Run(tmp_path / "run", rule)
    other.saver.load()
    assert_same(other.state(), run.state())
    assert other.row_optim.state[other.model.users.weight][key].any()


def test_tensors_are_found_by_the_names_of_paths_and_by_renames(tmp_path):
    saved_before(tmp_path)
    model = nn.ModuleDict({"people": nn.Embedding(N_ROWS, DIM), "users": nn.Embedding(N_ROWS, DIM)})
    row_optim = optim.SGD(model.parameters(), lr=0.1)
    tables = live_tables(model, [row_optim], min_rows=10, names={"users": "user/1"})
    saver = Saver(model, output_dir=str(tmp_path / "new"), tables=tables)
    saver.load_by_config({"path": str(tmp_path / "run"), "oname": {"people": "items"}})
    with torch.no_grad():
        expected = torch.load(tmp_path / "run" / "ckpt_3" / "model.pt")
        assert torch.equal(model["people"].weight, expected["items.weight"])
        assert torch.equal(model["users"].weight, expected["users.weight"])


@pytest.mark.parametrize(("n_rows", "dim"), [(N_ROWS + 5, DIM), (N_ROWS, DIM + 1)])
def test_a_tensor_that_does_not_fit_is_refused_before_anything_changes(tmp_path, n_rows, dim):
    model = nn.ModuleDict({"users": nn.Embedding(n_rows, dim)})
    Saver(model, output_dir=str(tmp_path / "a")).save("a")
    run = Run(tmp_path / "live")
    before = run.state()
    with pytest.raises((LiveTableError, StateMismatchError), match=r"without a row|users@embedding"):
        run.saver.load_by_config({"path": str(tmp_path / "a")})
    assert_same(run.state(), before)


def test_a_tensor_of_fewer_rows_fills_those_and_one_of_more_can_be_cut(tmp_path):
    run = Run(tmp_path / "live")
    for n_rows in (N_ROWS - 20, N_ROWS + 20):
        model = nn.ModuleDict({"users": nn.Embedding(n_rows, DIM)})
        url = str(tmp_path / f"a{n_rows}")
        Saver(model, output_dir=url).save("a")
        before, n = run.model.users.weight.detach().clone(), min(n_rows, N_ROWS)
        report = run.saver.load_by_config({"path": url, "out_of_range": "skip"})
        assert report.rows_taken["users"] == n
        assert report.rows_filtered["users"] == n_rows - n
        assert torch.equal(run.model.users.weight[:n], model["users"].weight[:n])
        assert torch.equal(run.model.users.weight[n:], before[n:])


def test_a_damaged_tensor_is_refused_and_the_next_save_after_such_a_restore_holds_all_rows(tmp_path):
    saved_before(tmp_path)
    run = Run(tmp_path / "run", "SparseAdam", deltas=True, max_keep=None)
    path, before = tmp_path / "run" / "ckpt_3" / "model.pt", run.state()
    weights = torch.load(path)["users.weight"].numpy().tobytes()
    at = path.read_bytes().index(weights) + 5
    flip_bit(path, at)
    with pytest.raises(CorruptCheckpointError, match=r"model\.pt"):
        run.saver.load()
    assert_same(run.state(), before)
    flip_bit(path, at)
    run.saver.load()
    assert run.saver.save("next").kind == "full"
    run.train()
    assert run.saver.save("after").kind == "delta"


def imported(tmp_path, saved_as, **options):
    """Return the weights of a model of which torch has saved the state dict, imported into ``run``."""
    model = Run(tmp_path / "other", seed=1).model
    if saved_as == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(tmp_path / "saved"), no_dist=True)
    else:
        torch.save({"model": model.state_dict()}, tmp_path / "saved.pt")
    source = tmp_path / ("saved" if saved_as == "dcp" else "saved.pt")
    import_checkpoint(source, tmp_path / "run", options=ImportOptions(**options))
    return model.state_dict()


@pytest.mark.parametrize(
    ("saved_as", "as_table"), [("dcp", {}), ("torch", {}), ("torch", {"users.weight": None, "items.weight": None})]
)
def test_what_torch_saved_and_an_import_took_becomes_rows(tmp_path, saved_as, as_table):
    state = imported(tmp_path, saved_as, as_table=as_table)
    run = Run(tmp_path / "run")
    run.train(2)
    report = run.saver.load(load_conf={"load": ["sparse", "dense", "sparse_opt"], "strict": True})
    assert_same(dict(run.model.state_dict()), dict(state))
    assert report.rows_taken == {"users": N_ROWS, "items": N_ROWS}
    assert not run.tables["users"].slots["sparse_adagrad_sum"].any()


def test_what_an_import_from_torchrec_took_has_the_names_of_live_tables(tmp_path):
    weight, sums = torch.randn(N_ROWS, DIM), torch.rand(N_ROWS, DIM)
    prefix = "bags.embedding_bags.clicks.weight"
    torch.save({prefix: weight, f"{prefix}.clicks.momentum1": sums}, tmp_path / "saved.pt")
    import_checkpoint(tmp_path / "saved.pt", tmp_path / "run", format="torchrec")
    model = nn.ModuleDict({"bags": nn.ModuleDict({"clicks": nn.Embedding(N_ROWS, DIM)})})
    optimizer = optim.Adagrad(model.parameters())
    tables = live_tables(model, [optimizer], min_rows=10, names={"bags.clicks": "clicks"})
    Saver(model, output_dir=str(tmp_path / "run"), tables=tables).load()
    assert torch.equal(model["bags"]["clicks"].weight, weight)
    assert torch.equal(optimizer.state[model["bags"]["clicks"].weight]["sum"], sums)


def test_the_moments_of_adam_go_on_in_sparse_adam(tmp_path):
    run, other = saved_before(tmp_path, "Adam"), Run(tmp_path / "run", "SparseAdam")
    other.saver.load()
    for key in ("exp_avg", "exp_avg_sq", "step"):
        there, here = (one.row_optim.state[one.model.users.weight][key] for one in (run, other))
        assert torch.equal(torch.as_tensor(here).double(), torch.as_tensor(there).double())


def test_a_tensor_that_was_tied_to_another_fills_both(tmp_path):
    def made():
        model = nn.ModuleDict({"words": nn.Embedding(N_ROWS, DIM), "out": nn.Linear(DIM, N_ROWS, bias=False)})
        model["out"].weight = model["words"].weight
        return model, optim.Adam(model.parameters(), lr=0.1)

    model, optimizer = made()
    saver = Saver(model, output_dir=str(tmp_path))
    saver.register_for_checkpointing("optimizer", optimizer)
    model["out"](model["words"](torch.arange(5))).square().sum().backward()
    optimizer.step()
    saver.save("a")
    other, its_optimizer = made()
    Saver(other, output_dir=str(tmp_path), tables=live_tables(other, its_optimizer, min_rows=10)).load()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def saved(tmp_path, rule="SparseAdam", **options):
    """Return a run whose live tables were saved at step 3, as a delta."""
    run = Run(tmp_path / "run", rule, seed=1, deltas=True, max_keep=None, **options)
    run.saver.save("ckpt_0", step=0)
    run.row_optim.param_groups[0]["lr"] = 0.2
    run.train(3)
    run.saver.save("ckpt_3", step=3)
    return run


@mostly_slow()
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_run_without_live_tables_goes_on_from_a_checkpoint_of_them_bit_for_bit(tmp_path, rule):
    run, other = saved(tmp_path, rule), Run(tmp_path / "other", rule)
    other.train(2)
    assert CheckpointManager(other.dense_saver(tmp_path / "run"), 10).restore() == 3
    assert_same(other.state(), run.state())
    other.random.set_state(run.random.get_state())
    for each in (run, other):
        each.train(3)
    assert_same(other.state(), run.state())


def test_plan_and_report_say_which_tables_become_tensors_and_how_many_rows(tmp_path):
    run = saved(tmp_path)
    plan = Run(tmp_path / "other", "SparseAdam").dense_saver(tmp_path / "b").plan({"path": str(tmp_path / "run")})
    items = {item.name.text: item for item in plan.items}
    assert items["users.weight"].conversion == "rows of table 'users' -> dense tensor"
    assert items["users.weight@row_optim"].conversion == "rows of table 'users' -> state of dense tensor"
    assert "not in the model" not in str(plan)

    def loaded(n_rows, **conf):
        model = nn.ModuleDict({"users": nn.Embedding(n_rows, DIM)})
        return load_into(model, tmp_path / "run", load_conf={"strict": False, **conf})

    report, size = loaded(N_ROWS), 4 * N_ROWS * DIM
    assert f": 1 table, {N_ROWS} rows, 0 tensors, {size} B" in str(report)
    assert report.rows_taken == loaded(N_ROWS + 2).rows_taken == {"users.weight": N_ROWS}
    assert f"{N_ROWS} rows taken" in str(report)
    assert report.bytes_read > size
    assert loaded(2, on_mismatch={"users.weight": "resize"}).rows_taken == {"users.weight": 2}
    model = nn.ModuleDict({"people": nn.Embedding(N_ROWS, DIM)})
    saver = Saver(model, output_dir=str(tmp_path / "new"))
    saver.load_by_config({"path": str(tmp_path / "run"), "oname": {"people.weight": "users"}})
    assert torch.equal(model["people"].weight, run.model.users.weight)


def test_a_live_table_of_no_rows_is_saved_read_and_loaded_as_any_other(tmp_path):
    def made(n_rows=0):
        model = nn.ModuleDict({"users": nn.Embedding(n_rows, DIM, sparse=True)})
        optimizer = optim.SparseAdam(model.parameters())
        tables = live_tables(model, optimizer, names={"users": "users"})
        return model, Saver(model, output_dir=str(tmp_path / "run"), tables=tables, deltas=True, max_keep=None)

    _, saver = made()
    saver.save("ckpt_1", step=1)
    saver.save("ckpt_2", step=2)
    assert CheckpointManager(made()[1], 10).restore() == 2
    assert verify(str(tmp_path / "run"), threads=1) == []
    reader = CheckpointReader(tmp_path / "run")
    assert [entry.live.n_rows for entry in reader.manifest.tables] == [0]
    assert reader.dataset("users").to_table().num_rows == 0
    assert "1 table, 0 rows" in str(load_into(nn.ModuleDict({"users": nn.Embedding(0, DIM)}), tmp_path / "run"))
    model, saver = made(3)
    before = model["users"].weight.clone()
    assert CheckpointManager(saver, 10).restore() == 2  # what has more rows keeps them
    assert torch.equal(model["users"].weight, before)
    export_checkpoint(tmp_path / "run", tmp_path / "out", to="parquet")
    assert pyarrow.dataset.dataset(tmp_path / "out", ignore_prefixes=["_"]).count_rows() == 0


@pytest.mark.parametrize("of", [optim.Adagrad, optim.AdamW])
def test_an_optimizer_that_trains_all_of_the_model_gets_the_states_of_the_tables_back(tmp_path, of):
    def made():
        torch.manual_seed(0)
        model = nn.ModuleDict({"users": nn.Embedding(N_ROWS, DIM), "top": nn.Linear(DIM, 1)})
        return model, of(model.parameters(), lr=0.1)

    model, optimizer = made()
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1))
    saver.register_for_checkpointing("optim", optimizer)
    model["top"](model["users"](torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    saver.save("a")
    other, other_optimizer = made()
    saver = Saver(other, output_dir=str(tmp_path))
    saver.register_for_checkpointing("optim", other_optimizer)
    saver.load()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_weight_gets_its_rows_back_under_each_of_its_names(tmp_path, is_first):
    def made(*, is_first):
        modules = {"word": nn.Embedding(N_ROWS, DIM), "head": nn.Linear(DIM, N_ROWS, bias=False)}
        model = nn.ModuleDict(modules if is_first else dict(reversed(modules.items())))
        model["head"].weight = model["word"].weight
        return model, optim.Adam(model["word"].parameters())

    def trained(model, optimizer):
        model["head"](model["word"](torch.tensor([1, 2]))).square().sum().backward()
        optimizer.step()

    model, optimizer = made(is_first=True)
    trained(model, optimizer)
    Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1)).save("a")
    other, other_optimizer = made(is_first=is_first)
    saver = Saver(other, output_dir=str(tmp_path))
    saver.register_for_checkpointing("row_optim", other_optimizer)
    saver.load()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_moments_of_another_class_start_fresh(tmp_path):
    saved(tmp_path, "Adagrad")
    other = Run(tmp_path / "other", "Adam")
    report = other.dense_saver(tmp_path / "run").load()
    assert "row_optim: users.weight" in report.fresh_parameters
    assert other.row_optim.param_groups[0]["lr"] == 0.1


def test_a_table_whose_ids_are_not_row_numbers_is_refused_before_anything_changes(tmp_path):
    ours = nn.ModuleDict({"users": HashTable(DIM, name="users")})
    ours["users"](torch.arange(N_ROWS) + 1)
    Saver(ours, output_dir=str(tmp_path / "ours")).save("a")
    run = Run(tmp_path / "run")
    before = run.state()
    with pytest.raises(StateMismatchError, match=r"'users@id': found 60, expected the numbers of 60 rows"):
        run.dense_saver(tmp_path / "b").load_by_config({"path": str(tmp_path / "ours")})
    assert_same(run.state(), before)


def test_a_table_of_another_size_or_a_damaged_one_is_refused_before_anything_changes(tmp_path):
    saved(tmp_path)
    model = nn.ModuleDict({"users": nn.Linear(DIM, N_ROWS + 1, bias=False)})  # of an embedding rows may become more
    saver = Saver(model, output_dir=str(tmp_path / "run"))
    saver.register_for_checkpointing("row_optim", optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateMismatchError, match=r"(?s)missing.*'users\.weight'.*not in the model.*'users'"):
        saver.load()
    run = Run(tmp_path / "other", "SparseAdam")
    [part] = (tmp_path / "run" / "ckpt_3").rglob("*.arrow")
    flip_bit(part, part.stat().st_size // 2)
    before = run.state()
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        run.dense_saver(tmp_path / "b").load(str(tmp_path / "run" / "ckpt_3"), direct_path=True)
    assert_same(run.state(), before)
