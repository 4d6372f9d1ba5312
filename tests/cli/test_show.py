"""``show``, and all commands on deltas."""

import io
import json
import warnings

import fsspec
import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.builders import Run, Stream, flip_bit
from support.conversions import write_recis
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import Held, write_compacted, write_delta, write_full
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver, load_into
from recckpt.errors import CheckpointNotFoundError
from recckpt.format.buckets import gen_slice
from recckpt.policies import Choose
from recckpt.storage import open_storage


def saved(url, tables, **fields):
    storage = open_storage(str(url))
    storage.prepare()
    return save_tables(storage, tables, **fields)


def test_a_checkpoint_shows_its_tables_tensors_and_state_and_json_has_all_of_it(recckpt, tmp_path):
    run = Run(tmp_path).train(10)
    n_rows = len(run.model.items)
    for path in (tmp_path, tmp_path / "ckpt_10", f"{tmp_path}/ckpt_10/", f"file://{tmp_path}/ckpt_10"):
        answer = recckpt("show", path)
        assert (answer.code, answer.err) == (0, "")
        assert ["checkpoint", "ckpt_10"] in answer.lines
        assert ["step", "10"] in answer.lines
        assert [line[1] for line in answer.lines if line[:1] == ["item"]] == [str(n_rows)]
        assert "embedding float32[4], sparse_adamw_exp_avg float32[4]" in answer.out
        assert ["top.weight", "float32", "(1,", "8)", "32", "B"] in answer.lines
        assert ["sparse_lr_0", "0.01"] in answer.lines
    shown = recckpt("show", tmp_path, "--json").json
    url = str(tmp_path / "ckpt_10")
    assert [shown[key] for key in ("id", "url", "step", "shards")] == ["ckpt_10", url, 10, 1]
    item = next(table for table in shown["tables"] if table["name"] == "item")
    assert (item["rows"], item["bytes"]) == (n_rows, n_rows * (8 + 3 * 16))
    assert item["slots"][0] == {"name": "embedding", "dtype": "float32", "shape": [4]}
    number = {"name": "norm.num_batches_tracked", "dtype": "int64", "shape": [], "bytes": 8}
    assert number in shown["tensors"]
    assert shown["state"]["sparse_lr_0"] == 0.01
    assert "torch" in shown["writer"]
    assert "files" not in shown
    files = {file["name"]: file.get("xxh3") for file in Forge(tmp_path / "ckpt_10").manifest["files"]}
    shown = recckpt("show", tmp_path, "--files", "--json").json
    assert {file["name"]: file["xxh3"] for file in shown["files"]} == files
    assert files.keys() <= {line[0] for line in recckpt("show", tmp_path, "--files").lines if line}


def test_a_table_that_was_live_is_shown_as_one(recckpt, tmp_path):
    live = {"n_rows": 2000, "columns": [[0, 1], [1, 2]]}
    write_full(tmp_path, "ckpt_1", {"item": Held(1, [({1: (1, 1)}, ())], live=live), "user": Held(0, [({}, ())])})
    [line] = [line for line in recckpt("show", tmp_path).lines if line[:1] == ["item"]]
    assert line[-5:] == ["live,", "2,000", "rows", "embedding", "float32[2]"]
    item, user = recckpt("show", tmp_path, "--json").json["tables"]
    assert (item["live"], "live" in user) == (live, False)


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


@pytest.mark.parametrize(
    "command",
    [["show"], ["show", "--files"], ["ls"], ["verify"], ["repair"], ["compact"], ["watch", "--once"]],
    ids=" ".join,
)
def test_a_control_character_in_the_path_itself_is_escaped(recckpt, tmp_path, command):
    path = tmp_path / "esc\x1b[31m\n"
    saved(path, [filled("t", [1])])
    answer = recckpt(*command, path)
    assert "\x1b" not in answer.out + answer.err
    assert "[31m\n" not in answer.out + answer.err


def test_damage_is_a_problem_and_the_rest_is_shown(recckpt, tmp_path, caplog):
    Run(tmp_path, max_keep=2).train(20)
    flip_bit(tmp_path / "ckpt_20" / "manifest.json")
    answer = recckpt("show", tmp_path)
    assert answer.code == 0
    assert ["checkpoint", "ckpt_10"] in answer.lines
    assert "ckpt_20" in caplog.text
    Forge(tmp_path / "ckpt_10").write("dense/00000-of-00001.json", b"no index")
    answer = recckpt("show", tmp_path / "ckpt_10")
    assert answer.code == 1
    assert "ckpt_10/dense/00000-of-00001.json" in answer.err
    assert answer.err.count("\n") == 1
    assert ["checkpoint", "ckpt_10"] in answer.lines
    flip_bit(tmp_path / "ckpt_10" / "manifest.json")
    for path, name in ((tmp_path, ""), (tmp_path / "ckpt_10", "ckpt_10"), (tmp_path / "ckpt_20", "ckpt_20")):
        answer = recckpt("show", path)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err.splitlines()[-1].startswith(f"recckpt: {name or 'ckpt_'}")
        assert "Traceback" not in answer.err


def test_what_was_left_out_of_a_table_or_made_narrower_is_said(recckpt, tmp_path):
    run = Run(
        tmp_path,
        choose=Choose(slots=["!*@*_sq"], where={"item": {"sample": 0.5}}, store={"item@embedding": "bfloat16"}),
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
        *(["note"], ["own", "one", "state", "per", "rank"], ["clicks", "position", "in", "the", "data"]),
    ]
    shown = recckpt("show", tmp_path, "--json").json
    assert shown["registered"][0] == {"name": "adam", "per_rank": False, "class": "Adam", "parameters": 2}
    assert [each["name"] for each in shown["registered"]] == ["adam", "note", "own"]
    assert shown["positions"] == ["clicks"]


def test_what_was_trained_and_not_saved_is_said_and_is_no_damage(recckpt, tmp_path):
    model = torch.nn.Linear(2, 1)
    saver, optimizer = Saver(model, output_dir=str(tmp_path)), torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saver.save("c")
    lacks = "the state of the optimizer that trained 'weight', 'bias'"
    assert recckpt("show", tmp_path).lines[-2:] == [["lacks"], lacks.split()]
    verified = recckpt("verify", tmp_path)
    assert (verified.code, verified.lines[-1]) == (0, ["c:", "lacks", *lacks.split()])
    assert recckpt("show", tmp_path, "--json").json["lacks"] == [lacks]
    assert recckpt("verify", tmp_path, "--json").json["checkpoints"][0]["lacks"] == [lacks]


@pytest.fixture
def runs(tmp_path):
    """Of a full checkpoint with the ids 0 to 5 and a delta: 1 has changed, 9 is new, 2 and 77 were deleted."""
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    write_delta(counting(tmp_path / "runs")[0], "ckpt_2", 6, [({1: (7, 7), 9: (9, 9)}, [2, 77])])
    return tmp_path / "runs"


def test_get_and_head_give_the_rows_of_the_chain_and_verify_counts_deletes_of_ids_that_are_not_there(recckpt, runs):
    rows = recckpt("head", runs, "t", "--json").json["rows"]
    assert {row["id"]: row["embedding"][0] for row in rows} == {0: 0, 1: 7, 3: 3, 4: 4, 5: 5, 9: 9}
    answer = recckpt("get", runs, "t", "9", "2", "1", "--json")
    assert [row["id"] for row in answer.json["rows"]] == [9, 1]
    assert (answer.code, answer.json["missing"]) == (1, [2])
    answer = recckpt("verify", runs)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "ckpt_2: 1 delete of absent ids, which is harmless"
    found = recckpt("verify", runs, "--json").json["checkpoints"]
    assert {entry["directory"]: entry["absent_deletes"] for entry in found} == {"ckpt_1": 0, "ckpt_2": 1}


def test_show_says_what_a_delta_stands_on_and_what_it_holds(recckpt, runs):
    base = counting(runs)[0]
    answer = recckpt("show", runs)
    assert answer.code == 0
    assert ["kind", "delta", "on", "ckpt_1"] in answer.lines
    assert [line[:3] for line in answer.lines if line and line[0].startswith("ckpt_")] == [
        ["ckpt_2/", "delta", "2"],
        ["ckpt_1/", "full", "6"],
    ]
    assert any("2 rows, 2 deletes" in line for line in answer.out.splitlines())
    shown = recckpt("show", runs, "--json").json
    assert (shown["kind"], [link["directory"] for link in shown["links"]]) == ("delta", ["ckpt_2", "ckpt_1"])
    assert shown["tables"][0]["delta"] == {"upserts": 2, "deletes": 2, "replaced": False}
    assert (shown["rows"], shown["supersedes"]) == (6, None)
    assert "kind" not in [line[0] for line in recckpt("show", base.directory).lines if line]
    files = recckpt("show", runs, "--files", "--json").json["tables"][0]["files"]
    assert [name.split(".")[1] for name in files] == ["g0", "deletes"]


def test_show_says_that_a_checkpoint_is_a_form_and_which_tables_are_whole_in_a_delta(recckpt, runs):
    newest = max(counting(runs), key=lambda found: found.place)
    write_compacted(newest, {0: (0, 0), 1: (7, 7), 3: (3, 3), 4: (4, 4), 5: (5, 5), 9: (9, 9)})
    assert any("full, made from a delta" in line for line in recckpt("show", runs).out.splitlines())
    assert recckpt("show", runs, "--json").json["supersedes"]["save_id"] == newest.name[0]
    write_delta(newest, "ckpt_3", 1, [({1: (7, 7)}, [])], replaced=True)
    assert any("all rows" in line for line in recckpt("show", runs).out.splitlines())


def run(path, **modules):
    """Return the saver with deltas of a model with a table of 1,000 rows."""
    model = nn.ModuleDict({"t": filled("t", range(1000)), **modules})
    return Saver(model, output_dir=str(path), max_keep=None, deltas=True)


def test_a_bank_of_deltas_is_planned_as_the_saver_would_and_its_dense_state_consolidated(recckpt, tmp_path):
    source, bank = run(tmp_path / "source", top=nn.Linear(2, 1)), [{"path": str(tmp_path / "source")}]
    source.save("full")
    source.model["t"].insert(torch.tensor([5000]), torch.ones(1, 2))
    nn.init.constant_(source.model["top"].weight, 7)
    assert source.save("newest").kind == "delta"
    saver = run(tmp_path / "own")
    (tmp_path / "names").write_text("\n".join(saver.names()))
    (tmp_path / "bank.json").write_text(json.dumps(bank))
    answer = recckpt("plan", "--model-names", tmp_path / "names", tmp_path / "bank.json", "--json")
    assert (answer.code, answer.json) == (0, saver.plan(bank).to_dict())
    assert "1001" in answer.out
    assert recckpt("consolidate", tmp_path / "source", "--out", tmp_path / "model.pt").code == 0
    assert (torch.load(tmp_path / "model.pt")["top.weight"] == 7).all()


def saved_elsewhere(tmp_path):
    """Return checkpoints of other programs, by their format."""
    state = {"emb.weight": torch.rand(10, 4), "top.weight": torch.rand(3, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "model.pt")
    write_recis(tmp_path / "recis", {"user": {"id": np.arange(5), "embedding": np.zeros((5, 4), np.float32)}})
    return {"dcp": tmp_path / "dcp", "torch_state": tmp_path / "model.pt", "recis": tmp_path / "recis"}


@mostly_slow()
@pytest.mark.parametrize("format", ["dcp", "torch_state", "recis"])
def test_what_another_program_saved_is_shown_and_all_else_says_what_to_do_with_it(recckpt, tmp_path, format):
    path = saved_elsewhere(tmp_path)[format]
    answer = recckpt("show", path)
    assert (answer.code, answer.err) == (0, "")
    assert ["format", format] in answer.lines
    assert "It has no checksums that recckpt could check" in answer.out
    shown = recckpt("show", path, "--json").json
    if format == "recis":
        [table] = shown["tables"]
        assert (table["name"], table["rows"], [slot["name"] for slot in table["slots"]]) == ("user", 5, ["embedding"])
        assert ["user", "5", "120", "B", "embedding", "float32[4]"] in answer.lines
    else:
        assert [(one["name"], one["shape"], one["bytes"]) for one in shown["tensors"]] == [
            ("emb.weight", [10, 4], 160),
            ("top.weight", [3, 4], 48),
        ]
        assert ["top.weight", "float32", "(3,", "4)", "48", "B"] in answer.lines
    for command in (("report",), ("history", "t", "1"), ("consolidate",), ("export", "out", "--to", "npy")):
        answer = recckpt(command[0], path, *command[1:])
        assert answer.code != 0
        assert "`recckpt import` makes" in answer.err
    model = nn.Linear(1, 1)
    with pytest.raises(CheckpointNotFoundError, match="`recckpt import` makes"):
        load_into(model, path)
    with (
        Saver(model, output_dir=tmp_path / "run") as saver,
        pytest.raises(CheckpointNotFoundError, match="import` makes"),
    ):
        CheckpointManager(saver, 10).load_model_bank([{"path": str(path)}])


def test_a_file_of_another_program_is_shown_where_the_storage_does_not_tell_files_from_directories(recckpt):
    content = io.BytesIO()
    torch.save({"w": torch.ones(2, 3)}, content)
    fsspec.filesystem("memory").pipe_file("/shown/ok.pt", content.getvalue())
    answer = recckpt("show", "memory://shown/ok.pt")
    assert (answer.code, answer.err) == (0, "")
    assert ["w", "float32", "(2,", "3)", "24", "B"] in answer.lines
    assert recckpt("show", "memory://shown/other.pt").code == 1


@pytest.mark.parametrize(
    ("name", "helps"),
    [
        (
            "a.parquet",
            "`recckpt import` makes tables from the files of a directory, and `recckpt ls {}` reads one",
        ),
        ("id.npy", "`recckpt import` makes tables from the files of a directory, and `recckpt ls {}` reads one"),
        ("x.bin", "`recckpt ls {}` reads a file of torch.save, `recckpt import` takes one"),
        ("__0_0.distcp", "torch.distributed.checkpoint writes these, and .metadata last, which is missing here"),
    ],
)
def test_a_directory_of_files_that_are_no_checkpoint_as_they_lie_there_says_what_helps(recckpt, tmp_path, name, helps):
    (tmp_path / name).write_bytes(b"something")
    answer = recckpt("show", tmp_path)
    assert (answer.code, answer.out) == (1, "")
    helps = helps.format(tmp_path / name)
    assert f"found no committed checkpoint; there is {name}: {helps}" in answer.err


def test_a_directory_without_any_checkpoint_is_shown_as_nothing(recckpt, tmp_path):
    (tmp_path / "notes.txt").write_text("none")
    answer = recckpt("show", tmp_path)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.endswith("found no committed checkpoint\n")
