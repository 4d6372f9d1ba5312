"""A trained model is loaded to be evaluated or served, once, or as a hot standby that reads what is new."""

import logging

import pytest
import torch
from support.builders import ClickModel, Run, bits, flip_bit, tree
from support.late_storage import count_bytes
from support.other_user import another_user, directory_for_all
from support.sweeps import mostly_slow
from torch import nn

import recckpt
from recckpt import CheckpointManager, Deltas, Saver, Standby
from recckpt.errors import CheckpointNotFoundError, LoadConfError, PartlyLoadedError, StateMismatchError
from recckpt.live import live_tables
from recckpt.policies import Choose
from recckpt.policies.admit import Bloom, MinCount
from recckpt.sparse import HashTable, SparseAdam
from recckpt.text import Progress

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)


def scores(model):
    """Return what a model says of some clicks, of ids without a row too."""
    users, items = torch.arange(-40, 40), torch.arange(140, 220)
    with torch.no_grad():
        return bits(model.eval()(users, items))


def trained(url, **options):
    """Return a run of 25 steps, saved at its end."""
    run = Run(url, max_keep=3, **options).train(25)
    run.manager.save()
    return run


@mostly_slow()
def test_a_loaded_model_gives_what_the_trained_one_gives(url, caplog):
    run = Run(url, max_keep=3, deltas=True).train(10)
    then = scores(run.model.eval())
    run.model.train()
    run.train(15).manager.save()
    caplog.clear()
    model = ClickModel()
    report = recckpt.load_into(model, url)
    assert scores(model) == scores(run.model)
    assert report.global_step == 25
    for ckpt_id, expected in (("ckpt_10", then), ("latest", scores(run.model))):
        model = ClickModel()
        recckpt.load_into(model, f"{url}/{ckpt_id}")
        assert scores(model) == expected
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_nothing_is_written_where_nothing_may_be():
    with directory_for_all() as runs:
        run = trained(runs)
        before = tree(runs)
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        model = ClickModel()
        with another_user():
            with pytest.raises(PermissionError):
                Saver(ClickModel(), output_dir=str(runs))
            recckpt.load_into(model, runs)
            standby = recckpt.Standby(ClickModel())
            reports = [standby.load(checkpoint) for checkpoint in recckpt.follow(runs, timeout_sec=0)]
            assert [report.global_step for report in reports] == [each.step for each in recckpt.list_checkpoints(runs)]
        assert scores(model) == scores(run.model)
        assert tree(runs) == before
        runs.chmod(0o755)


def test_a_model_with_an_optimizer_is_loaded_without_its_state_and_without_a_warning(tmp_path, caplog):
    run = trained(tmp_path, optimizer="adam")
    other = Run(tmp_path / "other", optimizer="adam").train(5)
    step = other.sparse.state_dict()["state"]
    caplog.clear()
    recckpt.load_into(other.model, tmp_path)
    assert scores(other.model) == scores(run.model)
    assert not any(slot.any() for table in other.model.tables for slot in table.slots.values())
    assert other.sparse.state_dict()["state"] == step
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


class Words(nn.Module):
    """A plain embedding below a layer."""

    def __init__(self):
        super().__init__()
        self.word, self.top = nn.Embedding(50, 4), nn.Linear(4, 1)


@pytest.fixture
def words(tmp_path):
    """A trained model whose embedding was saved as a live table, to ``tmp_path``."""
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1), deltas=True)
    saver.register_for_checkpointing("dense_optim", optimizer)
    manager = CheckpointManager(saver, 1)
    for _ in range(2):
        model.top(model.word(torch.arange(5))).sum().backward()
        optimizer.step()
        manager.step()
    return model


def test_live_tables_are_loaded_into_plain_embeddings_and_hashtables_of_the_same_name(tmp_path, words, caplog):
    caplog.clear()
    model = Words()
    recckpt.load_into(model, tmp_path)
    assert {name: bits(value) for name, value in model.state_dict().items()} == {
        name: bits(value) for name, value in words.state_dict().items()
    }
    model = nn.ModuleDict({"word": HashTable(4, name="word"), "top": nn.Linear(4, 1)})
    report = recckpt.load_into(model, tmp_path)
    assert report.rows_taken == {"word": 50}
    assert torch.equal(model["word"].eval()(torch.arange(50)), words.word.weight)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_part_is_loaded_by_a_load_conf(tmp_path):
    run = trained(tmp_path)
    item = nn.ModuleDict({"item": HashTable(4, name="item")})
    with pytest.raises(StateMismatchError, match=r"not in the model: 'top.weight'"):
        recckpt.load_into(item, tmp_path)
    assert len(item["item"]) == 0
    recckpt.load_into(item, tmp_path, load_conf={"load": ["item"]})
    assert len(item["item"]) == len(run.model.items)


@pytest.mark.parametrize(
    ("model", "path", "conf", "error", "message"),
    [
        (
            *(ClickModel, ".", {"load": ["sparse", "sparse_opt", "io_state"]}, LoadConfError),
            r"only training needs 'sparse_opt', 'io_state': use Saver.load for that",
        ),
        (ClickModel, ".", {"lod": ["*"]}, LoadConfError, "unknown key 'lod'"),
        (dict, ".", None, TypeError, r"model must be a torch.nn.Module, found a dict"),
        (ClickModel, "gone", None, CheckpointNotFoundError, "does not exist"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path, model, path, conf, error, message):
    trained(tmp_path)
    for load in (recckpt.load_into, lambda model, path, load_conf: Standby(model, load_conf=load_conf).load(path)):
        with pytest.raises(error, match=message):
            load(model(), tmp_path / path, load_conf=conf)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("bloom", [None, Bloom(1000, 0.01)], ids=["exact", "filter"])
def test_counts_of_ids_that_wait_for_a_row_are_not_missed(tmp_path, bloom):
    table = HashTable(4, name="item", admit=MinCount(2, bloom=bloom))
    for ids in (torch.arange(10), torch.arange(4)):
        table(ids)
    saver = Saver(nn.ModuleDict({"item": table}), output_dir=str(tmp_path))
    assert len(saver.save("ckpt_1").tables) == 2
    model = nn.ModuleDict({"item": HashTable(4, name="item")})
    assert recckpt.load_into(model, tmp_path).rows_taken == {"item": 4}
    with pytest.raises(StateMismatchError, match=r"not in the model: 'item.candidates"):
        Saver(model, output_dir=str(tmp_path)).load()


def test_a_table_split_in_two_behind_a_count_takes_rows_and_counts_by_one_rule_each(tmp_path):
    table = HashTable(4, name="user", admit=MinCount(2))
    for ids in (torch.arange(10), torch.arange(4)):
        table(ids)
    Saver(nn.ModuleDict({"user": table}), output_dir=str(tmp_path)).save("ckpt_1")
    parts = [HashTable(4, name=name, admit=MinCount(2)) for name in ("user_a", "user_b")]
    saver = Saver(nn.ModuleList(parts), output_dir=str(tmp_path / "new"))
    conf = {"path": str(tmp_path), "oname": {"user_a": "user", "user_b": "user"}}
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config({**conf, "oname": {}, "strict": True})
    assert (caught.value.missing, caught.value.unexpected) == (["user_a", "user_b"], ["user"])
    rows = saver.load_by_config({**conf, "strict": True}).rows_taken
    assert rows == {"user_a": 4, "user_a.candidates": 6, "user_b": 4, "user_b.candidates": 6}


def test_only_what_changes_look_ups_is_warned_of(tmp_path, caplog):
    table = HashTable(4, name="item", track=("count",))
    optimizer = SparseAdam([table])
    for ids in (torch.arange(100), torch.arange(30)):
        table(ids).sum().backward()
        optimizer.step()
    chosen = {"slots": ["!*@*exp_avg*"]}
    Saver(nn.ModuleDict({"item": table}), optimizer, str(tmp_path), choose=Choose(**chosen)).save("whole", step=1)
    caplog.clear()
    recckpt.load_into(nn.ModuleDict({"item": HashTable(4, name="item")}), tmp_path)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []

    chosen["where"], chosen["store"] = {"item": {"count": {"min": 2}}}, {"item@embedding": "bfloat16"}
    Saver(nn.ModuleDict({"item": table}), optimizer, str(tmp_path), choose=Choose(**chosen)).save("less", step=2)
    caplog.clear()
    recckpt.load_into(nn.ModuleDict({"item": HashTable(4, name="item")}), tmp_path)
    [warning] = [record.message for record in caplog.records if record.levelno > logging.INFO]
    assert "without 70 rows" in warning
    assert "embedding narrower than float32" in warning
    assert warning.endswith("its rows do not match the trained rows bit for bit")
    assert "exp_avg" not in warning


def model_of(dim=2):
    return nn.ModuleDict({"t": HashTable(dim, name="t"), "u": HashTable(dim, name="u"), "top": nn.Linear(dim, 1)})


class Trainer:
    """A run that saves deltas of two tables."""

    def __init__(self, url, n_rows=100, dim=2, **options):
        self.n_rows, self.dim, self.model = n_rows, dim, model_of(dim)
        options = {"max_keep": None, "deltas": ALWAYS, **options}
        self.manager = CheckpointManager(Saver(self.model, output_dir=str(url), **options), 1)

    def train(self, n_steps=1, n_changed=1):
        """Change some rows in each step, in the first all."""
        for _ in range(n_steps):
            step = self.manager.global_step + 1
            ids = torch.arange(self.n_rows) if step == 1 else torch.arange(step, step + n_changed)
            for table in (self.model["t"], self.model["u"]):
                table.insert(ids, torch.full((len(ids), self.dim), float(step)))
            self.model["t"].erase(torch.tensor([self.n_rows - step]))
            with torch.no_grad():
                self.model["top"].weight.fill_(step)
            self.manager.step()
        return self


def state_of(model):
    tables = (model["t"], model["u"])
    rows = [dict(zip(t.ids().tolist(), t.embeddings().tolist(), strict=True)) for t in tables]
    return *rows, model["top"].weight.tolist()


def whole(path):
    model = model_of()
    recckpt.load_into(model, path)
    return state_of(model)


@pytest.fixture
def run(tmp_path):
    return Trainer(tmp_path / "run").train()


@pytest.fixture
def standby(run, tmp_path):
    return Standby(model_of())


def test_it_goes_from_checkpoint_to_checkpoint_with_what_is_new_in_each(run, standby, tmp_path):
    assert standby.load(tmp_path / "run").rows_taken == {"t": 99, "u": 100}
    run.train(3)
    for path in (tmp_path / "run/ckpt_2", tmp_path / "run"):
        report = standby.load(path)
        assert 0 < sum(report.rows_taken.values()) < 6
        assert state_of(standby._model) == whole(path)
    assert standby.load(tmp_path / "run") is None


def test_it_takes_what_follow_yields_though_rotation_removes_that_meanwhile(tmp_path):
    run, standby = Trainer(tmp_path, max_keep=1, deltas=False).train(), Standby(model_of())
    for checkpoint in recckpt.follow(tmp_path, timeout_sec=0):
        expected = whole(checkpoint)
        run.train(2 if checkpoint.manifest.step < 4 else 0)
        assert (standby.load(checkpoint).global_step, state_of(standby._model)) == (checkpoint.manifest.step, expected)
    assert checkpoint.manifest.step == 5
    assert whole(checkpoint) == whole(tmp_path) == state_of(run.model)


def test_what_is_loaded_of_an_open_checkpoint_leaves_it_open(run, tmp_path):
    with recckpt.CheckpointReader(tmp_path / "run") as reader:
        model = model_of()
        recckpt.load_into(model, reader)
        for file in (tmp_path / "run").rglob("*.arrow"):
            file.unlink()
        recckpt.load_into(model, reader)
        assert reader.lookup("t", [1]).found.all()
    assert state_of(model) == state_of(run.model)


def test_at_one_percent_changed_a_tenth_of_the_bytes_of_a_whole_load_is_more_than_enough(memory_url, monkeypatch):
    run, standby = Trainer(memory_url, n_rows=10_000, dim=16).train(), Standby(model_of(16))
    n_bytes = count_bytes(monkeypatch)
    standby.load(memory_url)
    of_whole = n_bytes.total()
    run.train(n_changed=100)
    n_bytes.clear()
    standby.load(memory_url)
    assert 0 < n_bytes.total() < of_whole / 10
    assert state_of(standby._model) == state_of(run.model)


@mostly_slow()
@pytest.mark.parametrize("change", ["a row", "another chain", "an older checkpoint", "back to an older one"])
def test_all_is_read_where_the_chain_or_the_rows_are_others(run, standby, tmp_path, change):
    path = tmp_path / "run"
    run.train(2)
    standby.load(path)
    if change == "a row":
        standby._model["t"].insert(torch.tensor([5]), torch.ones(1, 2))
        run.train()
    elif change == "another chain":
        Saver(run.model, output_dir=str(path), max_keep=None).save("full")
    elif change == "an older checkpoint":
        path = path / "ckpt_2"
    else:
        run.manager.restore(1)
        run.train()
    assert sum(standby.load(path).rows_taken.values()) > 190
    assert state_of(standby._model) == whole(path)


def test_a_row_that_changed_here_is_mended_and_look_ups_in_eval_mode_change_nothing(run, standby, tmp_path):
    standby.load(tmp_path / "run")
    standby._model["t"].clear()
    assert standby.load(tmp_path / "run").rows_taken == {"t": 99, "u": 100}
    standby._model.eval()["t"](torch.arange(1000))
    run.train()
    assert standby.load(tmp_path / "run").rows_taken == {"t": 1, "u": 1}


def test_a_load_that_breaks_off_or_is_damaged_is_made_up_for_by_a_whole_one(run, standby, tmp_path, monkeypatch):
    standby.load(tmp_path / "run")
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(PartlyLoadedError, match="broken"):
            standby.load(tmp_path / "run")
    assert sum(standby.load(tmp_path / "run").rows_taken.values()) > 190
    assert state_of(standby._model) == state_of(run.model)
    run.train()
    flip_bit(next((tmp_path / "run/ckpt_3").rglob("*.arrow")), -600)
    with pytest.raises(recckpt.errors.CorruptCheckpointError):
        standby.load(tmp_path / "run/ckpt_3")
    assert state_of(standby._model) == whole(tmp_path / "run/ckpt_2")


def test_a_compacted_form_of_what_was_loaded_is_the_same_checkpoint(run, standby, tmp_path):
    run.train(2)
    standby.load(tmp_path / "run")
    recckpt.rewrite.compact(tmp_path / "run")
    run.train()  # adopts the form
    assert standby.load(tmp_path / "run").rows_taken == {"t": 1, "u": 1}
    assert state_of(standby._model) == state_of(run.model)


def test_a_part_of_a_model_is_kept_at_the_run_too(run, tmp_path):
    standby = Standby(model_of(), load_conf={"load": ["t"]})
    standby.load(tmp_path / "run")
    run.train()
    assert standby.load(tmp_path / "run").rows_taken == {"t": 1}
    assert state_of(standby._model)[:2] == (state_of(run.model)[0], {})


def test_rows_of_a_table_that_the_model_has_as_an_embedding_are_all_read_each_time(tmp_path):
    def begin():
        return nn.ModuleDict({"t": HashTable(2, name="t"), "word": nn.Embedding(200, 2, sparse=True)})

    model = begin()
    optimizer = torch.optim.SparseAdam(model["word"].parameters())
    live = live_tables(model, optimizer, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), max_keep=None, deltas=ALWAYS, tables=live)
    other, standby = begin(), None
    for step in (1, 2, 3):
        model["t"].insert(torch.tensor([step]), torch.ones(1, 2))
        optimizer.zero_grad()
        model["word"](torch.tensor([step])).sum().backward()
        optimizer.step()
        record = saver.save(f"ckpt_{step}", step=step)
        assert [table.name for table in record.tables] == ["t", "word"]
        standby = standby or Standby(other)
        with torch.no_grad():
            other["word"].weight[100] = 9.0
        standby.load(tmp_path)
        assert torch.equal(other["word"].weight, model["word"].weight)
        assert sorted(other["t"].ids().tolist()) == [*range(1, step + 1)]


class Towers:
    """A run of a large tower that training leaves as it is, and a small one."""

    def __init__(self, url):
        self.url, self.model = url, self.begin()
        self.saver = Saver(self.model, output_dir=str(url), max_keep=None)

    @staticmethod
    def begin():
        frozen = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 3, dtype=torch.bfloat16))  # of more than one block
        return nn.ModuleDict({"t": HashTable(2, name="t"), "frozen": frozen, "top": nn.Linear(2, 1)})

    def save(self, step):
        self.model["t"].insert(torch.tensor([step]), torch.ones(1, 2))
        with torch.no_grad():
            self.model["top"].weight.fill_(step)
        self.saver.save(f"ckpt_{step}", step=step)


def dense_of(model):
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def is_equal(one, other):
    ours, theirs = dense_of(one), dense_of(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_dense_tensors_that_the_model_has_already_are_not_read(memory_url, monkeypatch):
    run, model = Towers(memory_url), Towers.begin()
    standby = Standby(model)
    run.save(1)
    n_bytes = count_bytes(monkeypatch)
    standby.load(memory_url)
    assert n_bytes.total() > 4 * 600 * 600
    run.save(2)
    n_bytes.clear()
    report = standby.load(memory_url)
    assert n_bytes.total() < 100_000
    assert report.bytes_read <= n_bytes.total()
    assert is_equal(model, run.model)


def test_damage_in_what_is_read_of_dense_tensors_is_an_error_and_changes_nothing(tmp_path):
    run, model = Towers(tmp_path), Towers.begin()
    standby = Standby(model)
    run.save(1)
    standby.load(tmp_path)
    run.save(2)
    with recckpt.CheckpointReader(tmp_path / "ckpt_2") as reader:
        expected = reader.read_tensor("top.weight")
    file = tmp_path / "ckpt_2/model.pt"
    at = file.read_bytes().index(expected.tobytes())
    flip_bit(file, at)
    with pytest.raises(recckpt.errors.CorruptCheckpointError, match=r"top\.weight"):
        standby.load(tmp_path)
    assert model["top"].weight[0, 0] == 1


@pytest.mark.parametrize("change", ["a value by .data", "a value in the last block", "another layer there"])
def test_a_dense_tensor_that_is_not_as_stored_is_read(tmp_path, change):
    run, model = Towers(tmp_path), Towers.begin()
    standby = Standby(model)
    run.save(1)
    standby.load(tmp_path)
    if change == "a value by .data":  # which no version of a tensor counts
        model["frozen"][0].weight.data[0, 0] += 1
    elif change == "a value in the last block":
        model["frozen"][0].weight.data[-1, -1] += 1
    else:
        run.model["frozen"][1].weight.data[0, 0] += 1
    run.save(2)
    standby.load(tmp_path)
    assert is_equal(model, run.model)
