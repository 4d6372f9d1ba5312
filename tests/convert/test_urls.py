"""Sources and targets at URLs."""

import fsspec
import numpy as np
import pytest
from support.conversions import import_rows, rows_bytes, some_rows, table_bytes

from recckpt.convert import export_checkpoint, import_checkpoint
from recckpt.errors import ConversionError


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/conversions", recursive=True)


def put(store, source, name):
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        if path.is_file():
            inner = "" if path == source else f"/{path.relative_to(source)}"
            store.pipe(f"/conversions/{name}{inner}", path.read_bytes())
    return f"memory://conversions/{name}"


@pytest.mark.parametrize("to", ["parquet", "npy", "safetensors"])
def test_what_was_exported_to_a_url_is_imported_from_there(tmp_path, store, to):
    np.savez(tmp_path / "t.npz", **some_rows())
    url = put(store, tmp_path / "t.npz", "t.npz")
    import_rows(url, "memory://conversions/run")
    target = f"memory://conversions/x.{to}"
    export_checkpoint("memory://conversions/run", target, to=to, slots=["embedding", "count"])
    import_checkpoint(target if to == "safetensors" else f"{target}/t", tmp_path / "back")
    assert table_bytes(tmp_path / "back", "t") == rows_bytes(some_rows())
    with pytest.raises(FileExistsError):
        export_checkpoint("memory://conversions/run", target, to=to)


def test_links_to_files_are_followed_as_caches_have_them(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "blobs").mkdir()
    for name, values in some_rows().items():
        np.save(tmp_path / "blobs" / f"{name}.npy", values)
        (tmp_path / "t" / f"{name}.npy").symlink_to(tmp_path / "blobs" / f"{name}.npy")
    import_rows(tmp_path / "t", tmp_path / "out")
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(some_rows())


def test_nothing_at_a_url_is_refused(tmp_path, store):
    store.pipe("/conversions/x", b"")
    with pytest.raises(ConversionError, match="found no file and no directory"):
        import_checkpoint("memory://conversions/none.parquet", tmp_path / "out")
