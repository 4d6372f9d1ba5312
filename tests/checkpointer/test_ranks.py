"""Two ranks as real processes: all save, or none does, and both know why."""

import pickle
from pathlib import Path

import pytest
import torch
from support.warm_python import WarmProcess

from recckpt.checkpointer import make_sync_checkpointer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
BOTH = ["checkpoint_0.pt", "checkpoint_1.pt"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both ranks found: (kind, scene) -> one result a rank."""
    root = tmp_path_factory.mktemp("ranks")
    said = [root / "said_0", root / "said_1"]
    ranks = []
    for rank, path in enumerate(said):
        with path.open("w") as file:
            ranks.append(WarmProcess(HERE / "ranks.py", rank, root, files=(0, 1, file)))
    codes, errors = [rank.wait() for rank in ranks], [path.read_text() for path in said]
    assert codes == [0, 0], "\n".join(errors)
    found = [pickle.loads((root / f"results_{rank}").read_bytes()) for rank in range(2)]
    return {"root": root, "printed": errors[0]} | {scene: (found[0][scene], found[1][scene]) for scene in found[0]}


def test_each_rank_loads_what_it_saved_and_hooks_after_the_commit_see_all_files(results, kind):
    for rank, found in enumerate(results[kind, "save_and_load"]):
        assert found["failed"] == [None, None]
        assert (found["rank"], found["w"]) == (rank, [2.0] * 9)
        assert found["seen after"] == [BOTH, BOTH]


def test_a_rank_that_fails_before_the_commit_fails_all_and_no_file_is_replaced(results, kind):
    reasons = {
        "pre": "LookupError: not today",
        "state": "is: a builtins.object cannot be loaded back safely",
        "path": "FileExistsError",
    }
    for room, reason in reasons.items():
        for rank, found in enumerate(results[kind, "fail_on_one"]):
            (error, failed_rank, text), state, files, later = found[room]
            assert reason in text
            assert (
                (error, failed_rank) == ("ValueError", None) if (room, rank) == ("state", 1) else ("SaveFailedError", 1)
            )
            assert (state, files, later) == ("old", BOTH, "newer")


def test_a_rank_that_fails_after_the_commit_fails_all_and_the_files_are_there(results, kind):
    for (error, rank, text), state, files, later in (found["post"] for found in results[kind, "fail_on_one"]):
        assert (error, rank) == ("PartlyCommittedError", 1)
        assert "LookupError: not today" in text
        assert (state, files, later) == ("new", BOTH, "newer")


def test_a_rank_that_comes_too_late_is_named_in_about_the_timeout_and_fails_too(results, kind):
    for rank, (failed, took, files, state, again, later) in enumerate(results[kind, "miss_one"]):
        assert failed[:2] == ("SaveFailedError", 1)
        assert "rank 1 did not come to the barrier within 0.5 s" in failed[2]
        assert took >= 0.5 or rank == 1
        assert (files, state, again, later) == (BOTH, "old", None, "newer")


def test_a_rank_may_save_alone_and_another_number_of_ranks_finds_its_file_missing(results, kind):
    for rank, (failed, found, files, missing) in enumerate(results[kind, "save_alone"]):
        assert (failed, found, files) == (None, {"is": rank}, ["checkpoint_0.pt"])
        assert (missing is None) == (rank == 0)
    assert "found checkpoint_0.pt. Load a state with as many ranks as saved it" in missing


def test_an_interpreter_that_ends_waits_for_the_save_in_flight_and_swallows_no_error(results):
    root, printed = results["root"], results["printed"]
    with make_sync_checkpointer() as checkpointer:
        assert torch.equal(checkpointer.load(root / "good")["w"], torch.arange(1000.0))
    assert printed.count("SaveFailedError: saving ") == 1
    assert "LookupError: not today" in printed
    assert not [pid for pid in (root / "pids").read_text().split() if Path(f"/proc/{pid}").exists()]
