"""Tensors of several ranks: any number of ranks, mesh and layout to any other, in one commit with all else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.builders import flip_bit
from support.rank_processes import run_script

from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.inspect.consolidate import consolidate
from recckpt.inspect.verify import verify

SCRIPT = Path(__file__).with_name("dense_ranks.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks and one have saved; the one has loaded what the two saved, and then three have loaded all."""
    root = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, root, 2, 1, 3)
    return root


@pytest.mark.slow
def test_four_ranks_on_meshes_of_two_dimensions_to_three_two_one_and_four_again(tmp_path):
    run_script(SCRIPT, tmp_path, 4, 3, 2, 1, 4)
    for path in tmp_path.glob("tensors-*"):
        check_model(torch.load(tmp_path / "truth.pt"), path / "model.pt", consolidate(str(path), f"{path}/model.pt"))
        assert verify(str(path)) == []
    assert len(list(tmp_path.glob("tensors-*"))) == 12


def check_model(truth, path, done):
    state = torch.load(path, weights_only=True)
    assert sorted(done.names) == sorted(state) == sorted(truth)
    for name, value in truth.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated-2", "rows-2", "columns-2", "replicated-1"])
def test_tensors_are_read_whole_without_torch_and_put_together_in_one_file(saved, tmp_path, layout):
    path, truth = saved / f"tensors-{layout}", torch.load(saved / "truth.pt")
    with CheckpointReader(str(path)) as reader:
        assert sorted(reader.tensor_names()) == sorted(truth)
        for name, value in truth.items():
            assert reader.tensor_shape(name) == tuple(value.shape)
            assert reader.tensor_dtype(name) == str(value.dtype).removeprefix("torch.")
            bits = value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()
            np.testing.assert_array_equal(reader.read_tensor(name), bits)
    check_model(truth, tmp_path / "model.pt", consolidate(str(path), str(tmp_path / "model.pt")))
    assert verify(str(path)) == []


@pytest.mark.slow
def test_of_what_all_ranks_have_one_writes_it(saved):
    values = [json.loads(path.read_text()) for path in saved.glob("tensors-replicated-2/c/dense/*.json")]
    chunks = [chunk for index in values for chunk in index["chunks"]]
    assert sorted(chunk["name"] for chunk in chunks if chunk["file"] != "model.pt") == ["bf16", "count", "scalar", "w"]
    assert [chunk["name"] for chunk in chunks if chunk["file"] == "model.pt"] == ["plain"]
    assert len(values) == 2  # and the work is shared out


@pytest.mark.slow
def test_only_tensors_of_several_ranks_lie_in_files_of_chunks(saved):
    assert list((saved / "tensors-rows-2/c/dense").glob("*.bin"))
    assert not list((saved / "tensors-replicated-1/c/dense").glob("*.bin"))
    state = torch.load(saved / "tensors-rows-2/c/model.pt", weights_only=True)
    assert list(state) == ["plain"]
    extra = torch.load(saved / "training-2/c/extra.pt", weights_only=True)
    moment = extra["optimizer"]["state"][0]["exp_avg"]
    assert moment == {"recckpt.sharded": "optimizer['state'][0]['exp_avg']"}


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 1, 2])
def test_a_flipped_bit_is_found_wherever_it_is(saved, tmp_path, end):
    path = Path(shutil.copytree(saved / "training-2", tmp_path / "runs"))
    for file in sorted(path.glob("c/dense/*")):
        whole = file.read_bytes()
        flip_bit(file, end * (len(whole) - 1) // 2)
        problems = verify(str(path))
        assert [problem.file for problem in problems] == [file.relative_to(path).as_posix()]
        if file.suffix == ".json":
            with CheckpointReader(str(path)) as reader, pytest.raises(CorruptCheckpointError) as caught:
                reader.tensor_names()
            assert caught.value.path == problems[0].file
        file.write_bytes(whole)
    assert verify(str(path)) == []


@pytest.mark.slow
def test_damage_stops_a_consolidation_that_then_leaves_nothing(saved, tmp_path):
    path = Path(shutil.copytree(saved / "tensors-rows-2", tmp_path / "runs"))
    flip_bit(path / "c/dense/00001-of-00002.bin", 0)
    with pytest.raises(CorruptCheckpointError):
        consolidate(str(path), str(tmp_path / "model.pt"))
    assert not (tmp_path / "model.pt").exists()
