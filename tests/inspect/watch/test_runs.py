"""A directory of runs: which of its directories are output dirs, and how each is."""

import pytest
from support.builders import Run
from support.forge import filled, save_tables

from recckpt.inspect.watch.runs import RunsWatcher, is_output_dir
from recckpt.output_dir.claims import claimed_epochs
from recckpt.storage import open_storage


def saved(url, step, **fields):
    storage = open_storage(str(url))
    storage.prepare()
    save_tables(storage, [filled("item", range(3))], ckpt_id=f"ckpt_{step}", step=step, **fields)
    return storage


def test_each_output_dir_is_a_run_and_nothing_else_is(url):
    saved(f"{url}/clicks", 10)
    saved(f"{url}/ads", 20)
    with open_storage(url).create("notes/todo.txt") as sink:
        sink.write(b"eggs")
    watcher = RunsWatcher(open_storage(url))
    assert [(run.name, run.status.last.step) for run in watcher.look().runs] == [("ads", 20), ("clicks", 10)]
    saved(f"{url}/clicks", 11)
    saved(f"{url}/new", 1)
    assert [(run.name, run.status.last.step) for run in watcher.look().runs] == [
        ("ads", 20),
        ("clicks", 11),
        ("new", 1),
    ]
    assert not is_output_dir(open_storage(url))
    assert is_output_dir(open_storage(f"{url}/ads"))
    assert not is_output_dir(open_storage(f"{url}/ads/ckpt_20"))


def test_health_is_the_worst_of_what_is_known(tmp_path):
    Run(tmp_path / "good", interval=2).train(2)
    Run(tmp_path / "damaged", interval=2, max_keep=None).train(4)
    (tmp_path / "damaged/ckpt_2/extra.pt").unlink()
    (tmp_path / "waits/.recckpt").mkdir(parents=True)
    runs = {run.name: run for run in RunsWatcher(open_storage(str(tmp_path)), overdue_sec=3600).look().runs}
    assert {name: run.health[1] for name, run in runs.items()} == {
        "good": "good",
        "damaged": "bad",
        "waits": "doubtful",
    }
    assert "ckpt_2 is damaged" in runs["damaged"].health[0]
    assert runs["waits"].health[0].startswith("waits: ")
    [_, good, _] = RunsWatcher(open_storage(str(tmp_path)), overdue_sec=1e-9).look().runs
    assert (good.health, good.overdue_by == "-") == (("overdue", "doubtful"), False)
    assert runs["good"].overdue_by == "-"


def test_a_run_that_cannot_be_looked_at_hides_no_other(tmp_path, monkeypatch):
    for name in ("a", "b"):
        saved(tmp_path / name, 1)
    watcher = RunsWatcher(open_storage(str(tmp_path)))
    watcher.look()

    def refuse(storage):
        if storage.url.endswith("/b"):
            raise PermissionError(13, "Permission denied")
        return claimed_epochs(storage)

    saved(tmp_path / "a", 2)
    monkeypatch.setattr("recckpt.inspect.watch.look.claimed_epochs", refuse)
    first, second = watcher.look().runs
    assert (first.name, first.status.last.step) == ("a", 2)
    assert (second.status, second.health) == (None, ("cannot look: [Errno 13] Permission denied", "bad"))
    assert second.to_dict()["error"] == "[Errno 13] Permission denied"


@pytest.mark.parametrize("name", ["line\nbreak", "ü"])
def test_a_run_may_have_any_name(tmp_path, name):
    saved(tmp_path / name, 1)
    assert [run.name for run in RunsWatcher(open_storage(str(tmp_path))).look().runs] == [name]
