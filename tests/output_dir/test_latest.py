"""``latest`` and ``latest~1`` in place of a checkpoint's own name."""

import pytest
from support.forge import filled, save_tables

from recckpt import CheckpointReader
from recckpt.cli import main
from recckpt.errors import CheckpointNotFoundError
from recckpt.storage import open_storage


def saved(url, *ids):
    storage = open_storage(str(url))
    storage.prepare()
    for number in ids:
        save_tables(storage, [filled("item", range(number))], ckpt_id=f"ckpt_{number}")
    return storage


def test_it_counts_back_from_the_newest(url):
    saved(url, 1, 2, 3)
    found = [
        CheckpointReader(f"{url}/{name}").manifest.ckpt_id for name in ("latest", "latest~0", "latest~1", "latest~2")
    ]
    assert found == ["ckpt_3", "ckpt_3", "ckpt_2", "ckpt_1"]


def test_one_that_is_older_than_all_is_named_with_those_that_there_are(url):
    saved(url, 1, 2)
    with pytest.raises(
        CheckpointNotFoundError, match=r"'latest~2': there are only 2 checkpoints; there are 'ckpt_1', 'ckpt_2'"
    ):
        CheckpointReader(f"{url}/latest~2")


def test_what_really_has_the_name_comes_first(tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path / "latest", 5)
    assert CheckpointReader(tmp_path / "latest").manifest.ckpt_id == "ckpt_5"


@pytest.mark.parametrize("name", ["latest~", "latest~x", "latest~-1", "Latest", "latest~1~1", "newest"])
def test_other_names_are_none(tmp_path, name):
    saved(tmp_path, 1, 2)
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        CheckpointReader(tmp_path / name)


def test_a_directory_that_is_not_there_is_not_one_without_checkpoints(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere: does not exist$"):
        CheckpointReader(tmp_path / "nowhere/latest")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"empty: found no committed checkpoint$"):
        CheckpointReader(tmp_path / "empty/latest")


@pytest.mark.parametrize(
    "command", [["show"], ["head", "item"], ["get", "item", "0"], ["verify"], ["sql", "select 1"], ["diff", "latest~1"]]
)
def test_commands_take_it_where_they_ask_for_a_checkpoint(tmp_path, capsys, command):
    saved(tmp_path, 2, 3)
    name, *rest = command
    rest = [f"{tmp_path}/{argument}" if name == "diff" else argument for argument in rest]
    assert main([name, f"{tmp_path}/latest~1", *rest, "--json"]) == 0
    assert "ckpt_3" not in capsys.readouterr().out
