"""Files that the real libraries wrote once, so that our readers do not follow our writers; torch's shards too."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.conversions import refused, rows_bytes, table_bytes

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, import_checkpoint

GOLDEN = Path(__file__).parent / "golden"
SHARDS = Path(__file__).parent / "golden/made_by_hugging_face_writer_of_torch_2_13"
FIRST, LAST = "shard-00001-model-00001-of-00002.safetensors", "shard-00002-model-00001-of-00002.safetensors"
THIRD = "shard-00003-model-00001-of-00001.safetensors"


def test_a_directory_of_dcp(tmp_path):
    source = GOLDEN / "made_by_dcp_of_torch_2_13"
    import_checkpoint(source, tmp_path / "out", options=ImportOptions(as_table={"model.w": "ids"}))
    rows = {"id": np.array([7, -1]), "embedding": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert table_bytes(tmp_path / "out", "model.w") == rows_bytes(rows)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.read_tensor("half").tolist() == [0x3FC0, 0xC000]
        assert set(reader.manifest.names.dense) == {"half", "epoch"}


def test_a_file_of_the_safetensors_library(tmp_path):
    source = GOLDEN / "made_by_safetensors_0_8.safetensors"
    done = import_checkpoint(source, tmp_path / "out", options=ImportOptions(as_table={"w": "ids"}))
    assert [left.name for left in done.contents.left_out] == ["__metadata__ by"]
    rows = {"id": np.array([7, -1]), "embedding": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert table_bytes(tmp_path / "out", "w") == rows_bytes(rows)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.read_tensor("half").tolist() == [1.5, -2]
        assert reader.read_tensor("flag").tolist() == [True, False]
        assert reader.tensor_dtype("flag") == "bool"


def test_all_shards_of_the_hugging_face_writer_of_torch(tmp_path):
    source = GOLDEN / "made_by_hugging_face_writer_of_torch_2_13"  # two ranks, each with two files
    done = import_checkpoint(source, tmp_path / "out", options=ImportOptions(as_table={"rows": "ids"}))
    assert [left.name for left in done.contents.left_out] == ["__metadata__ DCP_SHARDING_INFO"]
    rows = {"id": np.array([7, -1, 3, 9, 2**40]), "embedding": np.arange(15, dtype=np.float32).reshape(5, 3)}
    assert table_bytes(tmp_path / "out", "rows") == rows_bytes(rows)
    with CheckpointReader(tmp_path / "out") as reader:
        assert set(reader.tensor_names()) == {"cols", "bias", "scalar"}
        columns = np.arange(12, dtype=np.float32).reshape(3, 4)  # each rank has half of the columns
        assert np.array_equal(reader.read_tensor("cols"), (columns.view(np.uint32) >> 16).astype(np.uint16))
        assert (reader.read_tensor("bias").tolist(), reader.read_tensor("scalar").item()) == ([1, 2], 3.5)


def write(path, tensors, offsets):
    """Write a file as the writer does, whether whole or sharded."""
    listed = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(listed), "DCP_VERSION": "1.0", "format": "pt"}
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("name", [FIRST, LAST])
def test_one_shard_is_refused_by_name_and_also_where_it_was_renamed(tmp_path, name):
    whole = "expected the directory with all shards of the save; name the directory"
    refused(SHARDS / name, f"{name}.*{whole}", tmp_path / "out", format="safetensors")
    shutil.copy(SHARDS / name, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "the directory with all shards", format="safetensors")


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
    refused(path, re.escape(str(path)), format="safetensors")


def with_another_dtype(directory):
    rows = load_file(directory / LAST)["rows"]
    write(directory / LAST, {"rows": rows.astype("f8")}, {"rows": (3, 0)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda path: (path / FIRST).unlink(), "'rows': found pieces of 6 values, expected 15, each once"),
        (
            lambda path: write(path / THIRD, {"rows": np.ones((2, 3), "f4")}, {"rows": (2, 0)}),
            "some of which occur twice",  # of two saves
        ),
        (
            lambda path: save_file({"w": np.ones(2)}, path / "other.safetensors"),
            "other.safetensors at DCP_SHARDING_INFO: found {}",
        ),
        (with_another_dtype, "expected one dtype"),
    ],
)
def test_shards_that_do_not_go_together_are_refused(tmp_path, change, match):
    shutil.copytree(SHARDS, tmp_path / "in")
    change(tmp_path / "in")
    refused(tmp_path / "in", match, format="safetensors")
