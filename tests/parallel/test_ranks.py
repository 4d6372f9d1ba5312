"""Ranks that act as one, and meet in the midst of work: what fails on one of them is raised on all."""

import json
import pickle
import signal

import numpy as np
import pytest
from support.builders import OPTIMIZERS, ClickModel, Stream, checkpoints, table_state
from support.paths import SUPPORT
from support.thread_ranks import ThreadGroup, Wire, alone, on_ranks
from support.warm_python import WarmProcess
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import (
    CorruptCheckpointError,
    PartlyLoadedError,
    RankLostError,
    RecckptError,
    SaveFailedError,
    StateMismatchError,
)
from recckpt.parallel.ranks import Connection, Meetings, OtherCallError, Ranks, RanksNow, this_rank
from recckpt.parallel.threads import run_all
from recckpt.policies.when import EveryEventTime
from recckpt.sparse import ShardedHashTable

SIZE = 3


class Recorded:
    """A group of two of which the other rank answers as it is told."""

    size, is_lost, is_over = 2, False, False

    def __init__(self, rank, other, answer=None):
        self.rank, self.other, self.answer = rank, other, answer

    def all_gather(self, value):
        *call, _ = value
        return [value, (*call, self.other)] if self.rank == 0 else [(*call, self.other), value]

    def gather_to_first(self, value):
        return [value, self.other] if self.rank == 0 else None

    def broadcast(self, value):
        return value if self.answer is None else self.answer

    def twin(self):
        return self


def fail(error):
    def work():
        raise error

    return work


def failed(rank, cause):
    return SaveFailedError("x", rank, cause)


def ranks_beside(other):
    return Ranks(1, 2, Connection(lambda: Recorded(1, other))).raising(failed)


def test_alone_there_is_nobody_to_ask_and_several_shards_need_a_process_group():
    alone = RanksNow(1.0).of(0, 1)
    assert (alone.gather(3), alone.on_first(lambda: 4), this_rank()) == ([3], 4, (0, 1))
    with pytest.raises(ValueError, match="first call init_process_group on every rank"):
        RanksNow(1.0).of(0, 2).gather(None)
    for shard, shards in ((1, 1), (-1, 1), (0, 0), (0, -2), (2, 2), (0.0, 1), (False, 1), ("0", 1)):
        with pytest.raises(ValueError, match="shard_id must be 0 to shard_num - 1, found"):
            RanksNow(1.0).of(shard, shards)


def test_without_a_process_group_the_environment_says_which_rank_this_is(monkeypatch):
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")):  # one that speaks of one process is enough
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert this_rank() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert this_rank() == (2, 3)
    assert this_rank(1) == (1, 3)
    assert this_rank(None, 5) == (2, 5)
    assert this_rank(None, 1) == (0, 1), "one that works for itself"
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(ValueError, match="WORLD_SIZE='three'"):
        this_rank()


@pytest.mark.parametrize(("name", "value", "missing"), [("WORLD_SIZE", "2", "RANK"), ("RANK", "1", "WORLD_SIZE")])
def test_one_of_several_processes_that_does_not_know_which_saves_nothing(tmp_path, monkeypatch, name, value, missing):
    saver = Saver(ClickModel(), output_dir=str(tmp_path))
    monkeypatch.setenv(name, value)
    for save in (lambda: saver.save("a"), CheckpointManager(saver, 1).step, lambda: ShardedHashTable(2, name="t")):
        with pytest.raises(
            ValueError, match=rf"found {name}='{value}' .* without {missing}, .* set both[\s\S]*shard_num"
        ):
            save()
    assert checkpoints(tmp_path) == []


def test_who_gives_its_numbers_is_not_asked_for_those_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "three")
    assert this_rank(1, 2) == (1, 2)
    assert this_rank(None, 1) == (0, 1)
    saver = Saver(ClickModel(), output_dir=str(tmp_path), max_keep=2)
    saver.save("a", 0, 1)
    CheckpointManager(saver, 1, shard_id=0, shard_num=1).step()
    assert checkpoints(tmp_path) == ["a", "ckpt_1"]


def test_under_torchrun_without_a_process_group_a_save_is_refused_and_a_load_takes_the_own_part(tmp_path, monkeypatch):
    Saver(ClickModel(), output_dir=str(tmp_path)).save("c")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    saver = Saver(ClickModel(), output_dir=str(tmp_path))
    for save in (lambda: saver.save("d"), lambda: CheckpointManager(saver, 1).step()):
        with pytest.raises(ValueError, match=r"2 ranks need [\s\S]*init_process_group.*shard_id=0, shard_num=1"):
            save()
    assert checkpoints(tmp_path) == ["c"]
    assert (saver.loader.live_state().shard, saver.loader.live_state().shards) == (1, 2)
    saver.load()
    saver.save("alone", 0, 1)


def test_all_ranks_get_all_results_or_raise_the_first_failure_with_its_rank():
    assert ranks_beside(("theirs", None)).on_all(lambda: "ours") == ["theirs", "ours"]
    cause = OSError("no space")
    with pytest.raises(SaveFailedError, match="rank 1: OSError: no space") as caught:
        ranks_beside(("theirs", None)).on_all(fail(cause))
    assert caught.value.rank == 1
    assert caught.value.__cause__ is cause
    with pytest.raises(SaveFailedError, match="rank 0: OSError: no space"):
        ranks_beside((None, "OSError: no space")).on_all(lambda: "ours")
    with pytest.raises(StateMismatchError, match="'w'"):  # errors of recckpt cross as they are
        ranks_beside((None, StateMismatchError("state", missing=["w"]))).on_all(lambda: "ours")
    with pytest.raises(SaveFailedError, match="rank 0: theirs"):
        ranks_beside((None, "theirs")).on_all(fail(OSError("ours")))


def test_ranks_that_are_in_different_calls_are_told_which_and_why_that_may_be(tmp_path):
    model = nn.Linear(1, 1)

    def work(rank, connect):
        saver = connect(Saver(model, output_dir=str(tmp_path / "run")))
        manager = CheckpointManager(saver, EveryEventTime(10), shard_id=rank, shard_num=2, save_on_signal=())
        for _ in range(2):
            manager.step(event_time=0)
        if rank == 1:
            manager.save()
        manager.step(event_time=0)

    with pytest.raises(
        OtherCallError,
        match=r"rank 1 is in save\(\) \(.*\), and rank 0 in step\(\) \(autosave.*\): ranks have taken "
        r"different numbers of steps; make the same calls on all ranks, and end the loop at the same step on all",
    ):
        on_ranks(2, work)
    assert checkpoints(tmp_path / "run") == []


def test_a_rank_that_restores_while_another_saves_says_so_at_once(tmp_path):
    model = nn.Linear(1, 1)

    def work(rank, connect):
        saver = connect(Saver(model, output_dir=str(tmp_path / "run")))
        manager = CheckpointManager(saver, 10, shard_id=rank, shard_num=2)
        with pytest.raises(OtherCallError, match=r"^rank 1 is in save\(\) \(.*\), and rank 0 in restore\(\) "):
            manager.save() if rank else manager.restore()

    on_ranks(2, work)


def test_a_rank_that_ends_while_others_step_makes_no_save_that_would_wait_for_them(tmp_path):
    model, seen = nn.Linear(1, 1), list[str]()

    def work(rank, connect):
        saver = connect(Saver(model, output_dir=str(tmp_path / "run")))
        manager = CheckpointManager(saver, EveryEventTime(10), shard_id=rank, shard_num=2, save_on_signal=())
        manager.step(event_time=0)
        with pytest.raises(OtherCallError):
            manager.step(event_time=0) if rank else manager.__exit__(None, None, None)
        seen.append(f"rank {rank} goes on")

    on_ranks(2, work)
    assert sorted(seen) == ["rank 0 goes on", "rank 1 goes on"]
    assert checkpoints(tmp_path / "run") == []


def test_a_run_that_a_signal_on_one_rank_ends_has_ended_well_on_none(tmp_path):
    model = nn.Linear(1, 1)

    def work(rank, connect):
        saver = connect(Saver(model, output_dir=str(tmp_path / "run")))
        with CheckpointManager(saver, 10, shard_id=rank, shard_num=2, save_on_signal=()) as manager:
            manager.step()
            manager._autosave._signals._has_ended = rank == 1  # as once it has come there
            assert manager.reached_preemption()

    on_ranks(2, work)
    assert '"ended"' not in (tmp_path / "run/timeline.jsonl").read_text()


def first_beside(other):
    return Ranks(0, 2, Connection(lambda: Recorded(0, other))).raising(failed)


def other_beside(answer):
    return Ranks(1, 2, Connection(lambda: Recorded(1, None, answer))).raising(failed)


def test_rank_0_concludes_from_all_results_and_the_others_get_its_conclusion():
    assert first_beside((2, None)).concluded(lambda: 1, sum) == 3
    assert other_beside((0, None, 3)).concluded(lambda: 2, sum) == 3
    assert RanksNow(1.0).of(0, 1).concluded(lambda: 1, sum) == 1


def test_where_work_fails_on_a_rank_nothing_is_concluded_and_all_raise_the_failure_of_the_first():
    for other, work, rank in (((None, "theirs"), lambda: 1, 1), ((None, "theirs"), fail(OSError("ours")), 0)):
        with pytest.raises(SaveFailedError) as raised:
            first_beside(other).concluded(work, fail(AssertionError("concluded all the same")))
        assert raised.value.rank == rank
    ours = OSError("ours")
    with pytest.raises(SaveFailedError, match="rank 1: ours") as raised:
        other_beside((1, "ours", None)).concluded(fail(ours), sum)
    assert raised.value.__cause__ is ours
    with pytest.raises(SaveFailedError, match="rank 0: theirs") as raised:
        other_beside((0, "theirs", None)).concluded(fail(ours), sum)
    assert raised.value.__cause__ is None


def test_what_rank_0_cannot_conclude_all_raise():
    mismatch = StateMismatchError("state", missing=["w"])

    def conclude(results):
        raise mismatch

    with pytest.raises(StateMismatchError) as raised:
        first_beside((2, None)).concluded(lambda: 1, conclude)
    assert raised.value is mismatch
    with pytest.raises(StateMismatchError, match="'w'"):
        other_beside((0, mismatch, None)).concluded(lambda: 1, conclude)


def test_a_rank_that_is_missing_raises_the_error_that_was_bound_from_any_method():
    class Lost(Recorded):
        def all_gather(self, value):
            raise RankLostError([0], "silent")

        gather_to_first = broadcast = all_gather

    ranks = Ranks(1, 2, Connection(lambda: Lost(1, None)))
    named = ranks.raising(failed, lambda lost: SaveFailedError("x", lost.rank, lost.cause))
    for act in (
        lambda own: own.gather(1),
        lambda own: own.on_all(list),
        lambda own: own.background.on_first(list),
        lambda own: own.concluded(list, list),
    ):
        with pytest.raises(RankLostError):
            act(ranks)
        with pytest.raises(SaveFailedError, match="'x' failed on rank 0: silent") as raised:
            act(named)
        assert isinstance(raised.value.__cause__, RankLostError)


def test_ranks_to_which_no_error_is_bound_raise_their_own_as_it_is():
    alone, error = RanksNow(1.0).of(0, 1), OSError("mine")
    for act in (alone.on_all, alone.on_first, alone.on_each, lambda work: alone.concluded(work, list)):
        with pytest.raises(OSError, match="mine") as raised:
            act(fail(error))
        assert raised.value is error
    with pytest.raises(RecckptError, match="rank 0 failed: OSError: theirs"):
        Ranks(1, 2, Connection(lambda: Recorded(1, (None, "OSError: theirs")))).on_all(list)


def test_ranks_connect_when_they_first_act_and_once_for_all_that_tell_other_errors():
    groups = []
    ranks = Ranks(1, 2, Connection(lambda: groups.append(Recorded(1, ("theirs", None))) or groups[-1]))
    assert (ranks.rank, ranks.size, ranks.has_lost, ranks.is_over, groups) == (1, 2, False, False, [])
    assert ranks.raising(failed).on_each(lambda: "ours") == ranks.on_each(lambda: "ours") == "ours"
    assert len(groups) == 1


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Run all scenes of two_ranks.py in two processes, and return the output root and the results of both."""
    root = tmp_path_factory.mktemp("ranks")
    ranks = [WarmProcess(SUPPORT / "two_ranks.py", rank, root) for rank in (0, 1)]
    try:
        codes = [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    assert codes == [0, 0]
    return root, [pickle.loads((root / f"results_{rank}").read_bytes()) for rank in (0, 1)]


def results_of(two_ranks, scene):
    return [results[scene] for results in two_ranks[1]]


@pytest.mark.slow
def test_a_saver_that_is_gone_leaves_no_connections_and_one_goes_on_where_the_ranks_have_met_again(two_ranks):
    assert results_of(two_ranks, "save_with_many_savers") == [0, 0]
    assert results_of(two_ranks, "meet_again") == ["b", "b"]


def test_each_of_two_ranks_restores_what_it_saved(two_ranks):
    for result in results_of(two_ranks, "save_and_restore"):
        assert result["step"] == 3
        assert result["restored"] == result["saved"]
        assert result["same manifest"]


def test_one_rank_restores_the_union_of_what_two_saved(two_ranks):
    saved = [result["saved"]["tables"] for result in results_of(two_ranks, "save_and_restore")]
    model = ClickModel()
    saver = Saver(model, OPTIMIZERS["adam"](model.tables), str(two_ranks[0] / "save_and_restore"))
    assert CheckpointManager(saver, 1).restore() == 3
    for table in model.tables:
        parts = [rows_of(rank[table.name]) for rank in saved]
        assert all(parts)
        assert not parts[0].keys() & parts[1].keys()
        assert rows_of(table_state(table)) == {**parts[0], **parts[1]}


def rows_of(state):
    ids = np.frombuffer(state["id"], np.int64)
    columns = [np.frombuffer(c, np.uint8).reshape(len(ids), -1) for name, c in state.items() if name != "id"]
    return {int(i): b"".join(c[k].tobytes() for c in columns) for k, i in enumerate(ids)}


def test_each_rank_starts_from_a_bank_with_its_own_rows_and_reports_them(two_ranks):
    first, second = results_of(two_ranks, "start_from_a_bank")
    for result in (first, second):
        assert result["equal"]
        assert result["reported"] == result["rows"]
        assert result["step"] == (1, 1)
        assert result["resumed"]
    assert first["rows"] != second["rows"]


def test_dataset_positions_of_two_ranks_are_not_those_of_one(two_ranks):
    saver = Saver(ClickModel(), output_dir=str(two_ranks[0] / "save_and_restore"))
    stream = Stream()
    saver.register_io_state("stream", stream)
    conf = {"load": ["sparse", "dense", "io_state"]}
    with pytest.raises(
        StateMismatchError, match=r"'io state stream': found .* 2 shards, expected 1: .*merge_io_state.*exclude"
    ):
        saver.load(load_conf=conf)
    assert len(saver.model.users) == 0
    saver.load(load_conf={**conf, "exclude": ["io_state"]})
    assert stream.position == 0
    assert len(saver.model.users) > 0


def test_dataset_positions_of_two_ranks_are_merged_by_a_dataset_that_knows_how(two_ranks):
    class Merging(Stream):
        def merge_io_state(self, states, index, count):
            return {"position": [state["position"] for state in states] + [index, count]}

    saver, stream = Saver(ClickModel(), output_dir=str(two_ranks[0] / "save_and_restore")), Merging()
    saver.register_io_state("stream", stream)
    saver.load(load_conf={"load": ["io_state"]})
    assert stream.position == [3, 6, 0, 1]


def test_a_failure_on_one_rank_is_raised_on_both_and_commits_nothing(two_ranks):
    first, second = results_of(two_ranks, "fail_to_write")
    for result in (first, second):
        kind, rank, text = result["failed"]
        assert (kind, rank) == ("SaveFailedError", 1)
        assert "'ckpt_2' failed on rank 1: OSError: [Errno 28] No space left on device" in text
        assert result["restored"] == 1
        assert result["again"] is None
    owner = [".recckpt/owner/1.json", ".recckpt/owner/1.list.json"]
    assert first["left"] == [*owner, "checkpoint", "ckpt_2/INTENT", "timeline.jsonl"]


def test_a_state_that_cannot_be_saved_on_one_rank_raises_on_both_and_writes_nothing(two_ranks):
    first, second = results_of(two_ranks, "stage_what_cannot_be_saved")
    assert first["failed"][:2] == ("SaveFailedError", 1)
    assert second["failed"][0] == "ValueError"
    for result in (first, second):
        assert "'bad'['deep']" in result["failed"][2]
        assert result["left"] == []


def test_ranks_that_disagree_on_a_table_commit_nothing(two_ranks):
    for result in results_of(two_ranks, "disagree_on_a_table"):
        assert result["failed"][0] == "StateMismatchError"
        assert "table 't' of rank 1" in result["failed"][2]
        assert not result["committed"]


def test_tables_whose_ids_several_ranks_own_are_refused_on_all_and_nothing_is_written(two_ranks):
    for result in results_of(two_ranks, "save_tables_without_slices"):
        kind, _, text = result["failed"]
        assert kind == "ValueError"
        assert "table 't': ranks 0 and 1 own the same ids; table 'u': ranks 0 and 1" in text
        assert "ShardedHashTable, or give it slice=gen_slice(rank, ranks)" in text
        assert result["left"] == []


def test_a_position_that_one_rank_alone_has_is_in_the_manifest_and_goes_to_the_others_too(two_ranks):
    assert results_of(two_ranks, "save_a_position_of_one_rank") == [71, 71]
    manifest = json.loads((two_ranks[0] / "save_a_position_of_one_rank" / "ckpt_1" / "manifest.json").read_text())
    assert manifest["names"]["io_state"] == ["stream", "own"]


def test_a_committed_id_is_refused_on_all_ranks_alike(two_ranks):
    assert {result["failed"][0] for result in results_of(two_ranks, "save_twice")} == {"CheckpointExistsError"}


def test_ranks_fall_back_together_where_one_of_them_finds_damage(two_ranks):
    for result in results_of(two_ranks, "restore_what_is_damaged_for_one"):
        assert (result["step"], result["equal"]) == (1, True)
        assert result["explicit"][0] == "CorruptCheckpointError"


def test_ranks_start_together_where_there_is_nothing(two_ranks):
    for result in results_of(two_ranks, "restore_where_there_is_nothing"):
        assert result["step"] == 0
        assert result["required"][0] == "CheckpointNotFoundError"


def test_a_rank_may_save_for_itself_beside_a_process_group(two_ranks):
    positions = [(result["step"], result["position"]) for result in results_of(two_ranks, "save_each_for_itself")]
    assert positions == [(1, 5), (1, 6)]


def in_meetings(work, failed=None):
    """Return what ``work(meetings)`` gave or raised on each rank."""
    wire = Wire(SIZE)

    def on_rank(rank):
        ranks = alone(ThreadGroup(rank, wire))
        try:
            return (ranks if failed is None else ranks.raising(failed)).in_meetings(work)
        except RecckptError as error:
            return error

    return run_all(on_rank, range(SIZE), SIZE)


def damage(rank):
    return CorruptCheckpointError(f"file-{rank}", "", found="a", expected="b")


def restoring(rank, cause):
    return RecckptError(f"restoring failed on rank {rank}: {cause}")


def test_each_rank_gets_what_every_other_one_sends_it_and_nothing_from_itself():
    def work(meetings):
        parcels = [np.full(to + 1, 10 * meetings.rank + to, np.uint8) for to in range(meetings.size)]
        return [parcel.tolist() for parcel in meetings.exchange(parcels)], meetings.gather({"rank": meetings.rank})

    gathered = [{"rank": rank} for rank in range(SIZE)]
    assert in_meetings(work) == [
        ([[] if sender == rank else [10 * sender + rank] * (rank + 1) for sender in range(SIZE)], gathered)
        for rank in range(SIZE)
    ]
    alone = Meetings()
    assert alone.gather(7) == [7]
    assert [parcel.tolist() for parcel in alone.exchange([np.ones(3, np.uint8)])] == [[]]
    assert RanksNow(1.0).of(0, 1).in_meetings(lambda meetings: meetings.size) == 1


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_an_error_of_one_rank_is_raised_on_all_at_whichever_meeting_they_are(n_before):
    n_met = []

    def work(meetings):
        for _ in range(n_before if meetings.rank == 1 else 3):
            meetings.wait()
            n_met.append(meetings.rank)
        if meetings.rank == 1:
            raise damage(1)

    for error in in_meetings(work):
        assert isinstance(error, CorruptCheckpointError)
        assert error.path == "file-1"
    assert n_met.count(0) == n_met.count(2) == n_before


def test_errors_of_several_ranks_at_once_are_those_of_the_first_and_raised_by_who_is_through_too():
    def several(meetings):
        if meetings.rank:
            raise damage(meetings.rank)
        meetings.wait()

    def at_the_end(meetings):
        meetings.wait()
        if meetings.rank == 0:
            raise damage(0)
        return "through"

    assert [error.path for error in in_meetings(several)] == ["file-1"] * SIZE
    assert [type(error) for error in in_meetings(at_the_end)] == [CorruptCheckpointError] * SIZE


def test_an_error_that_is_not_ours_names_the_rank_that_had_it():
    def work(meetings):
        if meetings.rank == 2:
            raise OSError("no such bucket")
        meetings.wait()

    errors = in_meetings(work, restoring)
    assert [str(error) for error in errors] == ["restoring failed on rank 2: OSError: no such bucket"] * SIZE
    assert isinstance(errors[2].__cause__, OSError)
    assert "rank 2 failed: OSError" in str(in_meetings(work)[0])


def test_a_rank_makes_up_for_an_error_only_once_the_others_have_it_as_it_was():
    """What changed tables goes before what did not, or some ranks would go on from another checkpoint."""

    def work(meetings):
        try:
            with meetings.ended_by_errors():
                if meetings.rank == 1:
                    raise damage(1)
                meetings.wait()
        except CorruptCheckpointError as error:
            if meetings.rank == 2:
                raise PartlyLoadedError(str(error), mixed=["t"]) from error
            raise

    for error in in_meetings(work):
        assert isinstance(error, PartlyLoadedError)
        assert "file-1" in str(error)
