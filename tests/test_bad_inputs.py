"""Bad input: each raises the named error with path, found and expected, and changes nothing at all."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.builders import Run, state_of, tree
from support.forge import Forge, empty, filled, load, save_tables
from support.forked import outcomes
from support.near_runs import NearRun
from support.sweeps import mostly_slow
from torch import nn

import recckpt
from recckpt import CheckpointManager, Near, Saver
from recckpt.convert import export_checkpoint
from recckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    LoadConfError,
    StateMismatchError,
)
from recckpt.inspect.absent import look_for
from recckpt.inspect.verify import verify
from recckpt.near.near_dir import places
from recckpt.sparse import HashTable
from recckpt.storage import open_storage

UNSAFE = "unsafe path: a symbolic link out of its directory"
SMALL = ["model.pt", "extra.pt", "io_state_0.pt", "rng_0.pt", "sparse/00000-of-00001.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An output dir with one checkpoint, ckpt_10; never written to."""
    root = tmp_path_factory.mktemp("saved")
    Run(root, interval=10).train(10)
    return root


@pytest.fixture
def output_dir(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "runs"))


@pytest.fixture
def forge(output_dir):
    return Forge(output_dir / "ckpt_10")


@pytest.fixture
def live(output_dir):
    """Another run, with state to lose, that has not restored yet."""
    run = Run(output_dir, interval=1000, seed=5)
    run.train(3)
    return run


def refused(live: Run, output_dir: Path, error=CorruptCheckpointError, restore=None, **attributes):
    """Check that restoring raises, and that no file, no tensor and no generator has changed."""
    files, state = tree(output_dir.parent), state_of(live)
    with pytest.raises(error) as caught:
        (restore or (lambda: live.manager.restore(10)))()
    assert state_of(live) == state
    assert tree(output_dir.parent) == files
    if error is CorruptCheckpointError:
        assert caught.value.path.startswith("ckpt_10/")
        assert caught.value.found
        assert caught.value.expected
    for name, value in attributes.items():
        assert getattr(caught.value, name) == value
    return caught.value


# Files that are cut, missing or changed


@mostly_slow("name")
@pytest.mark.parametrize("name", ["part", *SMALL, "manifest.json"])
@pytest.mark.parametrize("harm", ["empty", "one byte", "half", "trailing", "zeros", "text", "missing"])
def test_a_file_that_is_not_whole_is_corrupt(live, output_dir, forge, name, harm):
    path = forge.path(forge.parts[0] if name == "part" else name)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "one byte": data[:-1],
            "half": data[: len(data) // 2],
            "trailing": data + b"garbage",
            "zeros": bytes(len(data)),
            "text": b"hello"[: len(data)],
            "missing": b"",
        }[harm]
    )
    expected = CorruptCheckpointError
    if harm == "missing":
        path.unlink()
        expected = CheckpointNotFoundError if name == "manifest.json" else CorruptCheckpointError
    refused(live, output_dir, expected)


def test_files_that_nobody_lists_are_ignored(live, output_dir, forge):
    for name in ("sparse/00000-of-00001.g9.00.arrow", "sparse/00001-of-00002.json", "notes.txt", "model.pt.bak"):
        forge.path(name).write_bytes(b"garbage")
    (output_dir / "README").write_text("x")
    (output_dir / "empty").mkdir()
    assert live.manager.restore(10) == live.manager.restore() == 10


# Catalogs


@pytest.fixture
def four_shards(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, *([filled("t", range(n, 400, 4))] for n in range(4)))
    assert load(storage, [empty("t")]) == 400
    return storage


def corrupt(storage, **options):
    table = filled("t", [1, 999])
    with pytest.raises(CorruptCheckpointError) as caught:
        load(storage, [table], **options)
    assert sorted(table.ids().tolist()) == [1, 999]
    return caught.value


def catalog_name(shard, shards=4):
    return f"sparse/{shard:05d}-of-{shards:05d}.json"


OTHER = {"where": "save_id, shard, shards"}


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda forge: forge.path(catalog_name(2)).unlink(), {"path": f"ckpt_1/{catalog_name(2)}"}),
        (lambda forge: forge.edit_manifest(lambda values: values["shards"].pop()), {}),
        (lambda forge: forge.write(catalog_name(3), forge.path(catalog_name(2)).read_bytes()), OTHER),
        (lambda forge: forge.edit_catalog(lambda values: values.update(shard=5), shard=3), OTHER),
        (lambda forge: forge.edit_catalog(lambda values: values.update(save_id="0" * 32)), OTHER),
    ],
    ids=["missing", "left out", "twice", "5 of 4", "of another save"],
)
def test_catalogs_that_are_not_those_of_the_four_shards_are_corrupt(four_shards, harm, found):
    harm(Forge(f"{four_shards.url}/ckpt_1"))
    error = corrupt(four_shards)
    assert {name: getattr(error, name) for name in found} == found


def test_a_part_that_is_listed_twice_is_corrupt(four_shards):
    forge = Forge(f"{four_shards.url}/ckpt_1")
    forge.edit_catalog(lambda values: values["parts"].append(values["parts"][0]))
    corrupt(four_shards)
    forge.edit_manifest(lambda values: values["tables"][0].update(rows=500))
    assert "twice" in corrupt(four_shards).found


def test_batches_that_are_left_out_in_another_order_or_larger_than_any_file_are_corrupt(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(400))], concurrency=1, batch_bytes=1000)
    forge = Forge(f"{storage.url}/ckpt_1")
    batches = json.loads(forge.path(catalog_name(0, 1)).read_bytes())["parts"][0]["batches"]
    huge = [{**batches[0], "rows": 10**15}, *batches[1:]]
    for order in (batches[:-1], batches[::-1], [*batches, batches[0]], huge):
        forge.edit_catalog(lambda values, order=order: values["parts"][0].update(batches=order))
        total = sum(batch["rows"] for batch in order)
        forge.edit_manifest(lambda values, total=total: values["tables"][0].update(rows=total))
        error = corrupt(storage)
    assert error.where == "parts[0].batches"  # of what would make no room


def test_a_catalog_that_is_larger_than_any_may_be_is_not_read(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(5))])
    forge, size = Forge(f"{storage.url}/ckpt_1"), 3 << 30
    os.truncate(forge.path(catalog_name(0, 1)), size)  # takes no room on the disk
    forge.edit_manifest(lambda values: [f.update(bytes=size) for f in values["files"] if f["name"].endswith(".json")])

    def read(look):
        try:
            return look() or "nothing"
        except CorruptCheckpointError as error:
            return f"{error.where} {error.found}"

    def skipped():
        return export_checkpoint(forge.directory, tmp_path / "t", to="npy", skip_damaged=True).skipped[0].reason

    mapped = outcomes(read, [lambda: load(storage, [empty("t")])], more_bytes=size * 3 // 2)  # but not read
    found = outcomes(read, [lambda: verify(str(forge.directory))[0].found], more_bytes=size * 3 // 4)
    assert mapped + found == [f"its size {size} bytes", f"{size} bytes"]
    assert outcomes(read, [skipped], more_bytes=size * 3 // 4) == [
        f"its size: found {size} bytes, expected at most {1 << 30}: its rows cannot be checked"
    ]


# The manifest


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe\0", b'{"format": NaN}', b"\x1f\x8b", b"{" * 10_000, b'{"a": 1, "a": 2}'],
)
def test_a_manifest_that_is_no_manifest_is_corrupt(live, output_dir, forge, data):
    forge.path("manifest.json").write_bytes(data)
    error = refused(live, output_dir)
    assert error.path == "ckpt_10/manifest.json"


def edit_table(values, **changes):
    values["tables"][0].update(changes)


def impossible(edit):
    return edit, CorruptCheckpointError, ""


@mostly_slow()
@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        impossible(lambda v: edit_table(v, rows=-1)),
        impossible(lambda v: edit_table(v, rows=2**62)),
        impossible(lambda v: v["files"][0].update(bytes=-1)),
        impossible(lambda v: v["files"][0].update(bytes=2**62)),
        impossible(lambda v: v["tables"][0]["slots"][0].update(shape=[0])),
        impossible(lambda v: v["tables"][0]["slots"][0].update(shape=[2**31, 2**31])),
        impossible(lambda v: v["tables"][0]["slots"][0].update(dtype="complex64")),
        impossible(lambda v: v.update(tables=v["tables"] * 2)),
        impossible(lambda v: v.update(shards=[])),
        impossible(lambda v: v.update(files=[])),
        impossible(lambda v: v.update(ckpt_id=5)),
        impossible(lambda v: v.update(step="10")),
        (lambda v: v.update(version=99), FormatVersionError, "99"),
        (lambda v: v.pop("tables"), FormatVersionError, "older, unreleased form"),
        (lambda v: v.update(checksum="md5"), CorruptCheckpointError, "'md5'"),
    ],
)
def test_a_manifest_of_impossible_or_unknown_values_is_refused(live, output_dir, forge, edit, error, said):
    forge.edit_manifest(edit)
    assert said in str(refused(live, output_dir, error))


# Names


NAMES = ["../secret", "/etc/hostname", "a/../../secret", "http://h/x", "sparse//x", "..\\secret", "file::x"]


@mostly_slow("place")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["files", "shards", "parts"])
def test_a_name_that_leads_out_is_refused_and_never_opened(live, output_dir, forge, monkeypatch, name, place):
    (output_dir.parent / "secret").write_text("secret")
    (output_dir / "secret").write_text("secret")
    if place == "files":
        forge.edit_manifest(lambda values: values["files"][0].update(name=name))
    elif place == "shards":
        forge.edit_manifest(lambda values: values["shards"][0].update(catalog=name))
    else:
        forge.edit_catalog(lambda values: values["parts"][0].update(file=name))
    opened = []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **kwargs: (opened.append(self), real(self, *args, **kwargs))[1]
    )
    with pytest.raises(CorruptCheckpointError, match="unsafe path"):
        live.manager.restore(10)
    assert all(path.is_relative_to(output_dir) and path.name != "secret" for path in opened)


@mostly_slow()
@pytest.mark.parametrize("name", ["part", *SMALL, "manifest.json"])
def test_a_link_that_leaves_the_checkpoint_is_not_followed_though_the_bytes_are_right(live, output_dir, forge, name):
    path = forge.path(forge.parts[0] if name == "part" else name)
    for outside in (output_dir.parent / "outside", output_dir / "outside"):
        path.rename(outside)
        path.symlink_to(outside)
        error = refused(live, output_dir)
        assert (error.path, error.found) == (f"ckpt_10/{path.relative_to(forge.directory)}", UNSAFE)
        assert verify(str(output_dir))[0].found == verify(str(forge.directory), deep=False)[0].found == UNSAFE
        path.unlink()
        outside.rename(path)
    assert live.manager.restore(10) == 10


@pytest.mark.parametrize("target", ["/nowhere", "../../nowhere", "../ckpt_5/model.pt", "model.pt", "../../sparse"])
def test_a_link_that_leads_out_or_nowhere_is_unsafe_whether_its_target_is_there_or_not(live, output_dir, forge, target):
    path = forge.path("sparse" if target.endswith("sparse") else "model.pt")
    path.rename(output_dir.parent / path.name)
    path.symlink_to(target)
    assert refused(live, output_dir).found == UNSAFE


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_not_opened(live, output_dir, forge, make):
    """To open a pipe would take for ever."""
    for name in ("model.pt", "manifest.json"):
        path = forge.path(name)
        data = path.read_bytes()
        path.unlink()
        make(path)
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError)):
            live.manager.restore(10)
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(data)
    assert live.manager.restore(10) == 10


@pytest.mark.parametrize(
    "name",
    ["a/b/../c", "line\nbreak", "x" * 300, ".", "..", "-rf", "täglich…", "a%2Fb", "{}", "a@b", "../../etc/passwd"],
)
def test_any_table_name_is_saved_and_restored(tmp_path, name):
    table, twin = HashTable(2, name=name), HashTable(2, name=name)
    table.insert(torch.arange(3), torch.ones(3, 2))
    Saver(nn.ModuleList([table]), output_dir=str(tmp_path / "runs")).save("ckpt_1")
    Saver(nn.ModuleList([twin]), output_dir=str(tmp_path / "runs")).load()
    assert torch.equal(twin.embeddings(), table.embeddings())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 1025])
def test_a_table_name_that_cannot_be_is_refused_when_the_table_is_made(name):
    with pytest.raises(ValueError, match="table name"):
        HashTable(2, name=name)


class Two(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("item", lambda: HashTable(2, name="item"), r"'one\.item' and 'other\.item'"),
        ("other.weight", lambda: nn.Linear(2, 2), r"'other\.weight'.*'one\.other\.weight'"),
    ],
)
def test_two_things_of_one_name_are_refused_when_the_saver_is_made(tmp_path, name, other, said):
    with pytest.raises(ValueError, match=said):
        Saver(Two(HashTable(2, name=name), other()), output_dir=str(tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


# .pt files


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@mostly_slow()
@pytest.mark.parametrize("name", [name for name in SMALL if name.endswith(".pt")])
@pytest.mark.parametrize("deep", [False, True])
def test_a_pickle_that_calls_a_function_is_refused_and_nothing_runs(live, output_dir, forge, tmp_path, name, deep):
    marker = tmp_path / "ran"
    rest = torch.zeros(4096)  # so that the file has the places of which the index speaks
    forge.save(name, {"torch": [Evil(marker)], "rest": rest} if deep else (Evil(marker), rest))
    error = refused(live, output_dir)
    assert "posix.system" in error.found
    assert "will likely succeed" not in str(error), "torch's advice to run it all the same"
    assert not marker.exists()


@mostly_slow("name")
@pytest.mark.parametrize("name", [name for name in SMALL if name.endswith(".pt")])
@pytest.mark.parametrize("data", [b"", b"hello world\n" * 10, b"PK\x03\x04", b"\x80\x02.", b"\x80\x02N."])
def test_a_file_that_is_no_torch_file_is_corrupt(live, output_dir, forge, name, data):
    forge.write(name, data)
    error = refused(live, output_dir)
    assert error.path in (f"ckpt_10/{name}", "ckpt_10/dense/00000-of-00001.json")  # which lists places in model.pt
    assert f"ckpt_10/{name}" in {problem.file for problem in verify(str(output_dir))}


STATES = {
    "rng_0.pt": [
        *({key: None} for key in ("torch", "cuda", "numpy", "python")),
        {"torch": 3},
        {"torch": torch.zeros(10, dtype=torch.uint8)},
        {"torch": torch.zeros(5056)},
        {"cuda": 3},
        {"cuda": ["x"]},
        {"cuda": [torch.zeros(16)]},
        {"numpy": []},
        {"numpy": ["MT19937", 5, 0, 0, 0.0]},
        {"numpy": ["MT19937", torch.zeros(3, dtype=torch.int64), 0, 0, 0.0]},
        {"python": (3, (1, 2), None)},
        {"python": "x"},
    ],
    "extra.pt": [
        {"sparse_optim": None},
        {"dense_optim": None},
        *({"sparse_optim": state} for state in (5, [], {"state": 5}, {"param_groups": {}}, {"param_groups": [1]})),
        {"sparse_optim": {"state": {}, "param_groups": [{"tables": 5}]}},
        {"sparse_optim": {"state": {}, "param_groups": [{"tables": [["item"]]}]}},
    ],
    "io_state_0.pt": [{"stream": None}],
}


@mostly_slow()
@pytest.mark.parametrize(("name", "change"), [(name, change) for name in STATES for change in STATES[name]], ids=str)
def test_a_state_of_another_kind_is_corrupt_though_its_checksum_is_right(live, output_dir, forge, name, change):
    """None stands for a key that is left out."""
    state = torch.load(forge.path(name), weights_only=True)
    forge.save(name, {key: value for key, value in {**state, **change}.items() if value is not None})
    refused(live, output_dir)


@pytest.mark.parametrize(
    ("name", "key", "state"),
    [
        ("extra.pt", "sparse_optim", {"state": {"item": {"step": "x"}}, "param_groups": []}),
        ("extra.pt", "sparse_optim", {"state": {"item": 5}, "param_groups": []}),
        ("extra.pt", "dense_optim", 5),
        ("extra.pt", "dense_optim", {"state": {}}),
        ("io_state_0.pt", "stream", 5),
        ("io_state_0.pt", "stream", {"place": 5}),
    ],
    ids=str,
)
def test_a_state_that_its_object_refuses_is_named(live, output_dir, forge, name, key, state):
    found = torch.load(forge.path(name), weights_only=True)
    if key == "sparse_optim":
        state = {**found[key], **state}
    forge.save(name, {**found, key: state})
    error = refused(live, output_dir, (StateMismatchError, CorruptCheckpointError))
    assert key.replace("_", " ").removesuffix(" optim") in str(error).replace("_", " ")


def test_tensors_that_do_not_fit_are_named_all_at_once(live, output_dir, forge):
    state = torch.load(forge.path("model.pt"), weights_only=True)
    del state["top.bias"]
    state |= {"top.weight": torch.ones(3), "norm.weight": state["norm.weight"].double(), "new": torch.ones(1)}
    forge.save_model(state)
    error = refused(live, output_dir, StateMismatchError)
    assert (error.missing, error.unexpected) == (["top.bias"], ["new"])
    assert sorted(error.mismatched) == ["norm.weight", "top.weight"]


@pytest.mark.parametrize("value", [Evil("x"), np.array(["a"]), lambda: 1])
def test_a_state_that_could_not_be_loaded_back_is_refused_when_it_is_saved(tmp_path, value):
    class Scheduler:
        def state_dict(self):
            return {"deep": [value]}

        def load_state_dict(self, state): ...

    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    saver.register_for_checkpointing("scheduler", Scheduler())
    with pytest.raises(ValueError, match=r"'scheduler'\['deep'\]\[0\]"):
        saver.save("ckpt_1")
    assert list(tmp_path.iterdir()) == []


# The notes of hosts with near saves


@mostly_slow()
@pytest.mark.parametrize("harm", ["empty", "half", "a flip", "zeros", "json", "a list", "newer"])
@pytest.mark.parametrize("by", ["a tool", "the run"])
def test_a_damaged_note_of_a_host_keeps_no_id_and_is_in_the_way_of_nothing(tmp_path, caplog, harm, by):
    run = NearRun(tmp_path).put(_1=1.0, _2=2.0).step().put(_1=1.5).step()
    [note] = (tmp_path / "runs/.recckpt/near").iterdir()
    data = note.read_bytes()
    flip = bytes([*data[:40], data[40] ^ 1, *data[41:]])
    texts = {"empty": b"", "half": data[: len(data) // 2], "a flip": flip, "zeros": bytes(len(data))}
    texts |= {"json": b"{}", "a list": b"[]", "newer": data.replace(b'"version": 1', b'"version": 2')}
    assert texts[harm] != data
    note.write_bytes(texts[harm])
    if by == "a tool":
        [done] = recckpt.rewrite.forget(tmp_path / "runs", "t", [1])
        assert done.n_rows == {"ckpt_1": 1}
        [host] = done.near_hosts
        assert (host.host, host.name, host.path) == (note.stem, "", "")
        assert f".recckpt/near/{note.name}" in host.damage
        assert look_for(str(tmp_path / "runs"), np.array([1]), "t").holding == ()
        return
    run.manager.forget("t", [1])
    assert f".recckpt/near/{note.name}" not in caplog.text, "the saver knows what it has noted, and notes it again"
    run.put(_2=2.5).save().put(_2=3.0).step()
    assert run.counts == (2, 0, 0)
    note.write_bytes(b"")
    assert NearRun(tmp_path).restore().put(_3=1.0).step().counts == (1, 0, 0)
    [place] = places(Near(run.near_path))
    note.write_bytes(b"")
    assert len(place.clear()) == 2


# Arguments


@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True, float("nan")])
def test_a_number_that_is_none_is_refused_at_construction(tmp_path, value):
    model = nn.Linear(1, 1)
    for name in ("max_keep", "concurrency"):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, found {value!r}"):
            Saver(model, output_dir=str(tmp_path / "runs"), **{name: value})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="save_interval"):
        CheckpointManager(Saver(model, output_dir=str(tmp_path / "runs")), value)


@pytest.mark.parametrize(
    "conf",
    [
        {"exclude": "sparse"},
        {"load": "dense"},
        {"load": ["danse"]},
        {"lod": ["dense"]},
        {"exlude": []},
        {"load": [5]},
        {"exclude": {"a": 1}},
        {"strict": "no"},
        ["dense"],
        "dense",
    ],
)
def test_a_load_conf_that_means_nothing_is_refused(live, output_dir, conf):
    refused(live, output_dir, LoadConfError, lambda: live.manager.restore(10, load_conf=conf))
    error = refused(live, output_dir, LoadConfError, lambda: live.saver.load(load_conf=conf))
    assert "exlude" not in conf or "'exclude'" in str(error)
    bank = [{"path": str(output_dir)}, {"path": str(output_dir), **conf} if isinstance(conf, dict) else conf]
    refused(live, output_dir, LoadConfError, lambda: live.manager.load_model_bank(bank))


@mostly_slow()
@pytest.mark.parametrize("bank", [{"path": "x"}, "x", [{}], [{"path": ""}], [{"path": 5}], [None]])
def test_a_model_bank_that_is_none_is_refused(live, output_dir, bank):
    refused(live, output_dir, LoadConfError, lambda: live.manager.load_model_bank(bank))


def test_a_bank_with_one_path_to_nothing_loads_nothing_at_all(live, output_dir):
    bank = [{"path": str(output_dir)}, {"path": str(output_dir.parent / "nothing")}]
    refused(live, output_dir, CheckpointNotFoundError, lambda: live.saver.load_by_config(bank))
    fresh = Run(output_dir.parent / "other", seed=5).train(3)
    refused(fresh, output_dir, CheckpointNotFoundError, lambda: fresh.manager.load_model_bank(bank))


def test_an_output_dir_that_is_none_a_file_or_not_to_be_written_is_refused_at_construction(tmp_path, monkeypatch):
    for url in ("", "nosuch://bucket/x", None, 3):
        with pytest.raises(ValueError, match=r"output dir|nosuch"):
            Saver(nn.Linear(1, 1), output_dir=url)
    path = tmp_path / "file"
    path.write_text("mine")
    for output_dir in (path, path / "below"):
        with pytest.raises(OSError, match="file"):
            Saver(nn.Linear(1, 1), output_dir=str(output_dir))
    assert tree(tmp_path) == {"file": b"mine"}
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        Saver(nn.Linear(1, 1), output_dir=str(tmp_path))


# Nothing there, and the same thing elsewhere


def test_restoring_where_nothing_is_gives_0_and_says_so(tmp_path, caplog):
    run = Run(tmp_path / "runs")
    before = state_of(run)
    with caplog.at_level(logging.INFO, "recckpt"):
        assert run.manager.restore() == 0
    assert "no checkpoint to restore" in caplog.text
    assert state_of(run) == before
    for call in (lambda: run.manager.restore(required=True), lambda: run.manager.restore(7), run.saver.load):
        with pytest.raises(CheckpointNotFoundError):
            call()


@mostly_slow()
@pytest.mark.parametrize("index", [b"", b"ckpt_1", b"ckpt_99\n", b"\xff\0\n", b"../x\n" * 1000])
def test_the_index_file_is_never_believed_and_rebuilt(output_dir, index):
    (output_dir / "checkpoint").write_bytes(index)
    run = Run(output_dir, interval=5, max_keep=None)
    assert run.manager.restore() == 10
    run.train(5)
    assert (output_dir / "checkpoint").read_text() == "ckpt_10\nckpt_15\n"


def test_a_checkpoint_that_was_copied_loads_wherever_it_lies(output_dir, tmp_path, live):
    copy = Path(shutil.copytree(output_dir / "ckpt_10", tmp_path / "other" / "renamed", copy_function=shutil.copy))
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    shutil.rmtree(output_dir / "ckpt_10")
    live.saver.load(str(copy), direct_path=True)
    live.saver.load(str(tmp_path / "other"), "ckpt_10")
    report = live.saver.load(str(tmp_path / "other"))
    assert report.sources == (str(tmp_path / "other" / "renamed"),)
    assert live.manager.global_step == 3, "the step of another run is not taken unless it is asked for"
    assert live.saver.load(str(tmp_path / "other"), load_conf={"load": ["*", "global_step"]}).global_step == 10


def test_memory_stores_hold_the_same(memory_url):
    run = Run(memory_url, interval=5, max_keep=2).train(17)
    twin = Run(memory_url, seed=3)
    assert twin.manager.restore() == 15
    assert verify(memory_url) == []
    names = run.saver.storage.list_files("ckpt_15")
    run.saver.storage.remove(f"ckpt_15/{names[-1]}")
    with pytest.raises(CorruptCheckpointError):
        twin.manager.restore(15)
    assert twin.manager.restore() == 10
