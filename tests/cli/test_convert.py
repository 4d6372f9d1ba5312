"""``import``, ``export`` and ``consolidate``."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.builders import Run, flip_bit, tree
from support.chunked import chunk_of, save_chunked
from support.conversions import some_rows
from support.forge import Forge, filled, save_tables

from recckpt import CheckpointReader
from recckpt.storage import open_storage


@pytest.fixture
def vectors(tmp_path):
    np.savez(tmp_path / "t.npz", **some_rows())
    return tmp_path / "t.npz"


def test_a_dry_run_prints_the_plan_and_an_import_does_it(recckpt, vectors, tmp_path):
    planned = recckpt("import", vectors, tmp_path / "out", "--table", "item", "--step", 5, "--dry-run")
    assert planned.code == 0
    assert ["item", "100", "embedding", "float32[3],", "count", "int32[]"] in planned.lines
    assert planned.lines[-1] == ["would", "write", f"{tmp_path}/out/ckpt_5"]
    assert not (tmp_path / "out").exists()
    done = recckpt("import", vectors, tmp_path / "out", "--table", "item", "--step", 5)
    assert done.out.splitlines()[-1].startswith(f"wrote {tmp_path}/out/ckpt_5, ")
    assert CheckpointReader(tmp_path / "out").manifest.rows == 100
    named = recckpt("import", vectors, tmp_path / "named", "--name", "t=a=b", "--json")
    assert [table["name"] for table in named.json["tables"]] == ["a=b"]


def test_csv_is_refused_with_the_line_that_makes_parquet_of_it(recckpt, tmp_path):
    (tmp_path / "x.csv").write_text("id,a\n1,2\n")
    for options, code in (([], 1), (["--from", "csv"], 2)):
        done = recckpt("import", tmp_path / "x.csv", tmp_path / "out", *options)
        assert done.code == code
        assert "pl.read_csv(...).write_parquet(...) before an import" in done.err.splitlines()[-1]


def test_an_older_step_than_the_latest_there_is_said_to_become_the_newest(recckpt, vectors, tmp_path):
    said = "restore() will use ckpt_5, the newest once it is written, though ckpt_7 has a later step"
    assert "restore()" not in recckpt("import", vectors, tmp_path / "out", "--step", 7).out
    for options in (["--dry-run"], []):
        assert said in recckpt("import", vectors, tmp_path / "out", "--step", 5, *options).out
    noted = recckpt("import", vectors, tmp_path / "out", "--step", 6, "--json").json["notes"]
    assert [note.partition(", which")[0] for note in noted] == [said.replace("ckpt_5", "ckpt_6")]
    assert CheckpointReader(tmp_path / "out").manifest.step == 6


def test_json_lists_all_that_came_and_all_that_did_not(recckpt, tmp_path):
    save_file({"a": np.ones((2, 3), "f4"), "b": np.ones(2, "f4")}, tmp_path / "x.safetensors", {"by": "me"})
    done = recckpt("import", tmp_path / "x.safetensors", tmp_path / "out", "--as-table", "a", "--json")
    assert done.json["tables"] == [
        {"name": "a", "rows": 2, "slots": [{"name": "embedding", "dtype": "float32", "shape": [3]}]}
    ]
    assert done.json["dense"] == [{"name": "b", "dtype": "float32", "shape": [2]}]
    assert [left["name"] for left in done.json["left_out"]] == ["__metadata__ by"]
    assert done.json["directory"] == "ckpt_0"


def test_a_refusal_is_one_line_and_exit_code_1(recckpt, vectors, tmp_path):
    recckpt("import", vectors, tmp_path / "out")
    again = recckpt("import", vectors, tmp_path / "out")
    assert (again.code, again.err.count("\n")) == (1, 1)
    assert "'ckpt_0' is committed already" in again.err
    gone = recckpt("import", tmp_path / "none", tmp_path / "other", "--json")
    assert gone.code == 1
    assert "found no file" in gone.json["problems"][0]


def test_plain_values_and_the_tensors_inside_them_are_listed(recckpt, tmp_path):
    nested = {"rates": [0.1], "state": {0: {"m": torch.ones(2), "v": torch.ones(2)}}}
    torch.save({"w": torch.ones(2), "epoch": 3, "optimizer": nested}, tmp_path / "x.pt")
    planned = recckpt("import", tmp_path / "x.pt", tmp_path / "out", "--dry-run")
    assert "plain values, to model.pt: epoch, optimizer (with 2 tensors inside)\n" in planned.out
    done = recckpt("import", tmp_path / "x.pt", tmp_path / "out", "--json").json
    assert (done["values"], done["tensors_inside"]) == (["epoch", "optimizer"], {"optimizer": 2})


SAME_TWICE = ["--as-table", "a", "--as-table", "a=b"]


@pytest.mark.parametrize(
    "options", [["--step", -1], ["--from", "parket"], ["--as-table", "=x"], ["--name", "a"], SAME_TWICE]
)
def test_wrong_usage_is_exit_code_2(recckpt, vectors, tmp_path, options):
    assert recckpt("import", vectors, tmp_path / "out", *options).code == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(recckpt, tmp_path):
    np.savez(tmp_path / "t.npz", **some_rows())
    recckpt("import", tmp_path / "t.npz", tmp_path / "run")
    return tmp_path / "run"


def test_an_export_says_what_it_wrote_and_json_has_the_metadata(recckpt, run, tmp_path):
    rows = '{"count": {"min": 1}}'  # the first has a NaN
    done = recckpt("export", run, tmp_path / "out", "--to", "npy", "--dtype", "int8", "--where", rows)
    assert done.code == 0, done.err
    assert done.lines[1][:4] == ["t", "99", "embedding,", "embedding_scale"]
    assert float(done.lines[1][4]) > 0
    assert np.load(tmp_path / "out/t/embedding.npy").dtype == np.int8
    done = recckpt("export", run, tmp_path / "rows", "--to", "parquet", "--slots", "embedding,count", "--json")
    assert done.json["metadata"]["tables"]["t"]["slots"].keys() == {"embedding", "count"}
    assert done.json["bytes"] > 0


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        (["--to", "parket"], 2, "did you mean 'parquet'"),
        (["--to", "csv"], 2, "pl.read_parquet(...).write_csv(...) after an export"),
        (["--to", "npy", "--where", "{"], 2, "--where: not JSON"),
        (["--to", "npy", "--where", '{"count": 5}'], 2, "'count': found 5"),
        (["--to", "npy", "--table", "u"], 1, "no table 'u'"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line_after_the_usage(recckpt, run, tmp_path, options, code, match):
    done = recckpt("export", run, tmp_path / "out", *options)
    assert (done.code, done.err.startswith("usage: recckpt export")) == (code, code == 2)
    assert match in done.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def forge(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("user\n1", range(200)), filled("item", [1])], concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


def test_what_is_whole_ends_with_0_and_what_is_skipped_is_listed_and_ends_with_1(recckpt, forge, tmp_path):
    def export(to, *options):
        return recckpt("export", forge.directory, tmp_path / to, "--to", "npy", "--skip-damaged", *options)

    answer = export("out")
    assert (answer.code, answer.err) == (0, "")
    assert "SKIPPED" not in answer.out
    flip_bit(forge.path(forge.parts[0]), 3000)
    answer = export("data", "--json")
    assert answer.code == 1
    (skipped,) = answer.json["skipped"]
    assert (skipped["file"], skipped["table"]) == (f"ckpt_1/{forge.parts[0]}", "user\n1")
    assert answer.err == f'recckpt: "user\\n1": {skipped["rows"]} rows skipped\n'
    begin, end = skipped["buckets"]
    answer = export("text")
    assert answer.code == 1
    (line,) = (line for line in answer.out.splitlines() if line.startswith(skipped["file"]))
    for text in (str(skipped["batch"]), '"user\\n1"', f"{begin} to {end - 1}", str(skipped["rows"]), "checksum"):
        assert text in line
    forge.path(forge.manifest["shards"][0]["catalog"]).unlink()
    answer = export("none", "--table", "item")
    assert answer.err == "recckpt: item: 0 rows skipped, and an unknown number more\n"
    answer = recckpt("salvage", forge.directory, "item", "--out", tmp_path / "item.arrow")
    assert (answer.code, answer.out) == (2, "")
    assert "`recckpt export CKPT TARGET --to parquet --skip-damaged`" in answer.err.splitlines()[-1]


@pytest.mark.parametrize("newest", ["damaged", "whole"])
def test_a_checkpoint_whose_manifest_is_damaged_is_not_passed_over_in_silence(recckpt, forge, tmp_path, newest):
    runs = forge.directory.parent
    save_tables(open_storage(str(runs)), [filled("item", [2])], ckpt_id="ckpt_2", step=2)
    if newest == "damaged":
        flip_bit(runs / "ckpt_2/manifest.json")
    answer = recckpt("export", runs, tmp_path / "out", "--to", "npy", "--skip-damaged", "--json")
    assert answer.json["id"] == ("ckpt_1" if newest == "damaged" else "ckpt_2")
    assert answer.code == (1 if newest == "damaged" else 0)
    assert [each["file"] for each in answer.json["skipped"]] == ["ckpt_2/manifest.json"] * answer.code
    assert ("ckpt_2/manifest.json: skipped, " in answer.err) == (newest == "damaged")


WHOLE = {
    "w": torch.arange(60.0).reshape(10, 6),
    "bias": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "small": torch.arange(7).to(torch.float8_e4m3fn),
    "unsigned": torch.arange(9).to(torch.uint16),
    "flags": torch.tensor([True, False, True]),
    "waves": torch.complex(torch.arange(3.0), torch.ones(3)),
}
LAYOUTS = {
    "replicated": {},
    "partitioned in rows": {
        "w": [((0, 0), (4, 6)), ((4, 0), (4, 6)), ((8, 0), (2, 6))],
        "bias": [((0,), (3,)), ((3,), (2,))],
    },
    "columns of tensor parallel layers": {"w": [((0, 0), (10, 3)), ((0, 3), (10, 3))]},
    "both": {"w": [((r, c), (5, 3)) for r in (0, 5) for c in (0, 3)]},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_tensors_of_several_ranks_become_one_file_that_torch_reads(recckpt, tmp_path, layout):
    chunks = [chunk_of(name, value, box) for name, value in WHOLE.items() for box in layout.get(name, [None])]
    plain = {"plain": torch.ones(3), "_extra_state": {"version": 3, "names": ("a", b"b")}}
    plain["view"] = plain["plain"]
    save_chunked(tmp_path / "runs", chunks[::2], chunks[1::2], model=plain)
    answer = recckpt("consolidate", tmp_path / "runs", "--out", tmp_path / "model.pt", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert sorted(answer.json["tensors"]) == sorted([*WHOLE, *plain])
    assert sorted(answer.json["sharded"]) == sorted(WHOLE)
    assert answer.json["bytes"] == (tmp_path / "model.pt").stat().st_size
    for options in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "model.pt", weights_only=True, **options)
        assert state["_extra_state"] == plain["_extra_state"]
        assert state["view"].data_ptr() == state["plain"].data_ptr()
        for name, value in {**WHOLE, "plain": plain["plain"]}.items():
            assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape)
            assert state[name].untyped_storage().tolist() == value.untyped_storage().tolist()
            assert state[name].data_ptr() % 64 == 0 or not options


def test_show_lists_them_beside_the_others(recckpt, tmp_path):
    forge = save_chunked(
        tmp_path / "runs", [chunk_of("w", WHOLE["w"], ((0, 0), (4, 6)))], [chunk_of("w", WHOLE["w"], ((4, 0), (6, 6)))]
    )
    [tensor] = recckpt("show", forge.directory, "--json").json["tensors"]
    assert tensor == {"name": "w", "dtype": "float32", "shape": [10, 6], "bytes": 240}
    forge.path("dense/00001-of-00002.json").write_text("x")
    answer = recckpt("show", forge.directory)
    assert (answer.code, "ckpt_1/dense/00001-of-00002.json" in answer.err) == (1, True)


def test_a_checkpoint_without_sharded_tensors_is_copied(recckpt, tmp_path):
    run = Run(tmp_path / "runs").train(10)
    answer = recckpt("consolidate", tmp_path / "runs", "--out", tmp_path / "model.pt")
    assert (answer.code, answer.err) == (0, "")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    live = {name: value for name, value in run.model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert sorted(state) == sorted(live)
    assert all(torch.equal(state[name], value) for name, value in live.items())
    size = (tmp_path / "model.pt").stat().st_size
    assert (
        answer.out
        == f"ckpt_10: wrote {len(live)} tensors to {tmp_path / 'model.pt'}, {size / 1000:.1f} kB, 0 sharded\n"
    )


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(recckpt, tmp_path):
    forge = save_chunked(tmp_path / "runs", [chunk_of("w", WHOLE["w"])])
    (tmp_path / "mine").write_text("mine")
    before = tree(tmp_path)
    existing = "/mine': this file exists, expected a new one: remove it, or write to another name"
    for args, message in [
        ((tmp_path / "nowhere",), "does not exist"),
        ((forge.directory, "--out", tmp_path / "mine"), existing.partition(":")[0]),
        ((forge.directory, "--out", tmp_path / "mine"), existing.partition(": ")[2]),
    ]:
        answer = recckpt("consolidate", *args)
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert message in answer.err
    flip_bit(forge.path("dense/00000-of-00001.bin"))
    answer = recckpt("consolidate", forge.directory, "--out", tmp_path / "model.pt")
    assert (answer.code, answer.out) == (1, "")
    assert "ckpt_1/dense/00000-of-00001.bin at tensor 'w'" in answer.err
    flip_bit(forge.path("dense/00000-of-00001.bin"))
    assert recckpt("consolidate", "nosuch://x/y").code == 2
    answer = recckpt("consolidate", tmp_path / "runs", "--out", tmp_path / "x.safetensors")
    assert (answer.code, answer.out) == (2, "")
    assert "found the name of a .safetensors file; name it model.pt" in answer.err
    assert tree(tmp_path) == before


def deeply_nested(depth: int) -> bytes:
    """Return a torch file with a list in a list in a list."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        pickled = b"\x80\x02}X\x01\0\0\0a" + b"]" * depth + b"a" * (depth - 1) + b"s."
        for name, data in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"model/{name}", data)
    return file.getvalue()


def test_plain_data_that_is_nested_too_deep_is_one_line(recckpt, tmp_path):
    forge = save_chunked(tmp_path / "runs", [chunk_of("w", WHOLE["w"])])

    def add_plain(values):
        values["files"].append({"name": "model.pt", "bytes": 0, "xxh3": "0" * 16})
        values["names"]["dense"].append("a")

    forge.edit_manifest(add_plain)
    forge.write("model.pt", deeply_nested(50_000))
    answer = recckpt("consolidate", tmp_path / "runs", "--out", tmp_path / "model.pt")
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert "model.pt" in answer.err
    assert "nested too deep" in answer.err
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("nested", [b"]" * 100_000 + b"a" * 99_999, b")" + b"\x85" * 5000])
def test_values_that_are_nested_too_deep_are_one_line(recckpt, tmp_path, nested):
    forge = save_chunked(tmp_path / "runs", [], model={"w": torch.ones(2), "deep": None})
    path = forge.path("model.pt")
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert entries["archive/data.pkl"].endswith(b"Nu.")
    entries["archive/data.pkl"] = entries["archive/data.pkl"].removesuffix(b"Nu.") + nested + b"u."
    with zipfile.ZipFile(tmp_path / "forged.pt", "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.writestr("archive/rest", bytes(4096))  # so that the file has the places of which the index speaks
    forge.write("model.pt", (tmp_path / "forged.pt").read_bytes())
    answer = recckpt("consolidate", forge.directory, "--out", tmp_path / "out.pt")
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert "ckpt_1/model.pt" in answer.err
    assert not (tmp_path / "out.pt").exists()
