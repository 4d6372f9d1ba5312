import pytest
from support.delta_runs import rows_of, run_with_chain
from torch import nn

from recckpt import Saver
from recckpt.cli import commands
from recckpt.format import layout
from recckpt.output_dir.listing import attempt_dirs, locate
from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    return run_with_chain(tmp_path / "runs")


def test_an_offer_is_made_of_the_newest_and_waits(recckpt, run):
    answer = recckpt("compact", run.url)
    [directory] = [name for name in attempt_dirs(run) if layout.is_offer_dir(name)]
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("ckpt_3: offered 150 rows of 3 links, ")
    assert directory in answer.out
    assert "the trainer adopts it at its next save" in answer.out
    again = recckpt("compact", run.url)
    assert (again.code, again.err) == (0, "")
    assert f"{directory} is an offer of it" in again.out


def test_with_adopt_the_form_takes_the_place_of_the_delta(recckpt, run):
    expected = rows_of(run, "ckpt_3")
    answer = recckpt("compact", run.url, "--adopt")
    assert answer.out.splitlines()[1] == f"{run.url}: adopted 1 offer, and removed 1 delta that it replaces"
    found = locate(run, "ckpt_3")
    assert found.manifest.form_of
    assert set(attempt_dirs(run)) == {"ckpt_1", "ckpt_2", found.directory}
    assert rows_of(run, "ckpt_3") == expected
    assert run.read(layout.INDEX_FILE, 99) == b"ckpt_1\nckpt_2\nckpt_3\n"
    answer = recckpt("compact", run.url, "--adopt")
    assert answer.lines[0][:4] == ["ckpt_3:", "it", "is", "full"]
    assert "adopted 0 offers" in answer.out


def test_an_offer_that_waits_is_adopted_by_a_later_call(recckpt, run):
    directory = recckpt("compact", run.url, "--json").json["directory"]
    said = recckpt("compact", run.url, "--adopt", "--json").json
    assert (said["directory"], said["adopted"], said["removed"]) == (None, [directory], ["ckpt_3"])


def test_out_writes_to_another_output_dir(recckpt, run, tmp_path):
    said = recckpt("compact", run.url, "ckpt_2", "--out", tmp_path / "other", "--workers", 2, "--json").json
    assert (said["id"], said["output_dir"], said["directory"]) == ("ckpt_2", str(tmp_path / "other"), "ckpt_2")
    assert (said["links"], said["rows"], said["reason"], said["adopted"]) == (2, 149, None, [])
    assert rows_of(open_storage(str(tmp_path / "other")), "ckpt_2") == rows_of(run, "ckpt_2")
    answer = recckpt("compact", run.url, "ckpt_2", "--out", tmp_path / "other")
    assert (answer.code, answer.out) == (1, "")
    assert "is committed already" in answer.err


def test_out_says_where_another_there_is_of_a_later_step(recckpt, tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=tmp_path / "run", max_keep=None)
    for step in (2, 3):
        saver.save(f"ckpt_{step}", step=step)
    assert "restore()" not in recckpt("compact", tmp_path / "run", "ckpt_3", "--out", tmp_path / "other").out
    said = recckpt("compact", tmp_path / "run", "ckpt_2", "--out", tmp_path / "other", "--json").json["notes"]
    assert "restore() takes ckpt_2, the newest there once it is written, though ckpt_3 is of a later step" in said[0]


def test_what_is_full_is_said_to_be_so(recckpt, run):
    answer = recckpt("compact", run.url, "ckpt_1")
    assert (answer.code, answer.out) == (0, "ckpt_1: it is full already; nothing to do\n")


def test_wrong_usage_is_told_from_a_problem(recckpt, run, tmp_path):
    assert recckpt("compact", run.url, "--out", tmp_path / "other", "--adopt").code == 2
    assert recckpt("compact", run.url, "--budget", "much").code == 2
    assert recckpt("compact", run.url, "ckpt_9").code == 1
    answer = recckpt("compact", tmp_path / "nothing", "--adopt")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("7", 7), ("3kB", 3000), ("2MiB", 2 << 20), ("1G", 10**9), ("4Gi", 4 << 30)]
)
def test_sizes_are_read_as_people_write_them(text, n_bytes):
    assert commands._size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5GB", "GB", "1iB", "1kb", "MiB1"])
def test_other_sizes_are_refused(recckpt, run, text):
    answer = recckpt("compact", run.url, "--budget", text)
    assert (answer.code, answer.out) == (2, "")
