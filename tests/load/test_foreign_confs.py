"""Configurations as other tools hold them, and as RecIS writes them, say the same as ours."""

import types
from collections import UserDict, UserList

import pytest
import torch
from support.bank_runs import run, saved, slots_of, table, values_of
from torch import nn

from recckpt import CheckpointManager
from recckpt.errors import LoadConfError, StateMismatchError
from recckpt.load.conf import parse_bank, parse_load_conf

CONF = {
    "load": ["t*", "dense"],
    "exclude": ["*avg*"],
    "oname": [{"t": "u"}],
    "where": {"ids": [1, 2], "frequency": {"min": 1}},
    "on_mismatch": {"t": "cast"},
}


def frozen(value):
    """Return nested configuration in mappings and sequences that are neither dicts nor lists."""
    if isinstance(value, dict):
        return types.MappingProxyType({key: frozen(item) for key, item in value.items()})
    return UserList(frozen(item) for item in value) if isinstance(value, list) else value


def of_omegaconf(value):
    return pytest.importorskip("omegaconf").OmegaConf.create(value)


@pytest.mark.parametrize("make", [of_omegaconf, frozen, UserDict])
def test_any_mapping_and_sequence_is_a_configuration(make):
    assert parse_load_conf(make(CONF)) == parse_load_conf(CONF)
    bank = [{"path": "a", **CONF}, {"path": "b", "skip": False, "where": [1]}]
    found, expected = ([], []), ([], [])
    assert parse_bank(make({"bank": bank})["bank"], found[0]) == parse_bank(bank, expected[0])
    assert found == expected


def test_a_bank_of_omegaconf_is_loaded_with_its_references(tmp_path):
    url = saved(tmp_path / "a", table("u", range(3), 2.0))
    made = of_omegaconf({"root": str(tmp_path), "bank": [{"path": "${root}/a", "oname": [{"t": "u"}]}]})
    t = table("t")
    manager = CheckpointManager(run(tmp_path / "own", t), 1)
    assert manager.load_model_bank(made.bank).sources == (f"{url}/c",)
    assert len(t) == 3
    t = table("t")
    run(tmp_path / "own", t).load(url, load_conf=of_omegaconf({"oname": {"t": "u"}, "load": ["t"]}))
    assert len(t) == 3


@pytest.mark.parametrize("value", ["dense", b"dense", {b"dense"}, 3, [b"dense"], {"dense": 1}])
def test_what_only_looks_like_a_list_is_refused(value):
    with pytest.raises(LoadConfError, match="expected a list of names"):
        parse_load_conf({"load": value})


def test_the_call_of_recis_takes_a_path_and_the_rest_of_the_entry(tmp_path):
    url = saved(tmp_path / "a", table("t", [1], 2.0), value=3.0, top=nn.Linear(1, 1))
    for args, rows, weight in (
        ((url,), 1, 3.0),
        ((url, {"load": ["sparse"]}), 1, 0.0),
        ((url, {"load": ["*"], "exclude": ["sparse"], "strict": False}), 0, 3.0),
        ((tmp_path / "a", None), 1, 3.0),
    ):
        t, top = table("t"), nn.Linear(1, 1)
        saver = run(tmp_path / "own", t, top=top)
        saver.plan(*args)
        saver.load_by_config(*args)
        assert (len(t), top.weight.item()) == (rows, weight)
    for args in ((url, ["sparse"]), ({"path": url}, {"load": []}), ([{"path": url}], {"load": []})):
        with pytest.raises(LoadConfError, match="conf: found"):
            saver.load_by_config(*args)


@pytest.mark.parametrize(
    "oname", [[{"t@id": "u@id"}, {"t@embedding": "u@embedding"}], [{"*t@embedding": "*u@embedding"}]]
)
def test_a_rename_of_ids_and_embeddings_renames_the_table(tmp_path, oname):
    trained = table("u", range(3), 1.0)
    url = saved(tmp_path / "a", trained, table("t", [9], 9.0), optimizer="adam", steps=2)
    t = table("t")
    saver = run(tmp_path / "own", t, optimizer="adam")
    saver.load_by_config(url, {"load": ["t"], "oname": oname})
    assert (values_of(t), slots_of(t)) == (values_of(trained), slots_of(trained))
    assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": 2}}


def test_the_objects_that_recis_counts_among_the_positions_are_left_with_them(tmp_path):
    def made(url, value):
        saver = run(url, table("t"), top=nn.Linear(1, 1))
        for name in ("train_window_io", "eval_window_io", "train_epoch", "note"):
            saver.register_for_checkpointing(name, torch.tensor(value))
        return saver

    made(tmp_path / "a", 5).save("c")

    def taken(**conf):
        saver = made(tmp_path / "own", 0)
        saver.load_by_config(str(tmp_path / "a"), conf)
        return {name for name in saver._extra if int(saver.get_extra_data(name)) == 5}

    assert taken(exclude=["io_state"]) == taken() == {"note"}
    assert taken(load=["io_state"]) == {"train_window_io", "eval_window_io", "train_epoch"}
    assert taken(load=["*", "train_epoch"]) == {"note", "train_epoch"}
    own = made(tmp_path / "a", 0)
    own.load()
    assert int(own.get_extra_data("train_epoch")) == 5


def test_a_misfit_of_a_bank_names_the_entry(tmp_path):
    urls = [saved(tmp_path / name, table(f"t{name}", [1], dim=6), top=nn.Linear(3, 1)) for name in "ab"]
    saver = run(tmp_path / "own", table("ta"), table("tb"), top=nn.Linear(3, 1))
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config([{"path": urls[0]}, {"path": urls[1], "exclude": ["tb"]}])
    assert str(caught.value).startswith(
        f"bank[0] ({urls[0]}/c) does not fit the model:\n  'ta@embedding': found float32"
    )
    assert caught.value.mismatched == {"ta@embedding": ("float32 (6,)", "float32 (4,)")}
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config([{"path": url} for url in urls])
    text = str(caught.value)
    assert text.startswith(f"bank[0] ({urls[0]}/c) and bank[1] ({urls[1]}/c) do not fit the model:")
    assert "'ta@embedding': found float32 (6,) in bank[0], expected" in text
    assert "'tb@embedding': found float32 (6,) in bank[1], expected" in text
    with pytest.raises(StateMismatchError, match=r"bank\[1\] .* does not fit the model:\n  missing"):
        saver.load_by_config([{"path": urls[0], "load": []}, {"path": urls[1], "strict": True}])
