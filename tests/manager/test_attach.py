"""One call makes a manager of all that a run consists of, or says of all that has no place what it is."""

import logging
import warnings

import pytest
import torch
from support.builders import Stream, bits, frozen, table_state
from torch import nn
from torch.utils.data import DataLoader

import recckpt
from recckpt import CheckpointManager
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.sparse import HashTable, JointOptimizer, SparseAdagrad, SparseAdamW


class Clicks(nn.Module):
    """A table, an embedding that is large enough for a live one, one that is not, and a dense part."""

    def __init__(self):
        super().__init__()
        self.item = HashTable(4, name="item")
        self.word, self.day = nn.Embedding(1000, 4, sparse=True), nn.Embedding(7, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, items):
        return self.top(self.item(items) + self.word(items) + self.day(items % 7))


class Job:
    """A process of a run: all that trains the model, attached."""

    def __init__(self, url, **options):
        torch.manual_seed(0)
        self.model, self.stream = Clicks(), Stream()
        self.sparse = SparseAdamW([self.model.item])
        self.words = torch.optim.SparseAdam([self.model.word.weight])
        self.dense = torch.optim.Adam([*self.model.day.parameters(), *self.model.top.parameters()])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.dense, 3)
        self.manager = CheckpointManager.attach(
            self.model,
            [self.sparse, self.words, self.dense],
            schedulers=self.schedule,
            loader=self.stream,
            output_dir=url,
            **{"save_interval": 5, **options},
        )

    def train(self, n_steps):
        for _ in range(n_steps):
            self.model(self.stream.next()[1]).square().mean().backward()
            for optimizer in (self.sparse, self.words, self.dense):
                optimizer.step()
                optimizer.zero_grad()
            self.schedule.step()
            self.manager.step()
        self.manager.close()
        return self

    @property
    def state(self):
        return {
            "item": table_state(self.model.item),
            "dense": {key: bits(value) for key, value in self.model.state_dict().items() if torch.is_tensor(value)},
            "objects": [frozen(obj.state_dict()) for obj in (self.sparse, self.words, self.dense, self.schedule)],
            "position": self.stream.position,
            "step": self.manager.global_step,
        }


def test_a_run_resumes_with_all_that_was_attached_and_one_line_says_what_that_is(tmp_path, caplog):
    straight = Job(tmp_path / "straight").train(15)
    with caplog.at_level(logging.INFO):
        first = Job(tmp_path / "runs")
    [line] = [record.message for record in caplog.records]
    assert line == (
        f"{tmp_path}/runs: saves 1 table of SparseAdamW ('item'), 1 live table ('word'), 3 dense tensors, "
        "'dense_optim' (SparseAdam), 'dense_optim_1' (Adam), 'scheduler' (StepLR), 'loader' (Stream); "
        "save_interval=5, max_keep=2, async_save=True (training continues meanwhile), deltas=True (only changes)"
    )
    first.train(12)
    resumed = Job(tmp_path / "runs")
    assert resumed.manager.global_step == 0  # nothing is restored by itself
    assert resumed.manager.restore() == 10
    assert resumed.train(5).state == straight.state


def test_saves_are_in_the_background_and_deltas_unless_asked_otherwise(tmp_path):
    infos, others = [], []
    Job(tmp_path / "default", on_save=infos.append).train(10)
    assert [(info.background, info.kind) for info in infos] == [(True, "full"), (True, "delta")]
    options = {"async_save": False, "deltas": False, "max_keep": 1, "ephemeral": 2, "save_interval": 4}
    manager = Job(tmp_path / "other", on_save=others.append, **options).train(6).manager
    assert [(info.background, info.kind, info.ephemeral) for info in others] == [
        (False, "full", True),
        (False, "full", False),
        (False, "full", True),
    ]
    assert manager.saver.max_keep == 1


def test_names_that_are_given_stand_in_checkpoints(tmp_path):
    model, stream = Clicks(), Stream()
    adam, sparse = torch.optim.Adam(model.top.parameters()), SparseAdamW([model.item])
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3)
    manager = CheckpointManager.attach(
        model,
        {"towers": JointOptimizer(adam, sparse), "rows": torch.optim.SparseAdam([model.word.weight])},
        schedulers={"warm": schedule},
        loader={"clicks": stream},
        output_dir=tmp_path,
        save_interval=1,
        tables=None,
    )
    names = manager.save().names
    assert {*names.extra} == {"sparse_optim", "towers", "rows", "warm"}
    assert names.io_state == ("clicks",)
    assert "word.weight" in names.dense
    assert manager.saver.sparse_optim is sparse


def test_live_tables_are_those_that_were_found_before_or_as_options_find_them(tmp_path):
    model = Clicks()
    adam, sparse = torch.optim.Adam([*model.day.parameters(), *model.word.parameters()]), SparseAdamW([model.item])
    found = live_tables(model, adam, exclude=["word"], min_rows=1)
    options = {"output_dir": tmp_path, "save_interval": 1}
    manager = CheckpointManager.attach(model, [adam, sparse], tables=found, **options)
    assert {table.name for table in manager.save().tables} == {"item", "day"}
    again = CheckpointManager.attach(model, [adam, sparse], tables={"exclude": ["word"], "min_rows": 1}, **options)
    assert {table.name for table in again.save().tables} == {"item", "day"}


def test_live_tables_that_were_found_for_another_optimizer_than_trains_are_refused(tmp_path):
    """As where a trainer makes an optimizer of its own: none of its steps would be seen."""
    model = nn.ModuleDict({"word": nn.Embedding(1000, 4), "top": nn.Linear(4, 1)})
    model["frozen"] = nn.Embedding(1000, 4).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found, again = live_tables(model, torch.optim.Adam(trained)), torch.optim.Adam(trained)
    options = {"output_dir": tmp_path / "runs", "save_interval": 1}
    refusal = r"tables: the Adam here trains 'word.weight', but live_tables was given another optimizer for it: pass"
    with pytest.raises(ValueError, match=refusal):
        CheckpointManager.attach(model, again, tables=found, **options)
    assert not (tmp_path / "runs").exists()
    CheckpointManager.attach(model, torch.optim.SGD(model["top"].parameters()), tables=found, **options)


def test_a_model_is_attached_anew_with_other_optimizers_as_in_a_notebook(tmp_path):
    model, options = nn.ModuleDict({"word": nn.Embedding(1000, 4)}), {"output_dir": tmp_path, "save_interval": 1}
    before = CheckpointManager.attach(model, torch.optim.Adam(model.parameters()), **options)
    again = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"tables: .* is not the path of an embedding"):
        CheckpointManager.attach(model, again, tables={"exclude": ["gone"], "names": {}}, **options, ephemeral=0)
    before.save()
    manager = CheckpointManager.attach(model, again, **options)
    model["word"](torch.arange(5)).sum().backward()
    again.step()
    manager.step()
    manager.close()
    with pytest.raises(LiveTableError, match="it is closed, so changes are no longer recorded"):
        before.saver.save("before")


def test_all_that_has_no_place_is_named_at_once_and_nothing_is_made(tmp_path):
    model, other = Clicks(), nn.Linear(2, 2)
    unknown = SparseAdamW([model.item])
    strange = torch.optim.Adam(other.parameters())
    with pytest.raises(ValueError, match="nothing was made") as refused:
        CheckpointManager.attach(
            model,
            [strange, "adam"],
            schedulers=[torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters()), 1), strange],
            loader=[DataLoader([1]), object()],
            output_dir=tmp_path / "runs",
            save_interval=0,
            tables={"names": {"wrd": "words"}},
        )
    first, *problems = str(refused.value).splitlines()
    assert first == f"attach: {len(problems)} problems; nothing was made:"
    assert [problem.strip().partition(" ")[0] for problem in problems] == [
        *("save_interval", "optimizers[1]:", "optimizers:", "optimizers[0]:"),
        *("schedulers[0]:", "schedulers[1]:", "loader[0]:", "loader[1]:", "tables:"),
    ]
    for said in (
        "the SparseAdamW that trains 'item' is not among them",
        "Adam trains 2 parameters that the model does not have (shape (2, 2), (2,))",
        "StepLR belongs to an optimizer (SGD) that is not among the optimizers",
        "torchdata's StatefulDataLoader",
        "did you mean 'word'?",
    ):
        assert said in str(refused.value)
    assert not (tmp_path / "runs").exists()
    assert unknown.trains(model.item)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"save_interval": 2, "ephemeral": 3}, ValueError, "ephemeral must be below save_interval"),
        ({"max_keep": "two"}, ValueError, "max_keep must be"),
        ({"async_save": "x"}, ValueError, "async_save must be True, False, or .* one of"),
        ({"on_save_error": "x"}, ValueError, "on_save_error must be 'raise', 'warn', a callable"),
        ({"shard_id": 3, "shard_num": 2}, ValueError, "shard_id must be 0 to shard_num - 1"),
        ({"max_to_keep": 3}, TypeError, r"attach\(\) got an unexpected .*'max_to_keep'.*: write max_keep="),
        ({"monitor": 3}, TypeError, r"attach\(\) got an unexpected .*'monitor'.*Best\(3, 'auc'\)"),
        ({"dirpath": 3}, TypeError, r"attach\(\) got an unexpected .*'dirpath'.*: write output_dir="),
        ({"optimizer": 3}, TypeError, r"attach\(\) got an unexpected .*'optimizer'.*; did you mean 'optimizers'\?"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_made(tmp_path, options, error, problem):
    with pytest.raises(error, match=problem):
        CheckpointManager.attach(nn.Linear(1, 1), output_dir=tmp_path / "runs", **{"save_interval": 1, **options})
    assert not (tmp_path / "runs").exists()


def test_one_optimizer_trains_the_tables_of_the_model(tmp_path):
    model, other = nn.ModuleDict({name: HashTable(2, name=name) for name in "ab"}), HashTable(2, name="c")
    sparse = [SparseAdamW([model["a"]]), SparseAdagrad([model["b"], other])]
    with pytest.raises(ValueError, match="nothing was made") as refused:
        CheckpointManager.attach(model, sparse, output_dir=tmp_path / "runs", save_interval=1)
    assert "sparse_optim trains tables that are not in the model: 'c'" in str(refused.value)
    assert "optimizers[0] and optimizers[1]: found 2 optimizers of tables, expected one" in str(refused.value)


def test_an_optimizer_of_no_values_is_refused_where_a_model_has_tables_alone(tmp_path):
    model = nn.ModuleDict({"item": HashTable(2, name="item")})
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(
        ValueError, match=r"Adam trains nothing: .*pass recckpt.recis.filter_out_sparse_param\(model\) to"
    ):
        CheckpointManager.attach(model, adam, output_dir=tmp_path / "runs", save_interval=1)
    sparse = SparseAdamW(recckpt.recis.filter_out_sparse_param(model))
    CheckpointManager.attach(model, sparse, output_dir=tmp_path / "runs", save_interval=1).save()


def test_what_cannot_be_registered_is_refused_by_the_name_that_it_would_have(tmp_path):
    model = Clicks()
    adam, options = torch.optim.Adam(model.top.parameters()), {"output_dir": tmp_path / "runs", "save_interval": 1}
    with pytest.raises(ValueError, match=r"optimizers\['a@b'\]: .* must not contain '@'"):
        CheckpointManager.attach(model, {"a@b": adam}, **options)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3)
    with pytest.raises(ValueError, match=r"schedulers\['same'\]: .* the name 'same' is registered already"):
        CheckpointManager.attach(model, {"same": adam}, schedulers={"same": schedule}, **options)
    with pytest.raises(
        ValueError, match="tables: found a list, expected a dict of arguments of live_tables, its result"
    ):
        CheckpointManager.attach(model, adam, tables=[], **options)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        CheckpointManager.attach(adam, adam, **options)
    assert not (tmp_path / "runs").exists()


def test_metadata_of_a_run_stays_in_its_checkpoints_through_restarts_that_do_not_know_it(tmp_path):
    def run(**options):
        model = nn.Linear(2, 2)
        return CheckpointManager.attach(model, output_dir=tmp_path, save_interval=1, async_save=False, **options)

    with run(metadata={"owner": "ads", "data": {"days": [1, 2]}}) as manager:
        manager.step(metrics={"loss": 0.5})
    with run() as manager:
        assert manager.metadata == {}
        manager.restore()
        assert manager.metadata == {"owner": "ads", "data": {"days": [1, 2]}}
        manager.step()
    with run(metadata={"owner": "search"}) as manager:
        manager.restore()
        manager.step()
        manager.metadata = {**manager.metadata, "data": None}
        manager.step()
    states = [each.state for each in recckpt.list_checkpoints(tmp_path)]
    assert states == [{"metadata": {"owner": "search", "data": value}} for value in ({"days": [1, 2]}, None)]
    with recckpt.inspect.connect(tmp_path) as connection:
        assert connection.sql("select metadata.owner from checkpoints where step = 4").fetchall() == [("search",)]


def test_metadata_that_json_does_not_have_is_refused_before_anything_is_made(tmp_path):
    for metadata, error in (({"a": object()}, ValueError), ({1: "a"}, ValueError), (["a"], TypeError)):
        with pytest.raises(error, match="metadata"):
            CheckpointManager.attach(nn.Linear(2, 2), output_dir=tmp_path / "run", save_interval=1, metadata=metadata)
    assert not (tmp_path / "run").exists()
    manager = CheckpointManager.attach(nn.Linear(2, 2), output_dir=tmp_path, save_interval=1)
    with pytest.raises(ValueError, match="use another name"):
        manager.step(state={"metadata": 1})


def test_a_loss_that_has_a_gradient_is_a_metric_without_a_word(tmp_path):
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CheckpointManager.attach(model, output_dir=tmp_path, save_interval=1, async_save=False) as manager:
            manager.step(metrics={"loss": (loss := model(torch.ones(2)).sum())}, state={"same": loss})
    (saved,) = recckpt.list_checkpoints(tmp_path)
    assert saved.state["loss"] == saved.state["same"] == loss.item()


def test_metadata_is_refused_where_a_save_would_refuse_it(tmp_path):
    nested = "x"
    for _ in range(9):
        nested = {"a": nested}
    for metadata, what in (
        (nested, "nested more than 8 deep"),
        ({"n": 10**40}, "an int of 41 digits, expected at most 40"),
    ):
        with pytest.raises(ValueError, match=what):
            CheckpointManager.attach(nn.Linear(2, 2), output_dir=tmp_path / "run", save_interval=1, metadata=metadata)
    accepted = {**nested["a"], "n": 10**40 - 1}
    with CheckpointManager.attach(nn.Linear(2, 2), output_dir=tmp_path, save_interval=1, metadata=accepted) as manager:
        manager.step()
    assert recckpt.list_checkpoints(tmp_path)[0].state["metadata"] == accepted
