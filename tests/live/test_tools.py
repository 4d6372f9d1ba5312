"""What reads, compares and rewrites checkpoints works on those of live tables."""

import json

import numpy as np
import pytest
from support.live_runs import N_ROWS, Run, assert_same, read_rows

import recckpt
from recckpt import CheckpointReader, Deltas
from recckpt.cli.app import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a run with a full checkpoint and two deltas, as a.., b.., c.."""
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "runs", "Adagrad", deltas=Deltas(max_dirty=1, max_chain_bytes=100), max_keep=None)
    for i, ckpt_id in enumerate("abc"):
        run.train(2)
        run.saver.save(ckpt_id, step=i)
    run.saver.close()
    return run


def command(capsys, *words):
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_reader_gives_rows_by_id(run):
    with CheckpointReader(str(run.url)) as reader:
        rows = reader.lookup("users", [5, N_ROWS - 1])
        assert np.array_equal(rows.values, run.model.users.weight.detach()[[5, N_ROWS - 1]])
        assert sum(batch.num_rows for batch in reader.table("users")) == N_ROWS


@pytest.mark.slow
def test_the_commands_look_at_it(run, capsys):
    assert "users" in command(capsys, "show", run.url)
    assert "sparse_adagrad_sum" in command(capsys, "get", run.url, "users", 3, "--columns", "id,sparse_adagrad_sum")
    command(capsys, "verify", run.url)
    assert json.loads(command(capsys, "ls", run.url, "--json"))
    command(capsys, "report", run.url)
    assert recckpt.report(run.url).table("users").is_live


def test_two_checkpoints_are_compared_row_by_row(run, capsys):
    assert main(["diff", str(run.url / "a"), str(run.url / "c"), "--json"]) == 1  # they differ
    assert "users" in capsys.readouterr().out
    assert main(["diff", str(run.url / "c"), str(run.url / "c")]) == 0


def test_sql_sees_the_rows(run, capsys):
    found = json.loads(command(capsys, "sql", run.url, "select count(*) as n, max(id) as last from users", "--json"))
    assert found["rows"] == [[N_ROWS, N_ROWS - 1]]


def test_a_chain_is_compacted_to_the_same_rows(run, capsys):
    rows = run.rows()
    command(capsys, "compact", run.url, "--adopt")
    assert read_rows(run, "c") == rows
    state = run.state()
    again = Run(run.url, "Adagrad", seed=3)
    again.saver.load(ckpt_id="c")
    assert_same(again.state(), state)


def test_rows_are_exported(run, capsys, tmp_path):
    command(capsys, "export", run.url, tmp_path / "out", "--to", "npy", "--table", "users")
    values = {path.stem: np.load(path) for path in (tmp_path / "out").rglob("*.npy")}
    assert any(value.shape[0] == N_ROWS for value in values.values())


def test_a_forgotten_id_leaves_the_checkpoints_and_its_row_stays_in_the_model(run, capsys):
    before = run.model.users.weight.detach().clone()
    (run.url.parent / "ids.txt").write_text("5\n")
    command(capsys, "forget", run.url, "--table", "users", "--ids", run.url.parent / "ids.txt")
    assert 5 not in read_rows(run, "c")["users"]
    again = Run(run.url, "Adagrad", seed=3, deltas=True)
    own = again.model.users.weight.detach()[5].clone()
    report = again.saver.load(ckpt_id="c")
    assert report.rows_taken["users"] == N_ROWS - 1
    assert (again.model.users.weight[5] == own).all()
    assert (again.model.users.weight[6] == before[6]).all()
    assert again.saver.save("d", step=9).kind == "full"  # the row is not in the chain
    assert len(read_rows(again, "d")["users"]) == N_ROWS
