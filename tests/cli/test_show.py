import numpy as np
import polars as pl
import torch
from support.builders import Run, Stream, flip_bit
from support.forge import Forge, filled, save_tables
from support.spec_writer import Held, write_full

from recckpt import Saver
from recckpt.format.buckets import gen_slice
from recckpt.storage import open_storage


def saved(url, tables, **fields):
    storage = open_storage(str(url))
    storage.prepare()
    return save_tables(storage, tables, **fields)


def test_a_checkpoint_shows_its_tables_tensors_and_state(recckpt, tmp_path):
    run = Run(tmp_path).train(10)
    for path in (tmp_path, tmp_path / "ckpt_10", f"{tmp_path}/ckpt_10/", f"file://{tmp_path}/ckpt_10"):
        answer = recckpt("show", path)
        assert (answer.code, answer.err) == (0, "")
        assert ["checkpoint", "ckpt_10"] in answer.lines
        assert ["step", "10"] in answer.lines
        assert [line[1] for line in answer.lines if line[:1] == ["item"]] == [str(len(run.model.items))]
        assert "embedding float32[4], sparse_adamw_exp_avg float32[4]" in answer.out
        assert ["top.weight", "float32", "(1,", "8)", "32", "B"] in answer.lines
        assert ["sparse_lr_0", "0.01"] in answer.lines


def test_a_table_that_was_live_is_shown_as_one(recckpt, tmp_path):
    live = {"n_rows": 2000, "columns": [[0, 1], [1, 2]]}
    write_full(tmp_path, "ckpt_1", {"item": Held(1, [({1: (1, 1)}, ())], live=live), "user": Held(0, [({}, ())])})
    [line] = [line for line in recckpt("show", tmp_path).lines if line[:1] == ["item"]]
    assert line[-5:] == ["live,", "2,000", "rows", "embedding", "float32[2]"]
    item, user = recckpt("show", tmp_path, "--json").json["tables"]
    assert (item["live"], "live" in user) == (live, False)


def test_json_has_all_of_it(recckpt, tmp_path):
    run = Run(tmp_path).train(10)
    shown = recckpt("show", tmp_path, "--json").json
    assert (shown["id"], shown["url"], shown["step"], shown["shards"]) == (
        "ckpt_10",
        str(tmp_path / "ckpt_10"),
        10,
        1,
    )
    item = next(table for table in shown["tables"] if table["name"] == "item")
    n_rows = len(run.model.items)
    assert (item["rows"], item["bytes"]) == (n_rows, n_rows * (8 + 3 * 16))
    assert item["slots"][0] == {"name": "embedding", "dtype": "float32", "shape": [4]}
    names = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert names["norm.num_batches_tracked"] == {
        "name": "norm.num_batches_tracked",
        "dtype": "int64",
        "shape": [],
        "bytes": 8,
    }
    assert shown["state"]["sparse_lr_0"] == 0.01
    assert "torch" in shown["writer"]
    assert "files" not in shown


def test_files_are_listed_when_asked_for(recckpt, tmp_path):
    Run(tmp_path).train(10)
    forge = Forge(tmp_path / "ckpt_10")
    names = {file["name"] for file in forge.manifest["files"]}
    shown = recckpt("show", tmp_path, "--files", "--json").json
    assert {file["name"]: file["xxh3"] for file in shown["files"]} == {
        file["name"]: file.get("xxh3") for file in forge.manifest["files"]
    }
    assert names <= {line[0] for line in recckpt("show", tmp_path, "--files").lines if line}


def test_the_files_of_each_table_are_named_by_a_pattern_that_polars_reads_as_one_schema(recckpt, tmp_path):
    def tables(number):
        own = gen_slice(number, 2)
        ids = [id_ for id_ in range(40) if own.owns(np.array([id_]))[0]]
        wide, narrow = filled("wide", ids, shape=8), filled("narrow", ids, shape=4, slots={"sparse_step": ()})
        return [wide, narrow, filled("also wide", ids, shape=8), filled("new", [], shape=2)]

    storage = open_storage(str(tmp_path))
    save_tables(storage, tables(0), tables(1), concurrency=1)
    lines = [line.strip() for line in recckpt("show", tmp_path, "--files").out.splitlines() if "*" in line]
    patterns = {line.partition("  ")[0]: line.split()[-1] for line in lines}
    assert patterns["wide"] == patterns["also wide"] != patterns["narrow"]
    for name, n_tables in {"wide": 2, "narrow": 1}.items():
        frame = pl.read_ipc(str(tmp_path / "ckpt_1" / patterns[name]))
        assert frame["table"].n_unique() == n_tables
        assert sorted(frame.filter(pl.col("table") == name)["id"]) == list(range(40))
    listed = {table["name"]: table["files"] for table in recckpt("show", tmp_path, "--files", "--json").json["tables"]}
    assert listed["new"] == []
    for name, pattern in patterns.items():
        found = (tmp_path / "ckpt_1").glob(pattern)
        assert sorted(listed[name]) == sorted(str(path.relative_to(tmp_path / "ckpt_1")) for path in found)


def test_a_damaged_catalog_is_a_problem_and_the_files_are_listed(recckpt, tmp_path):
    saved(tmp_path, [filled("item", range(3))])
    flip_bit(tmp_path / "ckpt_1/sparse/00000-of-00001.json")
    answer = recckpt("show", tmp_path, "--files")
    assert answer.code == 1
    assert "sparse/00000-of-00001.json" in answer.err
    assert "sparse/00000-of-00001.g0.00.arrow" in answer.out


def test_any_storage_can_be_shown(recckpt, url):
    saved(url, [filled("item", range(3), shape=(2, 3), slots={"sparse_s": ()})], state={"auc": 0.7, "note": "a\nb"})
    answer = recckpt("show", url)
    assert answer.code == 0
    assert "embedding float32[2, 3], sparse_s float32" in answer.out
    assert "a; b" in answer.out
    assert "dense tensors" not in answer.out


def test_names_that_would_break_the_table_are_escaped(recckpt, tmp_path):
    names = ["line\nbreak", "表", " padded ", "esc\x1b[31m", 'quo"te', "user/1"]
    saved(tmp_path, [filled(name, [1]) for name in names])
    answer = recckpt("show", tmp_path)
    shown = [line.strip().partition("  ")[0] for line in answer.out.splitlines()]
    for name in ('"line\\nbreak"', "表", '" padded "', '"esc\\u001b[31m"', 'quo"te', "user/1"):
        assert name in shown
    starts = {line.index("embedding") for line in answer.out.splitlines() if "embedding" in line and line.isascii()}
    assert len(starts) == 1
    assert [table["name"] for table in recckpt("show", tmp_path, "--json").json["tables"]] == names


def test_damaged_dense_tensors_are_a_problem_and_the_rest_is_shown(recckpt, tmp_path):
    Run(tmp_path).train(10)
    Forge(tmp_path / "ckpt_10").write("dense/00000-of-00001.json", b"no index")
    answer = recckpt("show", tmp_path)
    assert answer.code == 1
    assert "ckpt_10/dense/00000-of-00001.json" in answer.err
    assert answer.err.count("\n") == 1
    assert ["checkpoint", "ckpt_10"] in answer.lines


def test_a_damaged_manifest_is_one_line_on_stderr(recckpt, tmp_path):
    Run(tmp_path).train(10)
    flip_bit(tmp_path / "ckpt_10" / "manifest.json")
    for path in (tmp_path, tmp_path / "ckpt_10"):
        answer = recckpt("show", path)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.splitlines()[-1].startswith("recckpt: ckpt_10/manifest.json")
        assert "Traceback" not in answer.err


def test_a_damaged_newest_is_passed_over_and_named(recckpt, tmp_path, caplog):
    Run(tmp_path, max_keep=2).train(20)
    flip_bit(tmp_path / "ckpt_20" / "manifest.json")
    answer = recckpt("show", tmp_path)
    assert answer.code == 0
    assert ["checkpoint", "ckpt_10"] in answer.lines
    assert "ckpt_20" in caplog.text


def test_what_was_left_out_of_a_table_or_made_narrower_is_said(recckpt, tmp_path):
    run = Run(
        tmp_path, save_slots=["!*@*_sq"], save_where={"item": {"sample": 0.5}}, store={"item@embedding": "bfloat16"}
    )
    run.train(10)
    said, shown = recckpt("show", tmp_path), recckpt("show", tmp_path, "--json").json
    item, user = sorted(shown["tables"], key=lambda table: table["name"])
    assert item["rows"] + item["reduced"]["rows"] == len(run.model.items)
    assert item["reduced"]["slots"] == user["reduced"]["slots"] == ["sparse_adamw_exp_avg_sq"]
    [narrowed] = item["reduced"]["narrowed"]
    assert (narrowed["slot"], narrowed["dtype"]) == ("embedding", "float32")
    assert f"'item' without sparse_adamw_exp_avg_sq; without {item['reduced']['rows']} rows (saved: in a" in said.out
    assert f"embedding narrower than float32, by {narrowed['error']:.3g} at most" in said.out
    assert "'user/1' without sparse_adamw_exp_avg_sq\n" in said.out
    assert "embedding bfloat16[4]" in said.out


def test_registered_objects_and_positions_are_listed(recckpt, tmp_path):
    model = torch.nn.Linear(2, 1)
    saver = Saver(model, output_dir=str(tmp_path))
    saver.register_for_checkpointing("adam", torch.optim.Adam(model.parameters()))
    saver.register_for_checkpointing("own", [1], per_rank=True)
    saver.register_for_checkpointing("note", {"a": 1})
    saver.register_io_state("clicks", Stream())
    saver.save("c")
    lines = recckpt("show", tmp_path).lines
    at = lines.index(["registered", "objects"])
    assert lines[at + 2 : at + 6] == [
        ["adam", "Adam,", "state", "of", "2", "parameters"],
        *(["note"], ["own", "one", "state", "a", "rank"], ["clicks", "position", "in", "the", "data"]),
    ]
    shown = recckpt("show", tmp_path, "--json").json
    assert shown["registered"][0] == {"name": "adam", "per_rank": False, "class": "Adam", "parameters": 2}
    assert [each["name"] for each in shown["registered"]] == ["adam", "note", "own"]
    assert shown["positions"] == ["clicks"]


def test_what_was_trained_and_not_saved_is_said_and_is_no_damage(recckpt, tmp_path):
    model = torch.nn.Linear(2, 1)
    saver, optimizer = Saver(model, output_dir=str(tmp_path)), torch.optim.Adam(model.parameters())
    optimizer.step()
    saver.save("c")
    lacks = "the state of Adam, which trained dense parameters"
    assert recckpt("show", tmp_path).lines[-2:] == [["lacks"], lacks.split()]
    verified = recckpt("verify", tmp_path)
    assert (verified.code, verified.lines[-1]) == (0, ["c:", "lacks", *lacks.split()])
    assert recckpt("show", tmp_path, "--json").json["lacks"] == [lacks]
    assert recckpt("verify", tmp_path, "--json").json["checkpoints"][0]["lacks"] == [lacks]
