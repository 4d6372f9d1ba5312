"""Something else in the place of a file: said by name, never waited for, never followed, never opened."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from support.builders import Run, checkpoints, tree
from support.sweeps import mostly_slow

from recckpt.convert import export_checkpoint
from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.inspect.reader import CheckpointReader
from recckpt.inspect.repair import repair
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage

LISTED = ["model.pt", "extra.pt", "io_state_0.pt", "rng_0.pt"]
LISTED += ["sparse/00000-of-00001.json", "sparse/00000-of-00001.g0.00.arrow"]
OF_CHECKPOINT = ["manifest.json", *LISTED]
TIMELINE, OWN = "timeline.jsonl", [".recckpt/owner/1.json", ".recckpt/owner/1.list.json"]
KINDS = {
    "a FIFO": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),  # /dev/zero, which never ends
    "a symbolic link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    runs = tmp_path_factory.mktemp("misplaced") / "runs"
    Run(runs, max_keep=3).train(20)
    return runs


@pytest.fixture
def runs(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # of a socket the name is short
    return Path(shutil.copytree(template, tmp_path / "runs"))


@pytest.fixture(autouse=True)
def no_hang():
    """End what waits for the other end of a FIFO."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, path: Path) -> None:
    path.unlink()
    try:
        KINDS[kind](path)
    except PermissionError:
        pytest.skip(f"{kind} cannot be made here")


def some(number, name, kind):
    """Return the pair: in the default suite the manifest is there with each kind, each other name with one."""
    is_quick = number == 0 or list(KINDS).index(kind) == number % len(KINDS)
    return pytest.param(name, kind, marks=() if is_quick else pytest.mark.slow)


@mostly_slow()
@pytest.mark.parametrize(
    ("name", "kind"), [some(number, name, kind) for number, name in enumerate(OF_CHECKPOINT) for kind in KINDS]
)
def test_in_the_place_of_a_file_of_a_checkpoint_it_is_damage_that_says_what_is_there(runs, name, kind):
    put(kind, runs / "ckpt_20" / name)
    found = {error.file: error.found for error in verify(str(runs))}
    assert kind in found[f"ckpt_20/{name}"]
    assert kind in str(list_checkpoints(open_storage(str(runs))).damaged["ckpt_20"])
    with pytest.raises(CorruptCheckpointError, match=kind):
        CheckpointReader(str(runs / "ckpt_20"))
    run = Run(runs, max_keep=3)
    assert run.manager.restore() == 10
    with pytest.raises(CorruptCheckpointError, match=kind):
        run.manager.restore(20)


@mostly_slow()
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_place_of_intent_verify_says_so_and_the_rest_goes_on(runs, kind):
    put(kind, runs / "ckpt_20" / "INTENT")
    assert [(problem.file, kind in problem.found) for problem in verify(str(runs))] == [("ckpt_20/INTENT", True)]
    assert Run(runs, max_keep=3).manager.restore() == 20


@mostly_slow("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OWN)
def test_in_the_place_of_a_claim_it_is_said_and_loses_nothing(runs, name, kind):
    put(kind, runs / name)
    assert kind in {error.file: error.found for error in verify(str(runs))}[name]
    run = Run(runs, max_keep=3)
    assert run.manager.restore() == 20
    run.train(10)
    assert Run(runs).manager.restore() == 30


@mostly_slow("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checkpoint", TIMELINE])
def test_in_the_place_of_a_hint_it_is_warned_of_and_not_read(runs, name, kind, caplog):
    put(kind, runs / name)
    repair(str(runs), dry_run=True)
    run = Run(runs, max_keep=3)
    assert run.manager.restore() == 20
    run.train(10)
    assert Run(runs).manager.restore() == 30
    assert kind in caplog.text
    assert name in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_of_what_is_whole_skips_it(runs, kind, tmp_path):
    put(kind, runs / "ckpt_20" / LISTED[-1])
    done = export_checkpoint(runs / "ckpt_20", tmp_path / "out", to="npy", skip_damaged=True)
    assert kind in str(done.skipped)


@mostly_slow()
@pytest.mark.parametrize("name", [".recckpt", ".recckpt/owner", ".recckpt/pins", "ckpt_20"])
def test_a_directory_that_is_a_link_out_is_neither_read_nor_written(runs, tmp_path, name, caplog):
    outside, place = tmp_path / "outside", runs / name
    place.mkdir(exist_ok=True)
    place.rename(outside)
    place.symlink_to(outside)
    before = tree(outside)
    run = Run(runs, max_keep=1)
    if name == "ckpt_20":
        with pytest.raises(CorruptCheckpointError, match=r"found unsafe path: a symbolic link.* move the target back"):
            run.manager.restore(20)
        assert run.manager.restore() == 10
        run.train(10)
    elif name == ".recckpt/pins":
        run.train(10)
        assert "found a symbolic link" in caplog.text
        assert "ckpt_20" in checkpoints(runs)  # nothing goes while nobody knows what is pinned
    else:
        with pytest.raises((OSError, RecckptError), match="found a symbolic link"):
            run.train(10)
    assert tree(outside) == before


def test_an_output_dir_that_is_a_link_is_one(runs, tmp_path):
    (tmp_path / "link").symlink_to(runs)
    run = Run(tmp_path / "link", max_keep=3)
    assert run.manager.restore() == 20
    run.train(10)
    assert verify(str(tmp_path / "link")) == []
    with CheckpointReader(str(tmp_path / "link")) as reader:
        assert reader.manifest.step == 30
