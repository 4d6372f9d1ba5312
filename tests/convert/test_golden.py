"""Files that the real libraries wrote once, so that what is read does not follow our own writers."""

from pathlib import Path

import numpy as np
from support.conversions import rows_bytes, table_bytes

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, import_checkpoint

GOLDEN = Path(__file__).parent / "golden"


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
