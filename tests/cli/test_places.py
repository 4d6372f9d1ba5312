"""Whatever lies at a place, or does not, and however a checkpoint is named: each command says what it must."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.builders import tree
from support.sweeps import mostly_slow
from torch import nn

import recckpt
import recckpt as library
from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.cli.commands import parsers
from recckpt.errors import FormatVersionError
from recckpt.format.codec import seal
from recckpt.sparse import HashTable

# {at} is the place, {good} an output dir, {new} what does not exist, {file} a file
COMMANDS = (
    "ls {at}",
    "show {at} --files",
    "head {at} t",
    "get {at} t 1",
    "verify {at}",
    "verify {at} --quick",
    "verify {at} --absent {ids}",
    "history {at} t 1",
    "diff {at} {good}",
    "diff {good} {at}",
    "sql {at} query",
    "watch {at} --once",
    "report {at} --json",
    "report {at} --out {new}",
    "consolidate {at} --out {new}",
    "repair {at}",
    "repair {at} --clean --dry-run",
    "compact {at}",
    "compact {at} latest~1 --adopt",
    "mirror {at} {new}",
    "forget {at}",
    "forget {at} --table t --ids {ids}",
    "plan --model-names {names} {bank}",
    "import {at} {new}",
    "export {at} {new} --to npy",
    "export {at} {new} --to npy --skip-damaged",
    "export {good} {new} --to npy --since {at}",
)
FILES = {  # file -> a field of it
    ".recckpt/owner/1.json": "nonce",
    ".recckpt/owner/1.list.json": "run",
    "c2/manifest.json": "names",
}
FORMS = {"newer": "needs recckpt 1.3", "older": "of an older, unreleased form"}
OF_BYTES = {"verify {at} --absent {ids}", "import {at} {new}"}  # which ask for none of these files, or refuse before
# {run} is an output dir, {name} a checkpoint of it, {new} a place for what is written
OF_CHECKPOINTS = {
    "show": "show {run}/{name} --files",
    "head": "head {run}/{name} t",
    "get": "get {run}/{name} t 2 3",
    "verify": "verify {run}/{name}",
    "verify --absent": "verify {run}/{name} --absent {ids}",
    "diff": "diff {run}/{name} {run}/c3",
    "sql": "sql {run}/{name} 'select * from t'",
    "consolidate": "consolidate {run}/{name} --out {new}",
    "compact": "compact {run} {name} --out {new}",
    "compact of a path": "compact {run}/{name} --out {new}",
    "plan": "plan --model-names {names} {bank}",
    "export": "export {run}/{name} {new} --to npy",
    "export --skip-damaged": "export {run}/{name} {new} --to npy --skip-damaged",
    "export --since": "export {run} {new} --to npy --since {name}",
    "export --since of a path": "export {run} {new} --to npy --since {run}/{name}",
}
OF_NO_CHECKPOINT = {"ls", "history", "watch", "report", "repair", "forget", "import", "mirror", "near"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """An output dir with two checkpoints, and what goes with it."""
    path, table = tmp_path_factory.mktemp("good") / "run", HashTable(2, name="t")
    table.insert(torch.arange(3), torch.ones(3, 2))
    saver = Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), None, str(path), None)
    for number in (1, 2):
        saver.save(f"c{number}", step=number)
    (path.parent / "names.txt").write_text("\n".join(saver.names()))
    (path.parent / "ids.txt").write_text("1\n")
    return path


def missing(good, at):
    return at


def empty(good, at):
    at.mkdir()
    return at


def a_file(good, at):
    at.write_text("neither here nor there")
    return at


def below_a_file(good, at):
    at.write_text("")
    return at / "c1"


def foreign(good, at):
    (at / "photos").mkdir(parents=True)
    (at / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    (at / "notes.txt").write_text("eggs")
    return at


def a_half_removed_checkpoint(good, at):
    shutil.copytree(good / "c1", at / "c1")
    (at / "c1" / "manifest.json").unlink()
    return at / "c1"


def an_output_dir_with_a_half_removed_checkpoint(good, at):
    return a_half_removed_checkpoint(good, at).parent


def a_damaged_manifest(good, at):
    shutil.copytree(good / "c1", at / "c1")
    (at / "c1" / "manifest.json").write_bytes((good / "c1" / "manifest.json").read_bytes()[:100])
    return at / "c1"


def an_output_dir_with_a_damaged_manifest(good, at):
    return a_damaged_manifest(good, at).parent


def a_manifest_that_is_a_directory(good, at):
    (at / "c1" / "manifest.json").mkdir(parents=True)
    return at / "c1"


PLACES = {
    "missing": missing,
    "empty": empty,
    "a file": a_file,
    "below a file": below_a_file,
    "foreign": foreign,
    "half removed": a_half_removed_checkpoint,
    "with one half removed": an_output_dir_with_a_half_removed_checkpoint,
    "damaged": a_damaged_manifest,
    "with one damaged": an_output_dir_with_a_damaged_manifest,
    "a directory for a manifest": a_manifest_that_is_a_directory,
    "memory": lambda good, at: "memory://nowhere/c1",
    "unreachable": lambda good, at: "sftp://127.0.0.1:1/c1",
    "unknown protocol": lambda good, at: "nosuch://bucket/c1",
    "no path": lambda good, at: "",
    "NUL": lambda good, at: "a\0b",
    "very long": lambda good, at: "x" * 5000,
}


def test_no_command_is_forgotten_here():
    any_place_is_good = {"near"}  # a host may have no near saves
    assert {line.split()[0] for line in COMMANDS} | any_place_is_good == set(parsers()[1])


@mostly_slow()
@pytest.mark.parametrize("place", PLACES)
def test_each_command_says_what_is_wrong_with_a_place(recckpt, good, tmp_path, place):
    assert not wrong_answers(recckpt, good, tmp_path, PLACES[place](good, tmp_path / "at"))


@pytest.mark.slow
def test_each_command_says_that_a_bucket_is_not_there(recckpt, good, tmp_path, s3_url):
    assert not wrong_answers(recckpt, good, tmp_path, "s3://no-such-bucket/runs")
    assert "bucket does not exist" in recckpt("ls", "s3://no-such-bucket/runs").err


def wrong_answers(recckpt, good, tmp_path, at):
    """Return the commands that do not end as they should at a place, and what they gave."""
    (tmp_path / "bank.json").write_text(json.dumps([{"path": str(at)}]))
    names = {"at": at, "good": good, "new": tmp_path / "new", "bank": tmp_path / "bank.json"}
    names |= {name: good.parent / f"{name}.txt" for name in ("names", "ids")}
    wrong = []
    for line in COMMANDS:
        words = [word.format(**names) for word in line.split()]
        try:
            done = recckpt(*["select 1" if word == "query" else word for word in words])
        except Exception as error:
            wrong.append((line, repr(error)))
            continue
        if done.code not in (1, 2) or "recckpt: " not in done.err or "Traceback" in done.err:
            wrong.append((line, done))
        new = tmp_path / "new"
        if new.exists():
            if not line.startswith(("report", "mirror")):  # whose page says what is wrong; which names its run there
                wrong.append((line, "left something behind"))
            shutil.rmtree(new) if new.is_dir() else new.unlink()
    return wrong


def test_what_is_not_there_is_told_from_what_is_empty_a_file_and_left_by_a_save(recckpt, good, tmp_path):
    said = {
        missing: "does not exist",
        empty: "found no committed checkpoint\n",
        a_file: "not a directory",
        a_half_removed_checkpoint: "this is the directory of a save that has not ended, or",
    }
    for number, (make, text) in enumerate(said.items()):
        at = make(good, tmp_path / str(number))
        for command in ("ls", "show", "verify", "compact", "forget", "report"):
            assert text in recckpt(command, at).err, command


def test_what_exists_already_is_not_written_over(recckpt, good, tmp_path):
    there = tmp_path / "there"
    there.write_text("mine")
    for line in (
        "consolidate {good} --out {there}",
        "diff {good} {good} --html {there}",
        "report {good} --out {there}",
        "export {good} {there} --to npy",
        "export {good}/c1 {there} --to npy --skip-damaged",
        "export {good} {there} --to safetensors",
    ):
        done = recckpt(*line.format(good=good, there=there).split())
        assert done.code in (1, 2), line
        assert re.search(f"{there}.* exist|exist.* {there}|exists.*{there}", done.err), done.err
        assert there.read_text() == "mine"


def test_a_place_that_may_not_be_read_is_said_in_one_line(recckpt, good, monkeypatch):
    def refuse(self, name="", *_):
        raise PermissionError(13, "Permission denied", f"{self.url}/{name}")

    for method in ("read", "open", "list_dirs", "list_files", "size"):
        monkeypatch.setattr(f"recckpt.storage.local.LocalStorage.{method}", refuse)
    for line in ("ls {}", "show {}", "verify {}", "repair {}", "compact {}", "report {} --json", "diff {0} {0}"):
        done = recckpt(*line.format(good).split())
        assert done.code in (1, 2), line
        assert "Permission denied" in done.err.splitlines()[-1], done.err


def test_a_directory_that_was_never_searched_proves_no_absence(recckpt, good, tmp_path):
    at = foreign(good, tmp_path / "at")
    answer = recckpt("verify", at, "--absent", good.parent / "ids.txt")
    assert answer == (1, "", f"recckpt: {at}: found no checkpoint\n")


def test_a_checkpoint_of_recckpt_is_no_source_of_an_import(recckpt, good, tmp_path):
    for at in (good, good / "c1", a_half_removed_checkpoint(good, tmp_path / "at")):
        answer = recckpt("import", at, tmp_path / "new")
        assert answer.code == 1
        assert "which belongs to a checkpoint of recckpt" in answer.err


def saver_of(path, **options):
    table = HashTable(2, name="t")
    table.insert(torch.arange(3), torch.ones(3, 2))
    return Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), None, str(path), None, deltas=True, **options)


def save_two(path):
    saver = saver_of(path)
    for number in (1, 2):
        saver.save(f"c{number}", step=number)
    return saver


def of_another_format(path, form, field):
    """Write a sealed file again as another recckpt would."""
    values = json.loads(path.read_text())
    key = list(values)[-1]
    del values[key]
    if form == "newer":
        values |= {"version": 9, "reader": "1.3"}
    else:
        del values[field]
    path.write_bytes(seal(values, key))


@pytest.fixture(params=[(file, form) for file in FILES for form in FORMS], ids=str)
def other(request, tmp_path):
    """An output dir with a file of another format, and what is said of that."""
    file, form = request.param
    saver = save_two(tmp_path / "at")
    (tmp_path / "names.txt").write_text("\n".join(saver.names()))
    (tmp_path / "ids.txt").write_text("1\n")
    of_another_format(tmp_path / "at" / file, form, FILES[file])
    return tmp_path / "at", FORMS[form]


@mostly_slow()
def test_each_command_says_so_and_changes_nothing(other, tmp_path, recckpt):
    at, said = other
    save_two(tmp_path / "good")
    (tmp_path / "bank.json").write_text(json.dumps([{"path": str(at)}]))
    before, wrong = tree(at), []
    for number, line in enumerate(COMMANDS):
        files = {name: tmp_path / f"{name}.txt" for name in ("names", "ids")} | {"bank": tmp_path / "bank.json"}
        names = {"at": at, "good": tmp_path / "good", "new": tmp_path / f"new{number}", **files}
        words = ["select 1" if word == "query" else word.format(**names) for word in line.split()]
        done = recckpt(*words)
        text = " ".join((done.out + done.err).split())
        is_said = line in OF_BYTES or "--since" in line or (said in text and not re.search("is damaged|^damaged", text))
        if not is_said or done.code == 0 or tree(at) != before:
            wrong.append((line, done.code, text[:300]))
    assert not wrong


CALLS = {
    "save": lambda at: saver_of(at).save("c3", step=3),
    "load": lambda at: saver_of(at).load(),
    "load of one": lambda at: saver_of(at).load(ckpt_id="c2"),
    "restore": lambda at: CheckpointManager(saver_of(at), 1).restore(),
    "load_into": lambda at: recckpt.load_into(saver_of(at).model, at),
    "CheckpointReader": lambda at: CheckpointReader(at),
    "list_checkpoints": lambda at: recckpt.list_checkpoints(at),
    "find_checkpoint": lambda at: recckpt.find_checkpoint(at, "latest"),
    "compact": lambda at: recckpt.rewrite.compact(at),
    "forget": lambda at: recckpt.rewrite.forget(at, "t", [1]),
    "diff": lambda at: recckpt.diff(at, at),
}


@mostly_slow()
def test_each_public_call_says_so_and_changes_nothing(other):
    at, said = other
    before, wrong = tree(at), []
    for name, call in CALLS.items():
        try:
            call(at)
            wrong.append((name, "went well"))
        except FormatVersionError as error:
            wrong += [] if said in str(error) else [(name, str(error))]
        except Exception as error:
            wrong.append((name, repr(error)))
        if tree(at) != before:
            wrong.append((name, "changed", tree(at).keys() ^ before.keys()))
            break
    assert not wrong


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
    assert {name.split()[0] for name in OF_CHECKPOINTS} | OF_NO_CHECKPOINT == set(parsers()[1])


def answer(recckpt, run: Path, command: str, name: str):
    """Run a command on a checkpoint of this name; whatever it writes goes."""
    new, bank = run.parent / "new", run.parent / "bank.json"
    bank.write_text(json.dumps([{"path": f"{run}/{name}"}]))
    places = {"run": run, "name": name, "new": new, "bank": bank, "names": run.parent / "names.txt"}
    words = (
        OF_CHECKPOINTS[command]
        .replace("'select * from t'", "QUERY")
        .format(ids=run.parent / "ids.txt", **places)
        .split()
    )
    done = recckpt(*["select * from t" if word == "QUERY" else word for word in words], "--json")
    written = sorted(path.name for path in new.rglob("*")) if new.is_dir() else new.exists()
    shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
    return done, written


def ours(data):
    """Return an answer without what differs from call to call."""
    return {name: value for name, value in data.items() if name not in ("bytes", "seconds")}


@mostly_slow()
@pytest.mark.parametrize("command", OF_CHECKPOINTS)
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
    with library.inspect.connect(path) as connection:
        assert connection.execute("select count(*) from t").fetchone() == (302,)
    assert library.inspect.scan(path, "t").collect().height == 302
    assert library.inspect.dataset(path, "t").count_rows() == 302
    table = HashTable(2, name="t")
    saver = Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), None, str(tmp_path))
    for how in ({"ckpt_path": path}, {"ckpt_path": str(run), "ckpt_id": "latest~1"}):
        saver.load(**how)
        assert table.embeddings().max() == 2
