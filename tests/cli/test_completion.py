"""Tab completion: commands, options, checkpoints of the directory that was named, and tables; quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.forge import filled, save_tables

from recckpt.storage import open_storage

argcomplete = pytest.importorskip("argcomplete", reason="ARGCOMPLETE IS NOT INSTALLED")

COMPLETE = """
import io, json, os, sys
from recckpt.cli.commands import parsers
from recckpt.cli.completion import complete
def gone(code): raise SystemExit
found = {}
for line in json.loads(sys.argv[1]):
    out = io.StringIO()
    os.environ |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    try:
        complete(parsers()[0], exit_method=gone, output_stream=out)
    except SystemExit:
        pass
    found[line] = [word.strip() for word in out.getvalue().split("\\n") if word]
heavy = sorted({"torch", "numba", "pyarrow", "fsspec", "rich", "tqdm"} & set(sys.modules))
print(json.dumps([found, heavy]))
"""


def completed(cwd, *lines, code=COMPLETE):
    done = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], capture_output=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return json.loads(done.stdout)


@pytest.fixture
def runs(tmp_path):
    """Directory ``runs/clicks`` with three checkpoints, the manifest of one of them damaged, and some others."""
    storage = open_storage(str(tmp_path / "runs" / "clicks"))
    storage.prepare()
    for number in (1, 2, 3):
        save_tables(storage, [filled("item", [1]), filled("user", [1])], ckpt_id=f"ckpt_{number}")
    (tmp_path / "runs" / "clicks" / "ckpt_1" / "manifest.json").write_text("{")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "ids.txt").touch()
    return tmp_path


def test_a_line_is_completed(runs):
    names = ["ckpt_1", "ckpt_2", "ckpt_3", "latest", "latest~1", "latest~2"]
    found, heavy = completed(
        runs,
        "recckpt ver",
        "recckpt verify --q",
        "recckpt show runs/",
        "recckpt show runs/clicks/",
        "recckpt diff runs/clicks/ckpt_2 runs/clicks/ckpt_",
        "recckpt compact runs/clicks lat",
        "recckpt export runs/clicks/ckpt_3 out --since ckpt_",
        "recckpt head runs/clicks/ckpt_3 ",
        "recckpt forget runs/clicks --table u",
        "recckpt verify runs --absent i",
        "recckpt export runs/clicks out --to p",
        "recckpt head runs/nowhere/x ",
        "recckpt show s3://bucket/",
        "recckpt ls r",
    )
    assert list(found.values()) == [
        ["verify"],
        ["--quick"],
        ["runs/clicks/", "runs/other/"],
        [f"runs/clicks/{name}" for name in names],
        [f"runs/clicks/{name}" for name in names[:3]],
        names[3:],
        names[:3],
        ["item", "user"],
        ["user"],
        ["ids.txt"],
        ["parquet"],
        [],
        [],
        ["runs/"],
    ]
    assert heavy == []


def test_the_command_answers_the_shell(runs):
    line = "recckpt show runs/clicks/ckpt_3"
    env = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    env |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(runs / "out"), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "recckpt"], env=env, check=True, cwd=runs)
    assert (runs / "out").read_text().strip() == "runs/clicks/ckpt_3"
