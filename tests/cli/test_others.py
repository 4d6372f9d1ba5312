"""``ls``, ``head``, ``get``, ``verify`` and ``sql`` of what another program saved, as it is."""

import subprocess
import sys
import warnings

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from support.builders import Run
from support.conversions import save_dcp, write_recis
from support.sweeps import mostly_slow
from torch.distributed import checkpoint as dcp

STATE = {"emb.weight": torch.arange(40.0).reshape(10, 4), "top.bias": torch.tensor([0.5, 2.0]).bfloat16()}


def as_safetensors(path):
    save_file(STATE, path / "some.safetensors")
    return path / "some.safetensors"


def as_torch_file(path):
    torch.save(STATE, path / "some.pt")
    return path / "some.pt"


def as_dcp(path):
    return save_dcp(STATE, path / "dcp")


def as_shards(path):
    writer = dcp.HuggingFaceStorageWriter(str(path / "shards"), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(STATE, storage_writer=writer, no_dist=True)
    return path / "shards"


@pytest.fixture(params=[as_safetensors, as_torch_file, as_dcp, as_shards], ids=lambda write: write.__name__)
def source(tmp_path, request):
    return request.param(tmp_path)


@pytest.fixture
def recis(tmp_path):
    rows = {"id": np.arange(5) * 7, "embedding": np.arange(20, dtype=np.float32).reshape(5, 4)}
    write_recis(tmp_path / "recis", {"user": rows})
    return tmp_path / "recis"


@mostly_slow()
def test_its_tensors_are_listed_printed_and_queried(recckpt, source):
    assert [each["name"] for each in recckpt("ls", source, "--json").json["tensors"]] == [*STATE]
    assert recckpt("head", source, "emb.weight", "-n", 1).lines == [["id", "embedding"], ["0", "[0,", "1,", "2,", "3]"]]
    assert recckpt("get", source, "emb.weight", 9, 0, "--json").json["rows"] == [
        {"id": 9, "embedding": [36.0, 37.0, 38.0, 39.0]},
        {"id": 0, "embedding": [0.0, 1.0, 2.0, 3.0]},
    ]
    whole = recckpt("get", source, "top.bias", "all", "--json").json
    assert whole == {"tensor": "top.bias", "dtype": "bfloat16", "shape": [2], "values": [0.5, 2.0]}
    answer = recckpt("sql", source, 'select sum(embedding[1]) from "emb.weight" where id > 7', "--csv")
    assert (answer.code, answer.out.splitlines()[1]) == (0, "68.0")
    missing = recckpt("get", source, "emb.weight", 10)
    assert (missing.code, missing.err) == (1, "recckpt: table 'emb.weight' has no row of id 10\n")


def test_its_tables_are_listed_printed_and_queried(recckpt, recis):
    [table] = recckpt("ls", recis, "--json").json["tables"]
    assert (table["name"], table["rows"]) == ("user", 5)
    [row] = recckpt("get", recis, "user", 28, "--json").json["rows"]
    assert row == {"id": 28, "embedding": [16.0, 17.0, 18.0, 19.0]}
    assert recckpt("sql", recis, 'select id from "user" order by id desc limit 1', "--json").json["rows"] == [[28]]
    answer = recckpt("get", recis, "user", "all")
    assert (answer.code, "'user' is a table: name ids of it" in answer.err) == (2, True)


def test_verify_reads_all_and_says_in_a_line_what_cannot_be_promised(recckpt, source, recis):
    for path in (source, recis):
        answer = recckpt("verify", path)
        assert (answer.code, answer.err) == (0, "")
        [line] = [line for line in answer.out.splitlines() if "has no checksums" in line]
        assert "everything can be read, and shapes and dtypes agree, but changed values go unnoticed" in line
        assert "`recckpt import`" in line
        found = recckpt("verify", path, "--quick", "--json").json
        assert (found["good"], found["checksums"], found["deep"]) == (True, False, False)


def test_verify_finds_what_opening_does_not(recckpt, tmp_path):
    path = as_dcp(tmp_path)
    [file] = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(b"PK\x03\x04")
    data[at : at + 2] = b"XX"  # the archive of one tensor
    file.write_bytes(data)
    assert recckpt("verify", path, "--quick").code == 0
    answer = recckpt("verify", path)
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "found what torch cannot read" in answer.err
    assert "has no checksums: changed values go unnoticed" in answer.out
    assert "1 problem" in answer.out


def test_a_damaged_or_unknown_source_is_a_line(recckpt, tmp_path):
    path = as_safetensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("none")
    for args in (("ls",), ("get", "emb.weight", 1), ("verify",), ("sql", "select 1")):
        answer = recckpt(args[0], path, *args[1:])
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert "the file is cut: copy it again" in answer.err
        assert "written" not in answer.err
        answer = recckpt(args[0], tmp_path / "notes", *args[1:])
        assert (answer.code, "found no committed checkpoint" in answer.err) == (1, True)


def test_a_refusal_says_that_nothing_was_written_where_something_was_to_be(recckpt, tmp_path):
    (tmp_path / "a.npy").write_bytes(b"no array")
    looked = recckpt("ls", tmp_path / "a.npy")
    imported = recckpt("import", tmp_path / "a.npy", tmp_path / "out")
    assert (looked.code, imported.code) == (1, 1)
    assert imported.err == looked.err.rstrip() + "; nothing was written\n"
    assert not (tmp_path / "out").exists()


def test_what_lies_at_a_url_is_read_there(recckpt, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/others/some.safetensors", as_safetensors(tmp_path).read_bytes())
    url = "memory://others/some.safetensors"
    assert [each["name"] for each in recckpt("ls", url, "--json").json["tensors"]] == [*STATE]
    assert recckpt("get", url, "emb.weight", 2, "--json").json["missing"] == []
    assert recckpt("verify", url).code == 0


def test_a_dense_tensor_of_ours_is_printed_too(recckpt, tmp_path):
    run = Run(tmp_path).train(10)
    [name] = [name for name, value in run.model.state_dict().items() if name.endswith("bias")][:1]
    answer = recckpt("get", tmp_path, name, "all", "--json")
    assert (answer.code, answer.json["values"]) == (0, run.model.state_dict()[name].tolist())
    wrong = recckpt("get", tmp_path, "nothing", "all")
    assert (wrong.code, "has no dense tensor 'nothing'" in wrong.err) == (1, True)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from recckpt.cli import main; sys.exit(main(sys.argv[1:]))"


def test_without_torch_safetensors_is_read_and_for_others_a_line_says_that_it_takes_torch(tmp_path):
    def run(*args):
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    read = run("get", as_safetensors(tmp_path), "emb.weight", 3)
    assert (read.returncode, read.stderr) == (0, "")
    for path, format in ((as_dcp(tmp_path), "dcp"), (as_torch_file(tmp_path), "torch_state")):
        answer = run("ls", path)
        expected = f"recckpt: {path}: reading {format} needs torch, which is not installed: pip install torch\n"
        assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", expected)


def test_tables_that_diff_does_not_compare_are_said_and_never_equal(recckpt, tmp_path):
    for name, values in (("one", [1.0, 2.0]), ("other", [1.0, 9.0])):
        rows = pa.table({"id": [1, 2], "embedding": pa.array([[values[0]], [values[1]]], pa.list_(pa.float32(), 1))})
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    answer = recckpt("diff", tmp_path / "one.parquet", tmp_path / "other.parquet")
    assert answer.code == 1
    assert "tables are not compared: one, other; import foreign files" in " ".join(answer.err.replace("'", "").split())
