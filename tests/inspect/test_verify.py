import errno
import logging
import pickle
import shutil
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.builders import Run, flip_bit
from support.forge import Forge, filled, save_tables
from support.sweeps import mostly_slow

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.inspect.verify import verify
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage


def saved(url, *shards, **options):
    """Save the tables of each shard and return what changes the checkpoint."""
    save_tables(url, *shards, concurrency=1, **options)
    return Forge(url / "ckpt_1")


def two_tables():
    return [filled("user/1", range(-300, 300), slots={"sparse_m": (3,)}), filled("item", range(50))]


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


@mostly_slow()
@pytest.mark.parametrize("deep", [True, False])
def test_a_checkpoint_that_is_whole_has_no_problems(url, deep):
    for name in ("", "/ckpt_1"):
        with pytest.raises(CheckpointNotFoundError):
            verify(f"{url}{name}", deep=deep)
    save_tables(url, two_tables(), batch_bytes=700)
    assert verify(url, deep=deep) == []
    assert verify(f"{url}/ckpt_1", deep=deep) == []
    Run(f"{url}/run", max_keep=3).train(30)
    assert verify(f"{url}/run", deep=deep) == []


@mostly_slow("change")
@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("change", ["cut by one", "cut at half", "emptied", "made longer", "removed"])
def test_every_file_of_another_size_is_found_at_once(tmp_path, change, deep):
    Run(tmp_path).train(10)
    forge = Forge(tmp_path / "ckpt_10")
    names = [file["name"] for file in forge.manifest["files"]]
    for name in names:
        data = forge.path(name).read_bytes()
        changed = {"cut by one": data[:-1], "cut at half": data[: len(data) // 2], "emptied": b"", "made longer": data}
        if change == "removed":
            forge.path(name).unlink()
        else:
            forge.path(name).write_bytes(changed[change] + b"x" * (change == "made longer"))
    found = [problem.file for problem in verify(str(tmp_path), deep=deep)]
    assert sorted(found) == sorted(f"ckpt_10/{name}" for name in names)


def test_all_problems_are_reported_not_the_first(tmp_path):
    forge = saved(tmp_path, two_tables(), batch_bytes=2000)
    name = next(name for name in forge.parts if b"user" in forge.path(name).read_bytes())
    data = bytearray(forge.path(name).read_bytes())
    with pa.ipc.open_file(pa.py_buffer(bytes(data))) as reader:
        batches = [reader.get_batch(number) for number in range(3)]
        for batch, column in zip(batches, ("embedding", "id", "sparse_m"), strict=True):
            data[bytes(data).index(column_buffer(batch.column(column)).to_pybytes())] ^= 1
    forge.path(name).write_bytes(bytes(data))
    forge.path(next(other for other in forge.parts if other != name)).unlink()
    problems = verify(str(tmp_path))
    assert len(problems) == 4
    assert [p.where.rpartition(" ")[2] for p in problems if p.file.endswith(name)] == [
        "'embedding'",
        "'id'",
        "'sparse_m'",
    ]


def test_the_problems_come_in_one_order_whatever_the_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "threads", lambda _, asked: asked)
    Run(tmp_path, max_keep=3, interval=5).train(15)
    for directory in ("ckpt_5", "ckpt_15"):
        forge = Forge(tmp_path / directory)
        for name in (*forge.parts, "extra.pt", "rng_0.pt", "sparse/00000-of-00001.json"):
            flip_bit(forge.path(name))
    (tmp_path / "ckpt_10" / "manifest.json").write_bytes(b"")
    problems = verify(str(tmp_path), threads=1)
    assert {problem.directory for problem in problems} == {"ckpt_5", "ckpt_10", "ckpt_15"}
    assert [p.directory for p in problems] == sorted(p.directory for p in problems)
    for threads in (2, 3, 16, None):
        assert verify(str(tmp_path), threads=threads) == problems


def test_a_file_that_cannot_be_read_is_a_problem_and_the_others_are_read(tmp_path, monkeypatch):
    Run(tmp_path).train(10)
    flip_bit(tmp_path / "ckpt_10" / "rng_0.pt")

    def failing(real):
        def reach(storage, name, *args):
            if name.endswith(("extra.pt", ".arrow", "00000-of-00001.json")):
                raise OSError(errno.EIO, "Input/output error", name)
            return real(storage, name, *args)

        return reach

    for name in ("open", "read", "map"):
        monkeypatch.setattr(LocalStorage, name, failing(getattr(LocalStorage, name)))
    problems = {problem.file: problem.found for problem in verify(str(tmp_path))}
    assert "Input/output error" in problems["ckpt_10/extra.pt"]
    assert "Input/output error" in problems["ckpt_10/sparse/00000-of-00001.json"]
    assert problems.keys() >= {"ckpt_10/rng_0.pt"}


def test_a_checkpoint_that_is_removed_meanwhile_is_no_problem(tmp_path, monkeypatch):
    Run(tmp_path, max_keep=2, interval=5).train(10)
    real = LocalStorage.open

    def rotating(storage, name):
        if name == "ckpt_5/model.pt":
            shutil.rmtree(tmp_path / "ckpt_5")
        return real(storage, name)

    monkeypatch.setattr(LocalStorage, "open", rotating)
    assert verify(str(tmp_path)) == []
    assert not (tmp_path / "ckpt_5").exists()


def test_quick_looks_at_sizes_and_not_at_bytes_and_a_problem_says_where_what_was_found_and_expected(tmp_path):
    forge = saved(tmp_path, two_tables())
    path = forge.path(forge.parts[0])
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    assert verify(str(tmp_path), deep=False) == []
    assert verify(str(tmp_path))
    path.unlink()
    problem = only(verify(str(tmp_path), deep=False))
    assert str(problem) == f"ckpt_1/{forge.parts[0]}: found no such file, expected {size} bytes"
    for threads in (0, -1, 2.5, "2", True):
        with pytest.raises(ValueError, match="threads"):
            verify(str(tmp_path), threads=threads)


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        ("manifest", lambda values: values["tables"][1].update(rows=51), "at table 'item': found 51 rows"),
        ("manifest", lambda values: values["shards"][0].update(buckets=[0, 1]), "expected [0, 1]"),
        ("manifest", lambda values: values.update(version=99), "at version: found 99"),
        ("catalog", lambda values: values.update(version=99), "at version: found 99"),
        ("catalog", lambda values: values.update(save_id="0" * 32), "at save_id"),
    ],
)
def test_what_manifest_and_catalog_say_that_is_not_so_is_found(tmp_path, file, edit, said):
    forge = saved(tmp_path, two_tables())
    getattr(forge, f"edit_{file}")(edit)
    problems = verify(str(tmp_path))
    assert any(said in str(problem) for problem in problems)
    assert file == "catalog" or len(problems) == 1
    forge = saved(tmp_path / "other", two_tables())
    lost = layout.part(0, 1, 9, 0)
    forge.path(lost).write_bytes(b"x")
    forge.edit_manifest(lambda values: values["files"].append({"name": lost, "bytes": 1}))
    problem = only(verify(str(tmp_path / "other")))
    assert (problem.where, problem.found) == (f"file {lost!r}", "in 0 catalogs")


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w')",))


@mostly_slow()
@pytest.mark.parametrize("name", ["model.pt", "extra.pt", "io_state_0.pt", "rng_0.pt"])
def test_a_dense_file_that_asks_for_code_is_found_and_nothing_runs(tmp_path, name):
    Run(tmp_path).train(10)
    forge = Forge(tmp_path / "ckpt_10")
    forge.save(name, {"w": torch.zeros(2), "x": Hostile(tmp_path / "ran")})
    assert {problem.file for problem in verify(str(tmp_path))} == {f"ckpt_10/{name}"}
    assert not (tmp_path / "ran").exists()


def script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


UNLOADABLE = {
    "TorchScript": script,
    "a file of torch before 1.6": lambda path: torch.save({"a": 1}, path, _use_new_zipfile_serialization=False),
    "a sparse tensor": lambda path: torch.save({"a": torch.eye(2).to_sparse()}, path),
    "a quantized tensor": lambda path: torch.save(
        {"a": torch.quantize_per_tensor(torch.zeros(2), 1, 0, torch.qint8)}, path
    ),
    "a numpy scalar": lambda path: torch.save({"a": np.float32(1)}, path),
    "a module": lambda path: torch.save({"a": torch.nn.Linear(1, 1)}, path),
    "no dict": lambda path: torch.save([1, 2], path),
    "a newer protocol": lambda path: torch.save({"a": (1, 2)}, path, pickle_protocol=4),
    "a plain pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1}, 2)),
    "a zip of something else": lambda path: shutil.make_archive(
        str(path.with_suffix("")), "zip", path.parent / "ckpt_10/sparse"
    ),
}


@mostly_slow()
@pytest.mark.parametrize("make", UNLOADABLE.values(), ids=UNLOADABLE.keys())
def test_extra_pt_that_could_not_be_loaded_is_damage_though_its_checksum_is_right(tmp_path, make):
    Run(tmp_path).train(10)
    forge, path = Forge(tmp_path / "ckpt_10"), tmp_path / "made.zip"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(path)
    forge.write("extra.pt", path.read_bytes())
    problem = only(verify(str(tmp_path)))
    assert problem.file == "ckpt_10/extra.pt"
    forge.save(
        "extra.pt", {"a": torch.ones(2, dtype=torch.float8_e5m2), "b": {"c": [1, {2}, 1j, b"x", torch.device("cpu")]}}
    )
    assert verify(str(tmp_path)) == []


def test_all_checkpoints_of_an_output_dir_are_looked_at(tmp_path):
    for number in range(3):
        save_tables(tmp_path, two_tables(), ckpt_id=f"ckpt_{number}")
    (tmp_path / "ckpt_0" / "manifest.json").write_bytes(b"")
    Forge(tmp_path / "ckpt_2").path(Forge(tmp_path / "ckpt_2").parts[0]).unlink()
    (tmp_path / "ckpt_3" / "sparse").mkdir(parents=True)  # a leftover is no checkpoint
    assert {problem.directory for problem in verify(str(tmp_path))} == {"ckpt_0", "ckpt_2"}
    assert verify(str(tmp_path / "ckpt_1")) == []


def test_damage_is_found_on_a_store_without_memory_maps(memory_url):
    save_tables(memory_url, two_tables())
    storage = open_storage(memory_url)
    name = next(f"ckpt_1/{name}" for name in storage.list_files("ckpt_1") if name.endswith(".arrow"))
    data = storage.read(name, 1 << 20)
    for at in (len(data) // 2, len(data) - 1, 100):
        storage.replace(name, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert only(verify(memory_url)).file == name


@mostly_slow()
@pytest.mark.parametrize("name", ["1.json", "1.list.json"])
@pytest.mark.parametrize("deep", [True, False])
def test_damage_to_what_says_who_owns_the_output_dir_is_found(tmp_path, name, deep):
    Run(tmp_path).train(10)
    path = tmp_path / ".recckpt/owner" / name
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert only(verify(str(tmp_path), deep=deep)).file == f".recckpt/owner/{name}", at
    assert verify(str(tmp_path / "ckpt_10"), deep=deep) == []


def test_files_that_nobody_listed_are_no_problem_and_named_to_who_wants_to_know(tmp_path, caplog):
    forge = saved(tmp_path, two_tables())
    forge.path("sparse/00000-of-00001.g7.00.arrow").write_bytes(b"junk")
    forge.path("notes.txt").write_text("mine")
    assert verify(str(tmp_path)) == []
    assert caplog.text == ""
    with caplog.at_level(logging.DEBUG, "recckpt"):
        assert verify(str(tmp_path)) == []
    named = [record.args[0] for record in caplog.records if record.levelno == logging.DEBUG]
    assert named == ["ckpt_1/notes.txt", "ckpt_1/sparse/00000-of-00001.g7.00.arrow"]


@mostly_slow("key")
@pytest.mark.parametrize("key", ["epoch", "seq", "step"])
@pytest.mark.parametrize("value", [2**63 - 1, 10**18])
def test_a_number_that_none_can_follow_is_refused_by_verify_as_by_a_restore(tmp_path, key, value):
    run = Run(tmp_path).train(10)
    Forge(tmp_path / "ckpt_10").edit_manifest(lambda values: values.update({key: value}))
    assert only(verify(str(tmp_path))).where == key
    with pytest.raises(CorruptCheckpointError, match=f"at {key}: found {value}"):
        run.manager.restore()


def test_intent_is_verified_too_and_a_copy_may_lack_it(tmp_path):
    Run(tmp_path).train(10)
    path = tmp_path / "ckpt_10" / "INTENT"
    whole = path.read_bytes()
    for change in (b"", b"{}", whole + b"x"):
        path.write_bytes(change)
        assert only(verify(str(tmp_path))).file == "ckpt_10/INTENT"
    for offset in range(len(whole)):
        path.write_bytes(whole)
        flip_bit(path, offset)
        assert only(verify(str(tmp_path), deep=False)).file == "ckpt_10/INTENT"
    path.unlink()
    assert verify(str(tmp_path)) == []
