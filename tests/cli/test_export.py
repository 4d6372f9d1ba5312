import numpy as np
import pytest
from support.conversions import some_rows


@pytest.fixture
def run(recckpt, tmp_path):
    np.savez(tmp_path / "t.npz", **some_rows())
    recckpt("import", tmp_path / "t.npz", tmp_path / "run")
    return tmp_path / "run"


def test_an_export_says_what_it_wrote(recckpt, run, tmp_path):
    rows = '{"count": {"min": 1}}'  # the first has a NaN
    done = recckpt("export", run, tmp_path / "out", "--to", "npy", "--dtype", "int8", "--where", rows)
    assert done.code == 0, done.err
    assert done.lines[1][:4] == ["t", "99", "embedding,", "embedding_scale"]
    assert float(done.lines[1][4]) > 0
    assert np.load(tmp_path / "out/t/embedding.npy").dtype == np.int8


def test_json_has_the_metadata(recckpt, run, tmp_path):
    done = recckpt("export", run, tmp_path / "out", "--to", "parquet", "--slots", "embedding,count", "--json")
    assert done.json["metadata"]["tables"]["t"]["slots"].keys() == {"embedding", "count"}
    assert done.json["bytes"] > 0


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        (["--to", "parket"], 2, "did you mean 'parquet'"),
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
