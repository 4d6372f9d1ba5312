import zipfile

import pyarrow as pa
import pytest

from recckpt.storage import SinkFile, open_storage


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path))


def test_arrow_and_zipfile_write_through_it_and_leave_the_sink_open(storage, tmp_path):
    with storage.create("part.arrow") as sink:
        schema = pa.schema([pa.field("id", pa.int64())])
        with pa.ipc.new_file(pa.PythonFile(SinkFile(sink), "w"), schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1, 2])], schema=schema))
        sink.write(b"more")
    with storage.create("file.zip") as sink:
        with SinkFile(sink) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("name", "text")
        sink.write(b"")
    assert (tmp_path / "part.arrow").read_bytes().endswith(b"ARROW1more")
    assert zipfile.ZipFile(tmp_path / "file.zip").read("name") == b"text"


def test_it_counts_and_cannot_go_back(storage):
    with storage.create("file") as sink:
        file = SinkFile(sink)
        assert file.write(b"abc") == file.tell() == 3
        assert not file.seekable()
        with pytest.raises(OSError, match="seek"):
            file.seek(0)
