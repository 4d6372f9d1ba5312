"""Shards of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: whole in their directory, never one alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recckpt import CheckpointReader
from recckpt.convert import import_checkpoint
from recckpt.errors import ConversionError

SHARDS = Path(__file__).parent / "golden/made_by_hugging_face_writer_of_torch_2_13"
FIRST, LAST = "shard-00001-model-00001-of-00002.safetensors", "shard-00002-model-00001-of-00002.safetensors"


def write(path, tensors, offsets):
    """Write a file as the writer does, whether whole or sharded."""
    listed = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(listed), "DCP_VERSION": "1.0", "format": "pt"}
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata)
    return path


def refusal(source, out):
    with pytest.raises(ConversionError) as error:
        import_checkpoint(source, out, format="safetensors")
    assert not out.exists()
    return str(error.value)


@pytest.mark.parametrize("name", [FIRST, LAST])
def test_one_shard_is_refused_by_name_and_also_where_it_was_renamed(tmp_path, name):
    said = refusal(SHARDS / name, tmp_path / "out")
    assert name in said
    assert "expected the directory with all shards of the save; give the directory" in said
    shutil.copy(SHARDS / name, tmp_path / "model.safetensors")
    assert "the directory with all shards" in refusal(tmp_path / "model.safetensors", tmp_path / "out")


def test_a_directory_in_which_a_shard_is_missing_is_refused(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "in")
    (tmp_path / "in" / FIRST).unlink()
    assert "'rows': found pieces of 6 values, expected 15, each once" in refusal(tmp_path / "in", tmp_path / "out")


def test_shards_of_two_saves_are_refused(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "in")
    write(
        tmp_path / "in/shard-00003-model-00001-of-00001.safetensors", {"rows": np.ones((2, 3), "f4")}, {"rows": (2, 0)}
    )
    assert "some of them twice" in refusal(tmp_path / "in", tmp_path / "out")


def test_a_file_that_is_no_shard_among_them_is_refused(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "in")
    save_file({"w": np.ones(2)}, tmp_path / "in/other.safetensors")
    assert "other.safetensors at DCP_SHARDING_INFO: found {}" in refusal(tmp_path / "in", tmp_path / "out")


def test_a_whole_file_of_the_same_writer_is_imported_alone(tmp_path):
    whole = write(tmp_path / "in/model-00001-of-00001.safetensors", {"w": np.ones((2, 3))}, {"w": (0, 0)})
    for number, source in enumerate((whole, whole.parent)):
        done = import_checkpoint(source, tmp_path / f"{number}")
        assert not done.contents.left_out
        assert CheckpointReader(tmp_path / f"{number}").tensor_shape("w") == (2, 3)


@pytest.mark.parametrize(
    "said", ["{", "[]", '{"w": 1}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}']
)
def test_metadata_that_does_not_say_where_tensors_begin_is_refused(tmp_path, said):
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": np.ones((2, 3))}, path, {"DCP_SHARDING_INFO": said})
    assert f"{path}" in refusal(path, tmp_path / "out")


def test_pieces_of_different_dtypes_are_refused(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "in")
    tensors = {name: values for name, values in load_file(tmp_path / "in" / LAST).items() if name == "rows"}
    write(tmp_path / "in" / LAST, {"rows": tensors["rows"].astype("f8")}, {"rows": (3, 0)})
    assert "expected one dtype" in refusal(tmp_path / "in", tmp_path / "out")
