"""Where an output dir is: paths with a home directory, URLs, and what is neither."""

import json

import pytest
import torch
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.checkpointer import make_sync_checkpointer
from recckpt.cli import main
from recckpt.policies import Transfers
from recckpt.storage import open_parent, open_storage


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("file:/runs", "write file:///runs, or /runs alone"),
        ("file:runs", "write runs alone"),
        ("memory:x", "write memory://x, or ./memory:x"),
        ("s3:/bucket/runs", "write s3://bucket/runs"),
        ("S3:bucket", "write S3://bucket"),
    ],
)
def test_a_url_without_its_slashes_is_refused_with_what_was_meant(tmp_path, monkeypatch, path, meant):
    monkeypatch.chdir(tmp_path)
    for use in (open_storage, open_parent, lambda path: Saver(nn.Linear(1, 1), output_dir=path)):
        with pytest.raises(ValueError, match=f"looks like a URL without its slashes: {meant}"):
            use(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["run:1", "a:b/c", "./memory:x", "x/memory:y"])
def test_a_path_with_a_colon_is_a_path(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Saver(nn.Linear(1, 1), output_dir=path)
    assert (tmp_path / path).is_dir()


@pytest.mark.parametrize(
    ("root", "name", "url"),
    [
        ("/runs/1", "ckpt_1", "/runs/1/ckpt_1"),
        ("/runs/1", "", "/runs/1"),
        ("/", "ckpt_1", "/ckpt_1"),
        ("memory://runs/1", "ckpt_1/model.pt", "memory://runs/1/ckpt_1/model.pt"),
    ],
)
def test_what_lies_in_a_storage_has_a_path_or_url_of_its_own(root, name, url):
    assert open_storage(root).url_of(name) == url


def test_text_that_cannot_be_encoded_is_refused_by_what_it_is(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"an output dir must be a path or URL encodable as UTF-8, found '\\ud800'"):
        Saver(model, output_dir="\ud800")
    saver = Saver(model, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"a checkpoint id must be encodable as UTF-8, found '\\ud800'"):
        saver.save("\ud800")
    with pytest.raises(ValueError, match=r"a checkpoint id must be encodable as UTF-8, found '\\ud800'"):
        saver.load(ckpt_id="\ud800")
    with pytest.raises(ValueError, match="UTF-8"):
        saver.load("\ud800")
    for register in (saver.register_for_checkpointing, saver.register_io_state):
        with pytest.raises(ValueError, match=r"'\\ud800' cannot be registered"):
            register("\ud800", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"state\['\\ud800'\]"):
        saver.save("a", state={"\ud800": 1})
    with pytest.raises(ValueError, match=r"state\['a'\]"):
        saver.save("a", state={"a": "\ud800"})
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_tilde_is_the_home_directory_wherever_a_path_is_taken(tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 1)
    saver = Saver(model, output_dir="~/runs", max_keep=None, transfers=Transfers(work_dir="~/work"))
    saver.save("a")
    assert (home / "runs" / "a" / "manifest.json").exists()
    for path in ("~/runs", "~/runs/a", "file://~/runs"):
        saver.load(path)
        saver.load_by_config({"path": path})
        with CheckpointReader(path) as reader:
            assert reader.tensor_names() == ["weight", "bias"]
    saver.load("~/runs/a", direct_path=True)
    saver.load("~/runs", "a")
    (home / "names.txt").write_text("\n".join(saver.names()))
    (home / "bank.json").write_text(json.dumps([{"path": "~/runs"}]))
    commands = [
        ["ls", "~/runs"],
        ["show", "~/runs/a"],
        ["verify", "~/runs"],
        ["repair", "~/runs"],
        ["consolidate", "~/runs/a", "--out", "~/model.pt"],
        ["plan", "~/bank.json", "--model-names", "~/names.txt"],
    ]
    assert [main(command) for command in commands] == [0] * len(commands), capsys.readouterr()
    assert list(torch.load(home / "model.pt")) == ["weight", "bias"]
    with make_sync_checkpointer() as checkpointer:
        checkpointer.save({"a": 1}, "~/plain")
        assert checkpointer.load("~/plain") == {"a": 1}
    assert sorted(path.name for path in home.iterdir()) == [
        "bank.json",
        "model.pt",
        "names.txt",
        "plain",
        "runs",
        "work",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_home_directory_of_nobody_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (open_storage, open_parent):
        with pytest.raises(
            ValueError, match="'~nobody-at-all/runs' begins with the home directory of a user unknown here"
        ):
            use("~nobody-at-all/runs")
