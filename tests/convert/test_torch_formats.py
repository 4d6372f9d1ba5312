"""Files of torch.save and of torch.distributed.checkpoint, in and out, written and read by torch itself."""

import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.conversions import Code, refused, rows_bytes, save_dcp, save_torch, some_rows, table_bytes
from torch.distributed import checkpoint as dcp

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint
from recckpt.convert.tensor_source import SourceBox, put_together
from recckpt.errors import ConversionError
from recckpt.inspect.verify import verify


def state():
    weight = torch.randn(5, 3)
    return {"emb": torch.randn(4, 2), "ids": torch.tensor([9, -1, 7, 2**62]), "w": weight, "tied": weight, **odd()}


def odd():
    part = torch.arange(6.0).view(2, 3).t()
    return {"half": torch.ones(2).bfloat16(), "zero": torch.tensor(3), "part": part, "e": torch.empty(0, 2)}


def save_old(state, path):
    torch.save(state, path.with_suffix(".pth"), _use_new_zipfile_serialization=False)
    return path.with_suffix(".pth")


def same(path, name, tensor):
    with CheckpointReader(path) as reader:
        found = reader.read_tensor(name)
        assert reader.tensor_dtype(name) == str(tensor.dtype).removeprefix("torch.")
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found.shape == tuple(tensor.shape) and found.tobytes() == expected


@pytest.mark.parametrize("save", [save_torch, save_old, save_dcp])
def test_tensors_come_bit_for_bit_and_one_may_be_a_table(tmp_path, save):
    made = state()
    source = save({**made, "epoch": 3}, tmp_path / "x")
    import_checkpoint(source, tmp_path / "out", options=ImportOptions(as_table={"emb": "ids"}), budget_bytes=50)

    assert not verify(str(tmp_path / "out"))
    for name in made.keys() - {"emb", "ids"}:
        assert same(tmp_path / "out", name, made[name]), name
    expected = {"id": made["ids"].numpy(), "embedding": made["emb"].numpy()}
    assert table_bytes(tmp_path / "out", "emb") == rows_bytes(expected)
    assert "epoch" in CheckpointReader(tmp_path / "out").manifest.names.dense  # a plain value of the state


def test_what_lies_beside_a_state_dict_is_registered_under_its_name(tmp_path):
    model = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": 5}
    done = import_checkpoint(save_torch(saved, tmp_path / "x"), tmp_path / "out")
    assert (done.ckpt_id, [*done.contents.extra]) == ("ckpt_5", ["optimizer", "step"])
    assert same(tmp_path / "out", "weight", model.weight.detach())


def test_dcp_puts_nested_names_together(tmp_path):
    saved = {"model": {"b": torch.ones(2)}, "list": [torch.zeros(1), 4]}
    import_checkpoint(save_dcp(saved, tmp_path / "x"), tmp_path / "out")
    assert set(CheckpointReader(tmp_path / "out").manifest.names.dense) == {"model.b", "list.0", "list.1"}


def checkpoint(path):
    tensors = {f"t.{name}": values for name, values in some_rows().items()} | {"w": np.ones(3, "f4")}
    save_file(tensors, path / "made.safetensors", {"recckpt": '{"tables": {"t": ["embedding", "count"]}}'})
    import_checkpoint(path / "made.safetensors", path / "run")
    return path / "run"


def test_the_library_loads_what_was_exported(tmp_path):
    export_checkpoint(checkpoint(tmp_path), tmp_path / "x", to="dcp")
    rows = some_rows()
    there = {f"t.{name}": torch.zeros_like(torch.from_numpy(values)) for name, values in rows.items()}
    there["w"] = torch.zeros(3)
    dcp.load(there, storage_reader=dcp.FileSystemReader(tmp_path / "x"), no_dist=True)
    found = {name.removeprefix("t."): values.numpy() for name, values in there.items() if name != "w"}
    assert rows_bytes(found) == rows_bytes(rows)
    assert there["w"].tolist() == [1, 1, 1]


def test_a_table_goes_out_as_dcp_and_comes_back(tmp_path):
    export_checkpoint(checkpoint(tmp_path), tmp_path / "x", to="dcp", slots=["embedding"])
    import_checkpoint(tmp_path / "x", tmp_path / "back", options=ImportOptions(as_table={"t.embedding": "t.id"}))
    rows = {name: values for name, values in some_rows().items() if name != "count"}
    assert table_bytes(tmp_path / "back", "t.embedding") == rows_bytes(rows)


@pytest.mark.parametrize("save", [save_torch, save_old, save_dcp])
def test_pickles_that_need_code_are_not_run(tmp_path, save, capsys):
    source = save({"x": Code()}, tmp_path / "x")
    capsys.readouterr()
    refused(source, "a pickle that needs code")
    assert "must not run" not in capsys.readouterr().out


def test_a_pickle_that_needs_code_names_its_class(tmp_path):
    torch.save({"x": torch.ones(1), "epoch": np.float32(1)}, tmp_path / "x.pt")
    of_numpy = r"a pickle that needs code to load .*numpy\.(_core|core)\.multiarray\.scalar"
    refused(tmp_path / "x.pt", of_numpy)


@pytest.mark.parametrize(("step", "number"), [(9, 9), (torch.tensor(9), 9), (torch.tensor(9.5), 0)])
def test_a_step_may_lie_in_a_tensor(tmp_path, step, number):
    torch.save({"model": {"w": torch.ones(1)}, "step": step}, tmp_path / "x.pt")
    done = import_checkpoint(tmp_path / "x.pt", tmp_path / "out")
    assert (done.ckpt_id, done.step) == (f"ckpt_{number}", number)


def test_metadata_of_dcp_that_needs_code_is_not_run(tmp_path, capsys):
    source = save_dcp({"x": torch.ones(1)}, tmp_path / "x")
    (source / ".metadata").write_bytes(pickle.dumps({"a": Code()}))
    refused(source, r"\.metadata: found a pickle that needs code")
    for data in (b"", pickle.dumps({}), pickle.dumps([torch.Size])):
        (source / ".metadata").write_bytes(data)
        refused(source, r"\.metadata: found")
    assert "must not run" not in capsys.readouterr().out


def test_files_of_dcp_that_are_missing_or_cut_are_named(tmp_path):
    source = save_dcp({"x": torch.ones(100)}, tmp_path / "x")
    [file] = source.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    refused(source, f"{file.name} at its size: .*; the file is cut")
    file.unlink()
    refused(source, f"{file.name}: found no such file")


@pytest.mark.parametrize("keep", [0, 10, -30])
def test_a_file_of_torch_that_is_cut_is_refused(tmp_path, keep):
    source = save_torch(state(), tmp_path / "x")
    source.write_bytes(source.read_bytes()[:keep])
    refused(source, r"x\.pt: found")


def test_a_file_of_torch_that_is_no_dict_is_refused(tmp_path):
    refused(save_torch([torch.ones(1)], tmp_path / "x"), "found a list, expected a dict")


def test_pieces_of_dcp_that_overlap_are_refused():
    pieces = [SourceBox((0,), (3,), None), SourceBox((1,), (1,), None)]
    with pytest.raises(ConversionError, match="some of which occur twice"):
        put_together("w", "float32", (4,), pieces, "x")


def test_a_tensor_beside_a_state_dict_does_not_hide_it_and_nested_tensors_are_listed(tmp_path):
    state = {"w": torch.ones(3, 2), "more": {"deep": [torch.zeros(1)]}}
    torch.save({"state_dict": state, "epoch": torch.tensor(3)}, tmp_path / "x.pt")
    done = import_checkpoint(tmp_path / "x.pt", tmp_path / "out")
    assert [tensor.name for tensor in done.contents.dense] == ["w"]
    assert [left.name for left in done.contents.left_out] == ["more"]
    assert "epoch" in done.contents.extra
