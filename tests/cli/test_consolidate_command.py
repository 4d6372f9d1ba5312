import io
import zipfile

import pytest
import torch
from support.builders import Run, flip_bit, tree
from support.chunked import chunk_of, save_chunked

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
    for args, message in [
        ((tmp_path / "nowhere",), "does not exist"),
        ((forge.directory, "--out", tmp_path / "mine"), "/mine'"),
        (
            (forge.directory, "--out", tmp_path / "mine"),
            "it exists, expected a new file: remove it, or write to another name",
        ),
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
    assert tree(tmp_path) == before


def test_a_file_of_another_kind_is_refused_by_its_name(recckpt, tmp_path):
    save_chunked(tmp_path / "runs", [chunk_of("w", WHOLE["w"])])
    answer = recckpt("consolidate", tmp_path / "runs", "--out", tmp_path / "x.safetensors")
    assert (answer.code, answer.out) == (2, "")
    assert "found the name of a .safetensors file; name it model.pt" in answer.err
    assert not (tmp_path / "x.safetensors").exists()


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
