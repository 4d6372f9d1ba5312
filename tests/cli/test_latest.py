"""``latest~1`` is taken wherever a checkpoint is, and means what its own name means."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import recckpt as library
from recckpt import CheckpointReader, Saver
from recckpt.cli.commands import parsers
from recckpt.sparse import HashTable

# {run} is an output dir, {name} a checkpoint of it, {new} a place for what is written
COMMANDS = {
    "show": "show {run}/{name} --files",
    "head": "head {run}/{name} t",
    "get": "get {run}/{name} t 2 3",
    "verify": "verify {run}/{name}",
    "verify --absent": "verify {run}/{name} --absent {ids}",
    "diff": "diff {run}/{name} {run}/c3",
    "sql": "sql {run}/{name} 'select * from t'",
    "salvage": "salvage {run}/{name} t --out {new}",
    "consolidate": "consolidate {run}/{name} --out {new}",
    "compact": "compact {run} {name} --out {new}",
    "compact of a path": "compact {run}/{name} --out {new}",
    "plan": "plan --model-names {names} {bank}",
    "export": "export {run}/{name} {new} --to npy",
    "export --since": "export {run} {new} --to npy --since {name}",
    "export --since of a path": "export {run} {new} --to npy --since {run}/{name}",
}
OF_NO_CHECKPOINT = {"ls", "history", "first", "watch", "report", "repair", "forget", "import", "mirror", "near"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An output dir with a full checkpoint and two deltas."""
    path, table = tmp_path_factory.mktemp("run"), HashTable(2, name="t")
    saver = Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), None, str(path), None, deltas=True)
    for number, begin, end in ((1, 0, 300), (2, 300, 302), (3, 302, 304)):
        table.insert(torch.arange(begin, end), torch.full((end - begin, 2), float(number)))
        saver.save(f"c{number}", step=number)
    (path.parent / "names.txt").write_text("\n".join(saver.names()))
    (path.parent / "ids.txt").write_text("4\n")
    return path


def test_no_command_that_takes_a_checkpoint_is_forgotten_here():
    assert {name.split()[0] for name in COMMANDS} | OF_NO_CHECKPOINT == set(parsers()[1])


def answer(recckpt, run: Path, command: str, name: str):
    """Run a command on a checkpoint of this name; whatever it writes goes."""
    new, bank = run.parent / "new", run.parent / "bank.json"
    bank.write_text(json.dumps([{"path": f"{run}/{name}"}]))
    places = {"run": run, "name": name, "new": new, "bank": bank, "names": run.parent / "names.txt"}
    words = COMMANDS[command].replace("'select * from t'", "QUERY").format(ids=run.parent / "ids.txt", **places).split()
    done = recckpt(*["select * from t" if word == "QUERY" else word for word in words], "--json")
    written = sorted(path.name for path in new.rglob("*")) if new.is_dir() else new.exists()
    shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
    return done, written


def ours(data):
    """Return an answer without what differs from call to call."""
    return {name: value for name, value in data.items() if name not in ("bytes", "seconds")}


@pytest.mark.parametrize("command", COMMANDS)
def test_latest_1_is_the_one_before_the_newest(recckpt, run, command):
    by_name, written = answer(recckpt, run, command, "c2")
    counted, also_written = answer(recckpt, run, command, "latest~1")
    assert by_name.out
    assert by_name.code == counted.code == (command in ("diff", "verify --absent"))
    assert also_written == written
    assert ours(counted.json) == ours(by_name.json)
    far, _ = answer(recckpt, run, command, "latest~9")
    assert far.code in (1, 2)
    assert "latest~9" in far.err + far.out


def test_python_takes_it_too(run, tmp_path):
    path = f"{run}/latest~1"
    with CheckpointReader(path) as reader:
        assert reader.manifest.ckpt_id == "c2"
    with library.connect(path) as connection:
        assert connection.execute("select count(*) from t").fetchone() == (302,)
    assert library.scan(path, "t").collect().height == 302
    assert library.dataset(path, "t").count_rows() == 302
    table = HashTable(2, name="t")
    saver = Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), None, str(tmp_path))
    for how in ({"ckpt_path": path}, {"ckpt_path": str(run), "ckpt_id": "latest~1"}):
        saver.load(**how)
        assert table.embeddings().max() == 2
