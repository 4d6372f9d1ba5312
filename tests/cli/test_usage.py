"""Wrong arguments get the usage of their command and the name that was meant; help has examples that work."""

from __future__ import annotations

import shlex

import pytest

from recckpt.cli.commands import parsers
from recckpt.cli.examples import EXAMPLES


@pytest.mark.parametrize(
    ("line", "usage", "message"),
    [
        ("shwo runs", "usage: recckpt [-h]", "there is no command 'shwo'; did you mean 'show'?"),
        ("frobnicate", "usage: recckpt [-h]", "there is no command 'frobnicate'; there are ls, show, "),
        ("ls runs --jsn", "usage: recckpt ls [-h]", "there is no option '--jsn'; did you mean '--json'?"),
        ("get runs item --colums=a 1", "usage: recckpt get", "did you mean '--columns'?"),
        ("get runs item --colums a 1", "usage: recckpt get", "did you mean '--columns'?"),
        ("get runs item one", "usage: recckpt get", "invalid id value: 'one'"),
        ("mirror runs to --max-upload-rate lots", "usage: recckpt mirror", "such as 500000 or 50MB, found 'lots'"),
        ("compact runs --budget 0", "usage: recckpt compact", "a number of bytes such as 500000 or 50MB, found '0'"),
        ("report runs --failures-per-day lots", "usage: recckpt report", "above 0 such as 0.5 or 3, found 'lots'"),
        ("report runs --failures-per-day nan", "usage: recckpt report", "above 0 such as 0.5 or 3, found 'nan'"),
        ("ls runs -x", "usage: recckpt ls", "unrecognized arguments: -x"),
        ("ls runs more", "usage: recckpt ls", "unrecognized arguments: more"),
        ("verify", "usage: recckpt verify", "required: CKPT|DIR"),
        ("verify runs --table t", "usage: recckpt verify", "--table and --print-ids go with --absent"),
        ("forget runs --table t", "usage: recckpt forget", "--table and --ids go together"),
    ],
)
def test_a_wrong_argument_gets_the_usage_of_its_command(recckpt, line, usage, message):
    answer = recckpt(*line.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(usage)
    assert message in answer.err.splitlines()[-1]


@pytest.mark.parametrize("line", ["sql runs '-- a comment, no option\nselect 1'", "get runs t -- --1", "ls runs --js"])
def test_what_only_looks_like_an_option_is_none(recckpt, line):
    assert "there is no option" not in recckpt(*shlex.split(line)).err


def test_a_misspelt_table_or_slot_is_told_the_nearest(recckpt, tmp_path):
    from support.forge import filled, save_tables

    from recckpt.storage import open_storage

    save_tables(open_storage(str(tmp_path)), [filled("item", [1])])
    (tmp_path / "ids.txt").write_text("1\n")
    for line in (
        "head {} itme",
        "get {} itme 1",
        "salvage {}/latest itme --out {}/x.arrow",
        "export {} {}/x --to npy --table itme",
        "verify {} --absent {}/ids.txt --table itme",
        "forget {} --table itme --ids {}/ids.txt",
    ):
        answer = recckpt(*line.replace("{}", str(tmp_path)).split())
        assert answer.code in (1, 2), line
        assert "did you mean 'item'?" in answer.err, line
    assert "did you mean 'embedding'?" in recckpt("head", tmp_path, "item", "--columns", "embeding").err


def test_each_command_has_examples_that_it_takes(recckpt):
    parser, commands = parsers()
    assert set(EXAMPLES) == set(commands)
    for name, lines in EXAMPLES.items():
        assert lines[0] in recckpt(name, "--help").out
        for line in lines:
            words = shlex.split(line, comments=True)
            assert words[:2] == ["recckpt", name]
            parser.parse_args(words[1:])
