"""RecIS checkpoints: any number of ranks, and a run that goes on from one."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.conversions import Code, rank_blocks, refused, rows_bytes, safetensors_bytes, table_bytes, write_recis
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.convert import export_checkpoint, import_checkpoint
from recckpt.errors import ConversionError
from recckpt.inspect.verify import verify
from recckpt.sparse import HashTable, SparseAdamW


def table(n_rows, dim, seed=0):
    random = np.random.default_rng(seed)
    values = {f"sparse_adamw_exp_avg{end}": random.standard_normal((n_rows, dim)).astype("f4") for end in ("", "_sq")}
    ids = random.choice(2**52, n_rows, replace=False).astype(np.int64)
    embedding = random.standard_normal((n_rows, dim)).astype("f4")
    return {"id": ids, "embedding": embedding, **values, "step_filter": np.arange(n_rows)[:, None]}


SCALARS = {
    "sparse_adamw_step": np.array([30]),
    "sparse_adamw_beta1": np.float32(0.9),
    "sparse_adamw_beta2": np.float32(0.999),
}


@mostly_slow()
@pytest.mark.parametrize(("ranks", "parallel"), [(1, 1), (2, 4), (5, 3), (3, 40)])
def test_rows_of_any_number_of_ranks_come_bit_for_bit(tmp_path, ranks, parallel):
    tables = {"user": table(50, 4), "item": table(20, 4, 1), "empty": table(0, 2), "one": table(1, 3)}
    source = write_recis(tmp_path / "ckpt_70", tables, ranks=ranks, parallel=parallel, scalars=SCALARS)

    done = import_checkpoint(source, tmp_path / "out", budget_bytes=1000)

    assert (done.ckpt_id, done.contents.format) == ("ckpt_70", "recis")
    assert not verify(str(tmp_path / "out"))
    for name, rows in tables.items():
        assert table_bytes(tmp_path / "out", name) == rows_bytes(rows)


def test_bool_slots_and_blocks_without_a_counterpart_are_listed(tmp_path):
    rows = {**table(9, 2), "seen": np.arange(9) % 2 == 0}
    odd = {"x" * 3 + "a" * 64 + "_step": torch.tensor(3), "t@filter_global_step": torch.tensor(3)}
    model = {"w": torch.ones(2), **odd}
    source = write_recis(tmp_path / "ckpt_1", {"t": rows}, scalars={**SCALARS, "own": np.ones(3)}, model=model)

    done = import_checkpoint(source, tmp_path / "out")

    left = {left.name for left in done.contents.left_out}
    assert {"table t, slot seen", "sparse_adamw_beta1", "sparse_adamw_beta2", *(f"model.pt {n}" for n in odd)} < left
    assert table_bytes(tmp_path / "out", "t") == rows_bytes({**rows, "seen": rows["seen"].astype(np.uint8)})
    assert CheckpointReader(tmp_path / "out").tensor_names() == ["w", "own"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = HashTable(4, name="user")
        self.top = nn.Linear(4, 1)


class Data:
    def __init__(self):
        self.at = 0

    def dump_io_state(self):
        return {"at": self.at}

    def load_io_state(self, state):
        self.at = state["at"]


def test_a_run_of_recis_goes_on_here(tmp_path):
    was = Model()
    adam = torch.optim.Adam(was.top.parameters(), lr=0.5)
    was.top(torch.ones(1, 4)).sum().backward()
    adam.step()
    extra = {"global_step": torch.tensor(70), "dense_optimizer": adam.state_dict()}
    rows = {name: values for name, values in table(50, 4).items() if name != "step_filter"}
    source = write_recis(
        tmp_path / "recis/ckpt_70",
        {"user": rows},
        scalars=SCALARS,
        model=was.top.state_dict(prefix="top."),
        extra=extra,
        positions=[{"train_io": {"at": 5}}, {"train_io": {"at": 6}}],
    )
    (tmp_path / "recis/checkpoint").write_text("ckpt_70\n")
    done = import_checkpoint(source.parent, tmp_path / "out")
    assert len(CheckpointReader(tmp_path / "out").manifest.shards) == len(done.contents.io_state) == 2

    model = Model()
    sparse, dense, data = SparseAdamW([model.user], lr=0.1), torch.optim.Adam(model.top.parameters()), Data()
    saver = Saver(model, sparse, output_dir=tmp_path / "out")
    saver.register_for_checkpointing("dense_optimizer", dense)
    saver.register_io_state("train_io", data)
    manager = CheckpointManager(saver, save_interval=10)
    manager.restore(load_conf={"exclude": ["io_state"]})  # of two ranks, on one

    assert manager.global_step == 70
    assert torch.equal(model.top.weight, was.top.weight)
    assert torch.equal(dense.state_dict()["state"][0]["exp_avg"], adam.state_dict()["state"][0]["exp_avg"])
    assert sparse.state_dict()["state"] == {"user": {"step": 30}}
    assert sparse.param_groups[0]["lr"] == 0.1
    ids = torch.from_numpy(rows["id"])
    assert torch.equal(model.user(ids).detach(), torch.from_numpy(rows["embedding"]))


def test_a_model_bank_names_what_it_named_before(tmp_path):
    write_recis(tmp_path / "a/ckpt_7", {"user": table(50, 4)}, model={"top.weight": torch.ones(1, 4)})
    import_checkpoint(tmp_path / "a/ckpt_7", tmp_path / "bank")
    model = Model()
    saver = Saver(model, SparseAdamW([model.user]), output_dir=tmp_path / "out")
    bank = [{"path": str(tmp_path / "bank"), "load": ["user", "top.weight"], "exclude": ["user@*avg*"]}]
    CheckpointManager(saver, save_interval=10).load_model_bank(bank)
    assert (len(model.user), model.top.weight.tolist()) == (50, [[1.0] * 4])


def rewrite(path, name, change):
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_text(json.dumps(value))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def rename_slice(old, new):
    def change(keys):
        for key, value in keys.items():
            keys[key] = value.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda path: (path / "index").unlink(), "ckpt_1/index: found no such file"),
        (lambda path: (path / "tensorkey.json").unlink(), "tensorkey.json: found no such file"),
        (lambda path: (path / "model-000001-of-000007.safetensors").unlink(), "model-000001-of-000007.safetensors: fo"),
        (lambda path: cut(path / "model-000001-of-000007.safetensors"), "the file is cut"),
        (lambda path: (path / "io_state_1.pt").unlink(), "io_state_1.pt: found no such file"),
        (lambda path: (path / "io_state_count").write_text("x"), "io_state_count: found"),
        (lambda path: (path / "index").write_text("{"), "index: found invalid JSON"),
        (lambda path: rewrite(path, "index", lambda i: i["block_index"].popitem()), "index at block"),
        (lambda path: rewrite(path, "index", lambda i: i["block_index"].update(x=0)), "block 'x': found no such block"),
        (lambda path: rewrite(path, "tensorkey.json", rename_slice("00000@32768", "00000@32000")), "[32000, 32768)"),
        (lambda path: rewrite(path, "tensorkey.json", rename_slice("00000@32768", "00000@40000")), "in two slices"),
        (lambda path: rewrite(path, "tensorkey.json", rename_slice("32768@65536@", "32768@65535@")), "[65535, 65536)"),
        (lambda path: rewrite(path, "tensorkey.json", rename_slice("t@", "t#")), "expected TABLE@SLOT"),
        (
            lambda path: rewrite(path, "tensorkey.json", rename_slice("@embedding^", "@vector^")),
            "with id and embedding",
        ),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_refused(tmp_path, damage, match):
    positions = [{"train_io": None}, {"train_io": None}]
    source = write_recis(tmp_path / "ckpt_1", {"t": table(9, 2)}, positions=positions)
    damage(source)
    refused(source, re.escape(match), format="recis")


def test_two_dense_blocks_of_one_name_are_refused(tmp_path):
    halves = {"w^0@2@4": np.ones(2, "f4"), "w^2@4@4": np.zeros(2, "f4")}
    source = write_recis(tmp_path / "ckpt_1", {"t": table(9, 2)}, scalars=halves)
    refused(source, r"index at dense 'w': found .*, expected one block", format="recis")


def test_ids_in_a_slice_that_is_not_theirs_and_ids_twice_are_refused(tmp_path):
    rows = table(9, 2)
    source = write_recis(tmp_path / "ckpt_1", {"t": rows}, ranks=1, parallel=1)
    strange = rows | {"id": np.arange(9)}
    strange["id"][4] = 3
    for changed, match in ((strange, "id 3 twice"), (None, "expected ids whose remainder")):
        blocks = rank_blocks({"t": changed or rows}, 0, 1)
        file = source / "model-000000-of-000000.safetensors"
        file.write_bytes(safetensors_bytes({key: values for key, _, values in blocks}))
        if changed is None:
            keys = json.loads((source / "tensorkey.json").read_text())
            halves = {k.replace("_0_1", f"_{n}_2"): v for n in range(2) for k, v in keys.items()}
            spans = {0: "00000@00001", 1: "00001@65536"}
            halves = {k: v.replace("00000@65536@", f"{spans[int(k[-3])]}@") for k, v in halves.items()}
            doubled = {k.replace("_0_1", f"_{n}_2"): values for n in range(2) for k, _, values in blocks}
            file.write_bytes(safetensors_bytes(doubled))
            (source / "tensorkey.json").write_text(json.dumps(halves))
            index = {"file_index": {file.name: 0}, "block_index": dict.fromkeys(doubled, 0)}
            (source / "index").write_text(json.dumps(index))
        refused(source, match)


@pytest.mark.parametrize("name", ["model.pt", "extra.pt", "io_state_0.pt"])
def test_pickles_that_need_code_are_not_run(tmp_path, name, capsys):
    source = write_recis(tmp_path / "ckpt_1", {"t": table(9, 2)}, positions=[{}], model={}, extra={})
    torch.save({"x": Code()}, source / name)
    refused(source, f"{name}: found a pickle that needs code")
    assert "must not run" not in capsys.readouterr().out


def test_what_goes_out_to_recis_is_as_recis_writes_it_and_comes_back(tmp_path):
    rows = {"user": table(50, 4), "empty": table(0, 2)}
    extra = {"global_step": torch.tensor(70), "own": {"a": 1}}
    positions = [{"train_io": {"at": 5}}, {"train_io": None}]
    model = {"w": torch.randn(2, 3), "half": torch.ones(2).bfloat16()}
    source = write_recis(tmp_path / "ckpt_70", rows, scalars=SCALARS, model=model, extra=extra, positions=positions)
    import_checkpoint(source, tmp_path / "a")
    done = export_checkpoint(tmp_path / "a", tmp_path / "recis", to="recis")
    assert [left.name for left in done.left_out] == ["random generators"]

    made = tmp_path / "recis/ckpt_70"
    assert (tmp_path / "recis/checkpoint").read_text() == "ckpt_70\n"
    assert (made / "io_state_count").read_text() == "2"
    keys = json.loads((made / "tensorkey.json").read_text())
    assert keys["user.embedding/part_0_1"] == "user@embedding^00000@65536@65536"
    with safe_open(made / "model-000000-of-000000.safetensors", "pt") as file:
        assert set(file.keys()) == {*keys, "sparse_adamw_step^ "}
        assert file.metadata() is None
        assert file.get_tensor("sparse_adamw_step^ ").tolist() == [30]
    index = json.loads((made / "index").read_text())
    assert index["file_index"] == {"model-000000-of-000000.safetensors": 0}
    assert index["block_index"].keys() == {*keys, "sparse_adamw_step^ "}
    served = json.loads((made / "torch_rank_weights_embs_table_multi_shard.json").read_text())
    assert served["user.embedding/part_0_1"]["hashmap_key"] == "user.id/part_0_1"
    assert torch.equal(torch.load(made / "model.pt", weights_only=True)["w"], model["w"])
    assert torch.load(made / "extra.pt", weights_only=True) == {"global_step": torch.tensor(70), "own": {"a": 1}}

    import_checkpoint(tmp_path / "recis", tmp_path / "b")
    for name in rows:
        assert table_bytes(tmp_path / "b", name) == table_bytes(tmp_path / "a", name)
    first, second = (CheckpointReader(tmp_path / each).manifest for each in "ab")
    assert (first.names, first.tables, first.step) == (second.names, second.tables, second.step)


def test_a_run_from_here_goes_out_with_its_step_and_betas_and_what_recis_lacks_is_listed(tmp_path):
    model = Model()
    sparse = SparseAdamW([model.user], lr=0.1, betas=(0.5, 0.25))
    model.user(torch.arange(9)).sum().backward()
    sparse.step()
    model.user.add_slot("own", ())
    Saver(model, sparse, output_dir=tmp_path / "run").save("a", step=4)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", to="recis")
    assert "table user, slot own" in {left.name for left in done.left_out}
    with safe_open(tmp_path / "out/ckpt_4/model-000000-of-000000.safetensors", "pt") as file:
        assert [file.get_tensor(f"sparse_adamw_{name}^ ").item() for name in ("step", "beta1", "beta2")] == [
            1,
            0.5,
            0.25,
        ]


def test_a_run_from_here_resumes_with_its_dense_optimizer_from_what_it_had_exported(tmp_path):
    def run(path):
        model = Model()
        sparse, dense = SparseAdamW([model.user]), torch.optim.Adam(model.top.parameters())
        saver = Saver(model, sparse, output_dir=path)
        saver.register_for_checkpointing("dense_optimizer", dense)
        return model, dense, saver

    model, dense, saver = run(tmp_path / "run")
    model.top(torch.ones(1, model.top.in_features)).sum().backward()
    dense.step()
    saver.save("a", step=4)
    export_checkpoint(tmp_path / "run", tmp_path / "recis", to="recis")
    import_checkpoint(tmp_path / "recis", tmp_path / "back")
    _, again, saver = run(tmp_path / "back")
    saver.load()
    assert str(again.state_dict()) == str(dense.state_dict())


@pytest.mark.parametrize("id_", [-1, 2**52])
def test_ids_that_recis_would_cut_are_refused(tmp_path, id_):
    np.savez(tmp_path / "t.npz", id=np.array([id_]), embedding=np.ones((1, 2), np.float32))
    import_checkpoint(tmp_path / "t.npz", tmp_path / "run")
    with pytest.raises(ConversionError, match=f"the id {id_}, expected ids of 52 bits"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="recis")
    assert not (tmp_path / "out").exists()
