"""What both kinds of checkpointers promise."""

import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpointing import everything, frozen, save
from support.sweeps import mostly_slow
from support.writer_hooks import Failing, Noting, notes

from recckpt.checkpointer import (
    Checkpointer,
    CheckpointWriter,
    PartlyCommittedError,
    RankInfo,
    StateReader,
    SyncCheckpointer,
    WriterHook,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from recckpt.errors import CheckpointNotFoundError, SaveFailedError, StateMismatchError


@pytest.fixture(scope="module")
def made():
    """One of each kind for all tests: none of them may leave anything to the next."""
    checkpointers = {"sync": make_sync_checkpointer(), "async": make_async_checkpointer()}
    yield checkpointers
    for checkpointer in checkpointers.values():
        checkpointer.close()


@pytest.fixture
def checkpointer(made, kind):
    return made[kind]


def files(path):
    return sorted(found.name for found in path.iterdir()) if path.exists() else []


def test_all_kinds_of_things_come_back_as_they_were_and_torch_reads_them_too(checkpointer, tmp_path):
    state = everything()
    save(checkpointer, state, tmp_path / "c")
    CheckpointWriter(RankInfo(0, 1)).write(tmp_path / "same", state)
    one, other = ((tmp_path / name / "checkpoint_0.pt").read_bytes() for name in ("c", "same"))
    assert one == other, "all kinds write the same bytes"
    loaded = checkpointer.load(tmp_path / "c")
    assert frozen(loaded) == frozen(state)
    assert files(tmp_path / "c") == ["checkpoint_0.pt"]
    for options in ({}, {"mmap": True}):
        by_torch = torch.load(tmp_path / "c" / "checkpoint_0.pt", weights_only=True, **options)
        assert frozen(by_torch) == frozen(state)


def test_a_file_of_torch_is_loaded_as_torch_loads_it(checkpointer, tmp_path):
    state = everything()
    del state["numpy"], state["plain"][7]  # torch's safe loader refuses numpy, and its own empty bytes
    del state["conjugate"]  # a view that is kept as such
    torch.save(state, tmp_path / "checkpoint_0.pt")
    assert frozen(checkpointer.load(tmp_path)) == frozen(torch.load(tmp_path / "checkpoint_0.pt", weights_only=True))


def test_tensors_that_share_memory_are_stored_once_and_of_a_large_one_only_the_part_in_the_state(
    checkpointer, tmp_path
):
    base = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    save(checkpointer, {"all": base, "tied": base, "row": base[3], "same": [base.view(-1)]}, tmp_path)
    assert (tmp_path / "checkpoint_0.pt").stat().st_size < 410_000
    loaded = checkpointer.load(tmp_path)
    loaded["all"][3] = -1
    assert loaded["row"].eq(-1).all()
    assert loaded["same"][0][3000:4000].eq(-1).all()
    assert torch.equal(loaded["tied"], loaded["all"])
    parts = {"rows": base[10:12], "column": base[:, 7], "far": base[95:]}
    save(checkpointer, parts, tmp_path)
    assert (tmp_path / "checkpoint_0.pt").stat().st_size < 40_000
    assert frozen(checkpointer.load(tmp_path)) == frozen(parts)


@mostly_slow()
@pytest.mark.parametrize("given", [str, Path, lambda path: f"file://{path}"], ids=["str", "Path", "URL"])
def test_a_path_may_be_given_in_any_form_and_hooks_see_it_absolute(make, kind, tmp_path, given):
    checkpointer = make(kind, commit_hook=Noting(tmp_path))
    save(checkpointer, {"a": 1}, given(tmp_path / "deep" / "er"))
    assert checkpointer.load(given(tmp_path / "deep" / "er")) == {"a": 1}
    assert {path for _, path, _, _ in notes(tmp_path)} == {str(tmp_path / "deep" / "er")}


def test_a_relative_path_is_the_callers_and_one_that_cannot_be_written_to_fails_the_save_and_not_the_next(
    make, kind, tmp_path, monkeypatch
):
    checkpointer = make(kind)
    monkeypatch.chdir(tmp_path)  # after the writer process was spawned elsewhere
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailedError) as caught:
        save(checkpointer, {"a": 1}, tmp_path / "file" / "c")
    assert isinstance(caught.value.__cause__, NotADirectoryError | FileExistsError)
    save(checkpointer, {"a": 1}, "c")
    assert files(tmp_path / "c") == ["checkpoint_0.pt"]
    assert checkpointer.load(tmp_path / "c") == {"a": 1}


def test_a_hook_is_called_before_and_after_the_commit_with_what_save_was_given(make, kind, tmp_path):
    path = tmp_path / "c"
    checkpointer = make(kind, commit_hook=Noting(tmp_path))
    save(checkpointer, {"a": 1}, path, step=7, tags=["x"])
    (when, at, before, kwargs), after = notes(tmp_path)
    assert (when, at, kwargs) == ("pre", str(path), {"step": 7, "tags": ["x"]})
    assert [name.endswith(".tmp") for name in before] == [True]
    assert after == ["post", str(path), ["checkpoint_0.pt"], kwargs]


@mostly_slow()
@pytest.mark.parametrize(
    ("when", "kept", "kind_of_error", "match"),
    [
        ("pre", {"a": 1}, SaveFailedError, "failed on rank 0: LookupError: not today; nothing was comm"),
        ("post", {"a": 2}, PartlyCommittedError, "failed while or after putting its file in place"),
    ],
)
def test_a_hook_that_fails_before_the_commit_drops_the_save_and_after_it_leaves_the_file(
    make, kind, tmp_path, when, kept, kind_of_error, match
):
    checkpointer = make(kind, commit_hook=Failing())
    save(checkpointer, {"a": 1}, tmp_path)
    with pytest.raises(SaveFailedError, match=match) as caught:
        save(checkpointer, {"a": 2}, tmp_path, fail=when)
    assert type(caught.value) is kind_of_error
    assert (caught.value.rank, type(caught.value.__cause__)) == (0, LookupError)
    assert checkpointer.load(tmp_path) == kept
    assert files(tmp_path) == ["checkpoint_0.pt"]
    save(checkpointer, {"a": 3}, tmp_path)
    assert checkpointer.load(tmp_path) == {"a": 3}


def nested(depth):
    """Return a state of so many containers in each other."""
    state = {"a": 1}
    for level in range(depth - 1):
        state = [state] if level % 2 and level < depth - 2 else {"a": state}
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([1], TypeError, "a state dict is a dict or OrderedDict, found a list"),
        ({"a": {"b": [object()]}}, ValueError, r"a\.b\[0\]: a builtins.object cannot be loaded back"),
        ({"a": torch.ones(2).to_sparse()}, ValueError, "a: a Tensor of layout torch.sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, ValueError, "a: .* on meta cannot be saved"),
        ({"a": {torch.ones(2)}}, ValueError, "a: a tensor in a set"),
        ({"a": {frozenset(): 1}}, ValueError, "a key of type frozenset"),
        (nested(102), ValueError, "it contains itself, or is nested deeper than 100"),
    ],
)
def test_what_cannot_be_loaded_back_is_refused_before_anything_is_written(
    checkpointer, tmp_path, state, error, message
):
    with pytest.raises(error, match=message):
        checkpointer.save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    save(checkpointer, {"a": 1}, tmp_path / "c")


def test_a_later_save_takes_the_place_of_an_earlier_one_and_the_deepest_state_is_loaded_too(checkpointer, tmp_path):
    save(checkpointer, {"w": torch.ones(1000)}, tmp_path)
    for state in ({"w": torch.zeros(2), "v": 1}, {}, nested(100)):
        save(checkpointer, state, tmp_path)
        assert frozen(checkpointer.load(tmp_path)) == frozen(state)
    assert checkpointer.load(tmp_path, {"a": None}) == state
    assert files(tmp_path) == ["checkpoint_0.pt"]


def test_a_file_that_is_not_there_and_arguments_in_the_wrong_order_are_named(checkpointer, tmp_path):
    with pytest.raises(TypeError, match="found a dict; pass the state first and then the path"):
        checkpointer.save(str(tmp_path), {"a": 1})
    with pytest.raises(TypeError, match="path is a directory or URL, found a int"):
        checkpointer.load(3)
    with pytest.raises(FileNotFoundError, match="no such file; there is nothing at all"):
        checkpointer.load(tmp_path / "c")
    (tmp_path / "checkpoint_1.pt").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"found checkpoint_1\.pt\. Load a state with as many ranks"):
        checkpointer.load(tmp_path)


def test_a_template_is_filled_in_place_and_given_back(checkpointer, tmp_path):
    save(checkpointer, everything(), tmp_path)
    weight, array = torch.zeros(3, 4, requires_grad=True), np.zeros((2, 3), np.int16)
    template = {"model": {"0.weight": weight}, "numpy": {"array": array}, "plain": None, "shapes": None}
    template["optim"] = {"state": {0: {"step": torch.tensor(0.0)}}}
    assert checkpointer.load(tmp_path, template, strict=True) is template
    whole = checkpointer.load(tmp_path)
    assert template["model"]["0.weight"] is weight
    assert weight.requires_grad
    assert template["numpy"]["array"] is array
    assert frozen(weight) == frozen(whole["model"]["0.weight"])
    assert array.tolist() == whole["numpy"]["array"].tolist()
    assert frozen(template["plain"]) == frozen(whole["plain"])
    assert frozen(template["shapes"]) == frozen(whole["shapes"])
    assert list(template) == ["model", "numpy", "plain", "shapes", "optim"]
    assert list(template["optim"]["state"][0]) == ["step"]


def test_missing_keys_stay_as_they_are_or_are_named_where_that_is_asked(checkpointer, tmp_path, caplog):
    save(checkpointer, {"a": {"b": torch.ones(2)}, "l": [{"x": 1}]}, tmp_path)
    kept = torch.full((2,), 5.0)

    def template():
        return {"a": {"b": torch.zeros(2), "c": kept}, "d": None, "l": [{"y": 2, 3: 4}]}

    loaded = checkpointer.load(tmp_path, template())
    assert (loaded["a"]["c"] is kept, loaded["d"], loaded["l"]) == (True, None, [{"y": 2, 3: 4}])
    assert "4 keys are missing and stay unchanged: a.c, d, l[0].y, l[0].3" in caplog.text
    refused = template()
    with pytest.raises(StateMismatchError, match="pass strict=False") as caught:
        checkpointer.load(tmp_path, refused, strict=True)
    assert caught.value.missing == ["a.c", "d", "l[0].y", "l[0].3"]
    assert refused["a"]["b"].eq(0).all()


def test_what_another_reader_calls_missing_is_refused_where_that_is_asked(tmp_path):
    class Lenient(StateReader):
        def read(self, path, state_dict=None, *, map_location=None, strict=False):
            return state_dict, ["a.c"]

    checkpointer = SyncCheckpointer(CheckpointWriter(RankInfo(0, 1)), Lenient(RankInfo(0, 1)))
    assert checkpointer.load(tmp_path, {"a": 1}) == {"a": 1}
    with pytest.raises(StateMismatchError, match="pass strict=False") as caught:
        checkpointer.load(tmp_path, {"a": 1}, strict=True)
    assert caught.value.missing == ["a.c"]


def test_each_save_and_each_load_that_ends_well_is_one_line_of_the_log(checkpointer, tmp_path, caplog):
    caplog.set_level("INFO", "recckpt")
    save(checkpointer, {"a": 1}, tmp_path / "c\n")
    checkpointer.load(tmp_path / "c\n")
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailedError):
        save(checkpointer, {"a": 1}, tmp_path / "file")
    with pytest.raises(CheckpointNotFoundError):
        checkpointer.load(tmp_path / "none")
    lines = [record.message.rpartition(" in ")[0] for record in caplog.records]
    assert lines == [f'saved "{tmp_path}/c\\n"', f'loaded "{tmp_path}/c\\n"']


MISFITS = {
    "size": (torch.zeros(3), "float32 (2,)", "float32 (3,)"),
    "shape": (torch.zeros(2, 1), "float32 (2,)", "float32 (2, 1)"),
    "dtype": (torch.zeros(2, dtype=torch.float64), "float32 (2,)", "float64 (2,)"),
    "number": (1.0, "float32 (2,)", "a value of type float"),
    "dict": ({"x": None}, "float32 (2,)", "a dict"),
    "meta": (
        torch.zeros(2, device="meta"),
        "float32 (2,)",
        "a Tensor of layout torch.strided on meta, not to be filled",
    ),
    "expanded": (torch.zeros(1).expand(2), "float32 (2,)", "float32 (2,), expanded, so not to be filled"),
    "text array": (np.array(["a"]), "float32 (2,)", "a numpy array of <U1, not to be filled"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named_before_anything_is_changed(checkpointer, tmp_path, misfit):
    expected, *words = MISFITS[misfit]
    save(checkpointer, {"first": torch.ones(2), "n": {"t": torch.ones(2)}, "i": 1, "l": [1, 2], "z": None}, tmp_path)
    first = torch.zeros(2)
    template = {"first": first, "n": {"t": expected}, "i": 2.0, "l": [1], "z": 3, "gone": None}
    with pytest.raises(StateMismatchError) as caught:
        checkpointer.load(tmp_path, template)
    assert caught.value.mismatched == {
        "n.t": tuple(words),
        "i": ("a value of type int", "a value of type float"),
        "l": ("a list of 2", "a list of 1"),
        "z": ("a value of type NoneType", "a value of type int"),
    }
    assert caught.value.missing == ["gone"]
    assert first.eq(0).all()
    assert isinstance(caught.value, ValueError)


def test_tensors_are_filled_whatever_their_layout_in_memory(checkpointer, tmp_path):
    values = torch.arange(24.0).reshape(4, 6)
    save(checkpointer, {name: values + i for i, name in enumerate("abcd")} | {"t": values.t()}, tmp_path)
    base = torch.zeros(8, 12)
    template = {"a": torch.zeros(6, 4).t(), "b": base[::2, 6:], "c": torch.zeros(4, 6), "t": torch.zeros(6, 4)}
    template["d"] = torch.zeros(4, 6, dtype=torch.complex64).conj().imag
    checkpointer.load(tmp_path, template, strict=True)
    for i, name in enumerate("abcd"):
        assert torch.equal(template[name], values + i)
    assert torch.equal(template["t"], values.t())
    assert base.sum() == (values + 1).sum()


def test_new_tensors_go_where_the_map_says(checkpointer, tmp_path):
    save(checkpointer, {"a": torch.ones(2), "b": [torch.ones(3)]}, tmp_path)
    asked = []

    def ask(storage, location):
        asked.append((storage.nbytes(), location))

    for there in ("meta", torch.device("meta"), {"cpu": "meta"}):
        loaded = checkpointer.load(tmp_path, default_map_location=there)
        assert (loaded["a"].device.type, loaded["b"][0].device.type) == ("meta", "meta")
    mixed = checkpointer.load(tmp_path, {"a": torch.zeros(2), "b": None}, default_map_location="meta")
    assert (mixed["a"].tolist(), mixed["b"][0].device.type) == ([1, 1], "meta")
    assert checkpointer.load(tmp_path, default_map_location=ask)["a"].tolist() == [1, 1]
    assert sorted(asked) == [(8, "cpu"), (12, "cpu")]
    assert checkpointer.load(tmp_path, default_map_location={"cuda:0": "meta"})["a"].device.type == "cpu"
    with pytest.raises(TypeError, match=r"default_map_location is a device, .* found a int"):
        checkpointer.load(tmp_path, default_map_location=3)


def test_a_closed_checkpointer_saves_no_more_but_still_loads(make, kind, tmp_path):
    checkpointer = make(kind)
    save(checkpointer, {"a": 1}, tmp_path)
    with checkpointer as same:
        assert same is checkpointer
    checkpointer.close()
    with pytest.raises(RuntimeError, match="the checkpointer is closed; make a new one"):
        checkpointer.save({"a": 2}, tmp_path)
    assert checkpointer.load(tmp_path) == {"a": 1}
    assert isinstance(checkpointer, Checkpointer)


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a file system of a megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a full disk is NOT tested: this user may not mount a small tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_fails_the_save_keeps_the_older_one_and_harms_no_later_one(checkpointer, small_disk):
    old = {"w": torch.arange(10.0)}
    save(checkpointer, old, small_disk / "c")
    with pytest.raises(SaveFailedError, match="No space left on device") as caught:
        save(checkpointer, {"w": torch.ones(1 << 20)}, small_disk / "c")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert frozen(checkpointer.load(small_disk / "c")) == frozen(old)
    assert files(small_disk / "c") == ["checkpoint_0.pt"]
    save(checkpointer, {"w": torch.zeros(5)}, small_disk / "c")
    assert frozen(checkpointer.load(small_disk / "c")) == frozen({"w": torch.zeros(5)})


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"rank_info": 0}, TypeError, "rank_info must be a RankInfo or None, found 0"),
        ({"rank_info": (0, 1)}, TypeError, "rank_info must be a RankInfo or None"),
        ({"commit_hook": print}, TypeError, "commit_hook must be a WriterHook or None"),
        ({"commit_hook": WriterHook}, TypeError, "commit_hook must be a WriterHook .*: pass an instance of it"),
        ({"rank_info": RankInfo(3, 4)}, ValueError, "not know this process as .*rank=3.*init_process_group"),
        *(
            (
                {"barrier_timeout_sec": bad},
                ValueError,
                f"barrier_timeout_sec must be a finite number above 0, found {bad!r}",
            )
            for bad in (-1, 0, float("nan"), "600")
        ),
    ],
)
def test_an_argument_of_another_kind_is_refused_when_the_checkpointer_is_made(make, kind, option, error, text):
    with pytest.raises(error, match=text):
        make(kind, **option)
    with pytest.raises(ValueError, match="global_rank must be 0 to global_world_size - 1, found rank 1 of 1"):
        RankInfo(1, 1)


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"start_timeout_sec": 0}, ValueError, "start_timeout_sec must be a finite number above 0, found 0"),
        ({"close_timeout_sec": "60"}, ValueError, "close_timeout_sec must be a finite number above 0, found '60'"),
        ({"close_timeout_sec": None}, ValueError, "close_timeout_sec must be a finite number above 0, found None"),
        ({"subprocess_init_fn": 3}, TypeError, "subprocess_init_fn must be a function or None, found 3"),
        ({"subprocess_init_fn": len, "subprocess_init_args": [()]}, TypeError, "subprocess_init_args must be a tuple"),
        ({"subprocess_init_args": (1,)}, TypeError, "need a subprocess_init_fn, found None"),
        ({"subprocess_init_fn": len}, TypeError, r"does not take subprocess_init_args=\(\): missing a required"),
        ({"subprocess_init_fn": lambda: None}, ValueError, "subprocess_init_fn cannot be sent to the writer process"),
        (
            {"subprocess_init_fn": len, "subprocess_init_args": (lambda: None,)},
            ValueError,
            "subprocess_init_args cannot be sent",
        ),
    ],
)
def test_what_the_writer_process_could_not_use_is_refused_before_it_is_started(make, monkeypatch, option, error, text):
    monkeypatch.setattr("recckpt.checkpointer.process.Child", None)
    with pytest.raises(error, match=text):
        make(**option)
