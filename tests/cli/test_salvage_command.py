import pyarrow as pa
import pytest
from support.builders import flip_bit
from support.forge import Forge, filled, save_tables

from recckpt.storage import open_storage


@pytest.fixture
def forge(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("user\n1", range(200))], concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


def test_what_is_whole_ends_with_0(recckpt, forge, tmp_path):
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "u.arrow")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f'"user\\n1": wrote 200 of 200 rows of ckpt_1 to {tmp_path / "u.arrow"}\n'
    with pa.ipc.open_file(str(tmp_path / "u.arrow")) as file:
        assert file.read_all().num_rows == 200


def test_what_is_lost_is_listed_and_ends_with_1(recckpt, forge, tmp_path):
    flip_bit(forge.path(forge.parts[0]))
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "u.arrow")
    assert answer.code == 1
    assert answer.lines[2] == ["FILE", "BUCKETS", "ROWS", "REASON"]
    assert answer.lines[3][0] == f"ckpt_1/{forge.parts[0]}"
    assert "checksum" in answer.out
    (lost,) = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "v.arrow", "--json").json["lost"]
    assert answer.err == f'recckpt: "user\\n1": {lost["rows"]} rows lost\n'
    assert lost["file"] == f"ckpt_1/{forge.parts[0]}"
    assert 0 <= lost["buckets"][0] < lost["buckets"][1] <= 65536


def test_unverified_rows_are_taken_when_asked_for_and_end_with_1(recckpt, forge, tmp_path):
    forge.path(forge.manifest["shards"][0]["catalog"]).unlink()
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "u.arrow", "--json")
    assert (answer.code, answer.json["rows"], answer.json["unverified"]) == (1, 0, 0)
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "v.arrow", "--unverified", "--json")
    assert (answer.code, answer.json["rows"], answer.json["unverified"]) == (1, 200, 200)
    assert answer.json["lost"] == []
    assert answer.err == 'recckpt: "user\\n1": 200 rows unverified\n'


def test_what_cannot_be_done_is_one_line(recckpt, forge, tmp_path):
    (tmp_path / "mine").write_text("mine")
    for args, message in [
        ((forge.directory, "user\n2", "--out", tmp_path / "u.arrow"), "no table 'user\\n2'"),
        ((forge.directory, "user\n1", "--out", tmp_path / "mine"), "exists"),
        ((tmp_path / "nowhere", "user\n1", "--out", tmp_path / "u.arrow"), "nowhere: does not exist"),
    ]:
        answer = recckpt("salvage", *args)
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert message in answer.err
    assert recckpt("salvage", forge.directory, "user\n1").code == 2
    assert recckpt("salvage", "nosuch://x/y", "t", "--out", "z").code == 2
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_output_dir_means_its_newest_damaged_or_not_and_an_older_one_with_more_is_named(recckpt, forge, tmp_path):
    save_tables(open_storage(str(tmp_path / "runs")), [filled("user\n1", range(300))], ckpt_id="ckpt_2", step=2)
    Forge(tmp_path / "runs/ckpt_2").path(Forge(tmp_path / "runs/ckpt_2").parts[0]).unlink()
    answer = recckpt("salvage", tmp_path / "runs", "user\n1", "--out", tmp_path / "u.arrow")
    assert answer.code == 1
    assert "wrote 0 of 300 rows of ckpt_2 to" in answer.out
    assert "ckpt_1: 200 rows, of files that are not damaged here; `recckpt verify` it first" in answer.out
    answer = recckpt("salvage", tmp_path / "runs", "user\n1", "--out", tmp_path / "v.arrow", "--json").json
    assert (answer["checkpoint"], answer["unverified_left"]) == ("ckpt_2", 0)
    assert answer["fuller"] == {"ckpt_id": "ckpt_1", "step": None, "kind": "full", "rows": 200}


def test_what_unverified_would_take_is_counted(recckpt, forge, tmp_path):
    forge.path(forge.manifest["shards"][0]["catalog"]).unlink()
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "u.arrow")
    assert "--unverified: up to 200 rows that are there" in answer.out
    answer = recckpt("salvage", forge.directory, "user\n1", "--out", tmp_path / "v.arrow", "--unverified", "--json")
    assert (answer.json["rows"], answer.json["unverified_left"], answer.json["fuller"]) == (200, 0, None)
