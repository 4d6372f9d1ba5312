"""What an export wrote is imported as the tables that it was, or refused."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file
from support.conversions import arrow_table, rows_bytes, some_rows, table_bytes
from support.delta_runs import run_with_chain

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, export_checkpoint, import_checkpoint
from recckpt.errors import ConversionError


def run_of_two_tables(path):
    tensors = {
        "item": np.ones((2, 2), "f4"),
        "user": np.full((2, 3), 5, "f4"),
        "i": np.array([1, 2]),
        "u": np.arange(2),
    }
    save_file(tensors, path / "m.safetensors")
    import_checkpoint(path / "m.safetensors", path / "run", options=ImportOptions(as_table={"item": "i", "user": "u"}))
    return path / "run"


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_an_export_of_several_tables_comes_back_as_those_tables(tmp_path, to):
    run = run_of_two_tables(tmp_path)
    export_checkpoint(run, tmp_path / "out", to=to)
    done = import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert done.rows == {"item": 2, "user": 2}
    for table in ("item", "user"):
        assert table_bytes(tmp_path / "back", table) == table_bytes(run, table)
    only = import_checkpoint(tmp_path / "out", tmp_path / "only", tables=["user"])
    assert only.rows == {"user": 2}
    named = import_checkpoint(
        tmp_path / "out", tmp_path / "named", tables=["item"], options=ImportOptions(table="item")
    )
    assert named.rows == {"item": 2}
    assert [left.name for left in named.contents.left_out] == ["table user"]


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_tables_whose_export_does_not_name_them_are_not_mixed(tmp_path, to):
    export_checkpoint(run_of_two_tables(tmp_path), tmp_path / "out", to=to)
    for name in ("metadata.json", "_recckpt.json"):
        (tmp_path / "out" / name).unlink(missing_ok=True)
    with pytest.raises(ConversionError, match="name the directory of one table"):
        import_checkpoint(tmp_path / "out", tmp_path / "back")


def test_one_name_for_several_tables_is_refused(tmp_path):
    export_checkpoint(run_of_two_tables(tmp_path), tmp_path / "out", to="npy")
    with pytest.raises(ConversionError, match="found 2 tables, expected the name of one: item, user"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", options=ImportOptions(table="t"))


@pytest.mark.parametrize("to", ["npy", "parquet"])
def test_an_increment_is_not_taken_for_whole_tables(tmp_path, to):
    run_with_chain(tmp_path / "run")
    export_checkpoint(tmp_path / "run/ckpt_3", tmp_path / "out", to=to, since="ckpt_1")
    for source in ("out", "out/item.deletes"):
        with pytest.raises(ConversionError, match="export without --since"):
            import_checkpoint(tmp_path / source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("to", ["npy", "parquet", "safetensors"])
def test_vectors_of_int8_are_floats_again(tmp_path, to):
    rows = some_rows()
    rows["embedding"][0, 0] = 0
    pq.write_table(arrow_table(rows), tmp_path / "t.parquet")
    import_checkpoint(tmp_path / "t.parquet", tmp_path / "run")
    target = tmp_path / ("out.safetensors" if to == "safetensors" else "out")
    done = export_checkpoint(tmp_path / "run", target, to=to, dtype="int8")
    back = import_checkpoint(target, tmp_path / "back")
    assert {slot.name: slot.dtype for slot in back.contents.tables[0].slots} == {"embedding": "float32"}
    assert "int8 times embedding_scale is float32 here" in {left.reason for left in back.contents.left_out}
    values = CheckpointReader(tmp_path / "back").lookup("t", rows["id"]).values
    error = np.abs(values - rows["embedding"]).max()
    assert error == pytest.approx(done.metadata["tables"]["t"]["largest_error"], rel=1e-4)


def test_metadata_of_another_program_is_none_of_an_export(tmp_path):
    (tmp_path / "t").mkdir()
    for name, values in some_rows().items():
        np.save(tmp_path / "t" / f"{name}.npy", values)
    (tmp_path / "t/metadata.json").write_text(json.dumps({"tables": {"t": 1}}))
    import_checkpoint(tmp_path / "t", tmp_path / "back")
    assert table_bytes(tmp_path / "back", "t") == rows_bytes(some_rows())
