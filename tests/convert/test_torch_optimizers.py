"""Runs of torch that go on here from a file of torch.save, with the moments of both optimizers."""

import pyarrow.parquet as pq
import pytest
import torch
from support.conversions import arrow_table, refused, some_rows
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.convert import ImportOptions, import_checkpoint
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdam, SparseAdamW, replace_embeddings

N, DIM = 6, 4


class Clicks(nn.Module):
    """Two embeddings, of which one is of the shape of a dense weight, and what follows them."""

    def __init__(self, *, sparse=True, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(DIM, N)
        self.user = nn.Embedding(N, DIM, sparse=sparse)
        self.norm = nn.BatchNorm1d(DIM) if norm else nn.Identity()
        self.item = nn.Embedding(N, DIM, sparse=sparse)

    def forward(self, ids):
        return self.top(self.norm(self.user(ids) * self.item(ids.flip(0))))


class WithTables(Clicks):
    """The same with tables."""

    def __init__(self, **options):
        super().__init__(**options)
        self.user, self.item = HashTable(DIM, name="user"), HashTable(DIM, name="item")


NAMES = {"user.weight": "user", "item.weight": "item"}
TABLES = ImportOptions(as_table=dict.fromkeys(NAMES), names=NAMES)
EVERY_ROW = torch.arange(N)


def train(model, optimizers, steps):
    for step in range(steps):
        for optim in optimizers:
            optim.zero_grad()
        loss = (model(EVERY_ROW) * torch.linspace(-1, 1, N * N).view(N, N) * (step + 1)).square().sum()
        loss.backward()
        for optim in optimizers:
            optim.step()


def rows_of(model):
    return [model.user(EVERY_ROW), model.item(EVERY_ROW)]


def assert_same(one, other):
    """Compare what two models, of which one has tables, give and hold."""
    for model in (one, other):
        model.eval()
    torch.testing.assert_close(one(EVERY_ROW), other(EVERY_ROW), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(rows_of(one), rows_of(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def goes_on(tmp_path, model, optimizers, sparse, settings=("sparse_optim", "optimizer")):
    """Load an import into a model with tables, train both on, and compare."""
    torch.manual_seed(1)
    other = WithTables(norm=isinstance(model.norm, nn.BatchNorm1d))
    own = [sparse([other.user, other.item]), torch.optim.Adam(other.parameters(), lr=0.9)]
    saver = Saver(other, own[0], output_dir=tmp_path / "new")
    saver.register_for_checkpointing("optimizer", own[1])
    saver.load_by_config([{"path": str(tmp_path / "out"), "load": ["*", *settings], "strict": True}])
    for one, steppers in ((model, optimizers), (other, own)):
        one.train()
        train(one, steppers, 2)
    assert_same(other, model)
    return own


def saved(tmp_path, model, **optimizers):
    states = {name: optim.state_dict() for name, optim in optimizers.items()}
    torch.save({"model": model.state_dict(), **states, "step": 3}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def trained_by(make=torch.optim.Adam, steps=1, **options):
    """Return a model with dense gradients, and the optimizer that has trained some or all of it."""
    model = Clicks(sparse=False)
    optimizer = make(options.pop("params", Clicks.parameters)(model), **{"lr": 0.05, **options})
    train(model, [optimizer], steps)
    return model, optimizer


def some_of(model):
    return [model.item.weight, model.top.bias]


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_two_optimizers_go_on_with_the_moments_they_had(tmp_path, with_model, norm):
    model = Clicks(norm=norm)
    tables = [model.user.weight, model.item.weight]
    dense = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.Adam(dense, lr=0.02)]
    train(model, optimizers, 3)
    source = saved(tmp_path, model, sparse=optimizers[0], optimizer=optimizers[1])
    done = import_checkpoint(source, tmp_path / "out", options=TABLES, model=model if with_model else None)
    assert {left.name for left in done.contents.left_out} == (set() if with_model else {"sparse", "optimizer"})
    assert "user.weight@optimizer" not in done.contents.dense_opt
    assert "top.weight@optimizer" in done.contents.dense_opt
    own = goes_on(tmp_path, model, optimizers, SparseAdam)
    assert own[0].param_groups[0]["lr"] == 0.05
    assert own[1].param_groups[0]["lr"] == 0.02


def test_one_optimizer_over_all_becomes_two(tmp_path):
    model, adam = trained_by(steps=3)
    source = saved(tmp_path, model, optimizer=adam)
    import_checkpoint(source, tmp_path / "out", options=TABLES, model=model, optimizers={"optimizer": adam})
    manifest = CheckpointReader(tmp_path / "out").manifest
    slots = [slot.name for slot in manifest.named_table("user").slots]
    assert slots == ["embedding", "sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"]
    assert manifest.training.optimizers["optimizer"][0] == "Adam"
    assert {"sparse_optim", "optimizer"} <= {*manifest.names.extra}


def test_a_sparse_optimizer_gives_its_slots_their_names(tmp_path):
    model = Clicks()
    tables = [model.user.weight, model.item.weight]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.05), torch.optim.Adam(model.top.parameters(), lr=0.02)]
    train(model, optimizers, 3)
    source = saved(tmp_path, model, sparse=optimizers[0], optimizer=optimizers[1])
    own = SparseAdamW([HashTable(DIM, name="user"), HashTable(DIM, name="item")])
    done = import_checkpoint(source, tmp_path / "out", options=TABLES, model=model, optimizers={"sparse": own})
    assert [slot.name for slot in done.contents.tables[0].slots[1:]] == [*own.slot_names]


def test_adamw_over_all_goes_on_by_the_rule_that_is_its_own(tmp_path):
    model, adam = trained_by(torch.optim.AdamW, 3, weight_decay=0.0)
    import_checkpoint(saved(tmp_path, model, optimizer=adam), tmp_path / "out", options=TABLES, model=model)
    goes_on(tmp_path, model, [adam], lambda tables: SparseAdamW(tables, weight_decay=0.0))


def test_adagrad_brings_its_sums(tmp_path):
    model = Clicks(sparse=False)
    tables = [model.user.weight, model.item.weight]
    optimizers = [torch.optim.Adagrad(tables, lr=0.5), torch.optim.Adam([*model.top.parameters()], lr=0.02)]
    train(model, optimizers, 3)
    source = saved(tmp_path, model, sums=optimizers[0], optimizer=optimizers[1])
    done = import_checkpoint(source, tmp_path / "out", options=TABLES)
    assert {slot.name for slot in done.contents.tables[0].slots} == {"embedding", "sparse_adagrad_sum"}
    goes_on(tmp_path, model, optimizers, SparseAdagrad)


def test_a_model_with_tables_in_place_of_embeddings_names_the_parameters_too(tmp_path):
    model, adam = trained_by(torch.optim.AdamW, 3, weight_decay=0.0)
    source, other = saved(tmp_path, model, optimizer=adam), Clicks()
    replace_embeddings(other)
    done = import_checkpoint(source, tmp_path / "out", options=TABLES, model=other)
    assert done.contents.left_out == ()
    assert "top.weight@optimizer" in done.contents.dense_opt


def test_live_optimizers_say_whose_the_parameters_are(tmp_path):
    options = {"params": lambda model: [*some_of(model), model.user.weight], "weight_decay": 0.0}
    model, adam = trained_by(torch.optim.AdamW, 3, **options)
    source = saved(tmp_path, model, optimizer=adam)
    done = import_checkpoint(source, tmp_path / "out", options=TABLES, model=model, optimizers={"optimizer": adam})
    assert done.contents.dense_opt == ("top.bias@optimizer",)
    step = done.contents.extra["sparse_optim"]["state"]
    assert step == {"user": {"step": 3}, "item": {"step": 3}}
    with CheckpointReader(tmp_path / "out") as reader:
        moments = reader.lookup("item", range(N), "sparse_adamw_exp_avg")[0]
    assert moments.tolist() == adam.state[model.item.weight]["exp_avg"].tolist()


def test_named_parameters_need_no_model(tmp_path):
    model, adam = trained_by(params=lambda model: [*zip(("item.weight", "top.bias"), some_of(model), strict=True)])
    assert "param_names" in adam.state_dict()["param_groups"][0]
    done = import_checkpoint(saved(tmp_path, model, optimizer=adam), tmp_path / "out", options=TABLES)
    assert done.contents.dense_opt == ("top.bias@optimizer",)


def test_a_state_by_the_names_of_parameters_needs_no_model(tmp_path):
    model, adam = trained_by(steps=2, params=some_of)
    state, names = adam.state_dict(), ["item.weight", "top.bias"]
    by_name = {"state": {names[index]: values for index, values in state["state"].items()}}
    by_name["param_groups"] = [{**group, "params": names} for group in state["param_groups"]]
    torch.save({"model": model.state_dict(), "optimizer": by_name}, tmp_path / "x.pt")
    done = import_checkpoint(tmp_path / "x.pt", tmp_path / "out", options=TABLES)
    assert done.contents.dense_opt == ("top.bias@optimizer",)
    assert done.contents.extra["sparse_optim"]["state"] == {"item": {"step": 2}}
    assert done.contents.left_out == ()


def test_lightning_has_its_optimizers_in_a_list(tmp_path):
    model, adam = trained_by()
    file = {"state_dict": model.state_dict(), "optimizer_states": [adam.state_dict()], "global_step": 4}
    torch.save(file, tmp_path / "x.ckpt")
    done = import_checkpoint(tmp_path / "x.ckpt", tmp_path / "out", options=TABLES)
    assert "top.weight@optimizer_states_0" in done.contents.dense_opt
    assert done.step == 4


def test_a_model_in_ddp_is_named_as_one_outside(tmp_path):
    model, adam = trained_by()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": adam.state_dict()}, tmp_path / "x.pt")
    done = import_checkpoint(tmp_path / "x.pt", tmp_path / "out", model=model)
    assert "module.top.weight@optimizer" in done.contents.dense_opt


# what has no place


def reasons(done):
    return {left.name: left.reason for left in done.contents.left_out}


def test_an_order_that_nobody_knows_leaves_the_state_as_it_was_and_says_why(tmp_path):
    model, adam = trained_by(params=some_of)
    source = saved(tmp_path, model, optimizer=adam)
    for with_model, needed in ((None, "model="), (model, "optimizers=")):
        done = import_checkpoint(source, tmp_path / "out", options=TABLES, model=with_model, dry_run=True)
        assert f"give import_checkpoint {needed} to name them" in reasons(done)["optimizer"]
        assert "by their order" in reasons(done)["optimizer"]
        assert done.contents.extra["optimizer"]["state"].keys() == {0, 1}


def test_a_model_that_has_what_the_file_lacks_names_nothing(tmp_path):
    model, adam = trained_by()
    source = saved(tmp_path, model, optimizer=adam)
    done = import_checkpoint(source, tmp_path / "out", model=nn.ModuleDict({"more": nn.Linear(1, 1)}), dry_run=True)
    assert reasons(done)["optimizer"].startswith("found no tensor 'more.weight', expected each parameter in the file")


def test_states_that_no_table_has_are_listed_by_name(tmp_path):
    model = Clicks(sparse=False)
    optimizers = {
        "amsgrad": torch.optim.Adam([model.user.weight], amsgrad=True, weight_decay=0.1),
        "momentum": torch.optim.SGD([model.item.weight], lr=0.1, momentum=0.9),
    }
    train(model, optimizers.values(), 1)
    done = import_checkpoint(
        saved(tmp_path, model, **optimizers), tmp_path / "out", options=TABLES, model=model, optimizers=optimizers
    )
    assert set(reasons(done)) == {
        "amsgrad, table user.weight, max_exp_avg_sq",
        "amsgrad, table user.weight, weight_decay=0.1",
        "momentum, table item.weight, momentum_buffer",
    }


@pytest.mark.parametrize(
    ("optimizers", "match"),
    [
        (
            {"other": torch.optim.Adam([nn.Parameter(torch.ones(1))])},
            "no state of an optimizer 'other', expected one of",
        ),
        ({"optimizer": torch.optim.Adam([nn.Parameter(torch.ones(1))])}, "parameters that the model does not have"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(tmp_path, optimizers, match):
    model, adam = trained_by()
    refused(saved(tmp_path, model, optimizer=adam), match, model=model, optimizers=optimizers)


def test_an_optimizer_with_some_of_the_parameters_is_refused_for_the_state_of_all(tmp_path):
    model, adam = trained_by()
    source, some = saved(tmp_path, model, optimizer=adam), torch.optim.Adam(model.top.parameters())
    refused(source, "has 2 parameters, the file 4", model=model, optimizers={"optimizer": some})
    with pytest.raises(TypeError, match="name in the file -> optimizer"):
        import_checkpoint(source, tmp_path / "out", model=model, optimizers=[some])


def test_a_model_says_nothing_about_files_of_other_formats(tmp_path):
    pq.write_table(arrow_table(some_rows()), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "a model or optimizers, which name parameters", model=Clicks())
