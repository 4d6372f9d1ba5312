import pytest

from recckpt.errors import CorruptCheckpointError
from recckpt.format.safe_names import checked_name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/x",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "..",
        ".",
        "http://h/x",
        "file::x",
        "C:x",
        "a\\b",
        "a\0b",
        "x" * 256,
        "ü" * 128,
        "a/" * 512 + "b",
        "\ud800",
    ],
)
def test_a_name_that_could_lead_out_of_the_checkpoint_is_refused(name):
    with pytest.raises(CorruptCheckpointError, match="unsafe path") as caught:
        checked_name(name, "ckpt_1/manifest.json")
    assert caught.value.path == "ckpt_1/manifest.json"


@pytest.mark.parametrize(
    "name", ["model.pt", "sparse/00000-of-00001.json", "a b/ü…", "..a/b..", "x" * 255, "a/b/c/d/e"]
)
def test_a_plain_relative_name_passes(name):
    assert checked_name(name, "manifest.json") == name
