"""Whatever lies at a place, or does not: each command ends with 1 or 2 and says why, and never with a traceback."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.cli.commands import parsers
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
    "first {at}",
    "diff {at} {good}",
    "diff {good} {at}",
    "sql {at} query",
    "watch {at} --once",
    "report {at} --json",
    "report {at} --out {new}",
    "salvage {at} t --out {new}",
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
    "export {good} {new} --to npy --since {at}",
)


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
        "salvage {good}/c1 t --out {there}",
        "consolidate {good} --out {there}",
        "diff {good} {good} --html {there}",
        "report {good} --out {there}",
        "export {good} {there} --to npy",
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
        assert "which is of a checkpoint of recckpt" in answer.err
