"""Copies of near saves: the hosts of a ring have each other's files, or all ranks learn that one has not arrived."""

import pytest
from near.test_ranks import near_names, on_hosts, trained
from support.near_runs import output_dir
from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt import Near
from recckpt.checkpoint.every_byte import problems
from recckpt.errors import RankLostError, RecckptError
from recckpt.format.manifest import FileEntry
from recckpt.near.copying import copy_files
from recckpt.near.moving import MoveBuffers
from recckpt.near.near_dir import NearDir
from recckpt.output_dir.listing import list_checkpoints
from recckpt.parallel.threads import run_all
from recckpt.storage.local import LocalStorage

SAVE = "1.aa/7"
HOSTS = ["b", "b", "a", "c"]


def copied(root, copies):
    """Copy two files of each rank between hosts that are directories; return what each host has then, or the errors."""
    for rank, host in enumerate(HOSTS):
        (root / host / SAVE).mkdir(parents=True, exist_ok=True)
        for name in ("x", "y"):
            (root / host / SAVE / f"{name}_{rank}").write_bytes(bytes([rank]) * 50)
    wire = Wire(len(HOSTS))

    def on_rank(rank):
        files = [FileEntry(f"{name}_{rank}", 50) for name in ("x", "y")]
        storage = LocalStorage(str(root / HOSTS[rank]))
        ranks = alone(ThreadGroup(rank, wire))
        try:
            ranks.in_meetings(
                lambda meetings: copy_files(
                    meetings, storage, SAVE, files, hosts=HOSTS, copies=copies, buffers=MoveBuffers()
                )
            )
        except RecckptError as error:
            return str(error)
        return None

    errors = run_all(on_rank, range(len(HOSTS)), len(HOSTS))
    return errors, {host: sorted({int(path.name[2:]) for path in (root / host / SAVE).iterdir()}) for host in "abc"}


def test_hosts_have_the_files_of_those_before_them_in_the_ring(tmp_path):
    errors, there = copied(tmp_path, 1)
    assert errors == [None] * 4
    assert there == {"a": [2, 3], "b": [0, 1, 2], "c": [0, 1, 3]}
    assert (tmp_path / "c" / SAVE / "y_1").read_bytes() == bytes([1]) * 50


def test_all_have_all_where_there_are_fewer_hosts_than_copies(tmp_path):
    errors, there = copied(tmp_path, 7)
    assert errors == [None] * 4
    assert there == {host: [0, 1, 2, 3] for host in "abc"}


def test_a_copy_that_does_not_arrive_is_an_error_of_all_ranks(tmp_path):
    (tmp_path / "c" / SAVE / "x_1").mkdir(parents=True)
    errors, _ = copied(tmp_path, 1)
    assert errors == [errors[0]] * 4
    assert "1 of 8 copies did not arrive, the first on its way from rank 1 to rank 3" in errors[0]


def saves_on(root, host):
    """Return the near saves that are whole on a host, each byte of them, by their cut."""
    storage = output_dir(root)
    near_dir = NearDir.of(Near(root / host), storage.url)
    saves = [near_dir.opened(sealed.directory, sealed.seal) for sealed in near_dir.sealed()]

    def is_whole(save):
        try:
            return not list(problems(storage, save, 1))
        except RecckptError:  # files are not there
            return False

    return [save.manifest.cut for save in saves if is_whole(save)]


def test_each_host_has_the_files_of_two_hosts_before_a_near_save_is_acknowledged(tmp_path):
    assert on_hosts(tmp_path, ["a", "a", "b"], trained) == [(2, 0, 0)] * 3
    assert saves_on(tmp_path, "a") == saves_on(tmp_path, "b") == [2, 3]
    for name in near_names(tmp_path, "a"):
        assert (tmp_path / "a" / name / "near.json").read_bytes() == (tmp_path / "b" / name / "near.json").read_bytes()


def test_copies_follow_the_ring_of_more_hosts(tmp_path):
    assert on_hosts(tmp_path, ["a", "b", "c"], trained) == [(2, 0, 0)] * 3
    assert [saves_on(tmp_path, host) for host in "abc"] == [[]] * 3
    (name, _) = near_names(tmp_path, "a")
    shards = [{path.name[:5] for path in (tmp_path / host / name / "sparse").iterdir()} for host in "abc"]
    assert sorted(map(len, shards)) == [2, 2, 2]
    assert all(f"0000{rank}" in there for rank, there in enumerate(shards))


def test_with_as_many_copies_as_there_are_other_hosts_each_has_all(tmp_path):
    assert on_hosts(tmp_path, ["a", "b", "c"], trained, copies=2) == [(2, 0, 0)] * 3
    assert [saves_on(tmp_path, host) for host in "abc"] == [[2, 3]] * 3


class SpoilingGroup(ThreadGroup):
    """A rank to which files of rows arrive with another first byte."""

    def exchange(self, mark, parcels, into=None):
        marks, received = super().exchange(mark, parcels, into)
        for parcel in received:
            if b"ARROW1" in parcel.tobytes():
                parcel[parcel.tobytes().index(b"ARROW1")] ^= 1
        return marks, received


def test_a_copy_that_is_spoiled_on_the_wire_ends_its_near_save_on_all_hosts_and_nothing_else(tmp_path):
    def work(run):
        trained(run)
        ((numbers, ranks),) = run.saver.near_saves.ranks.items()
        wire = ranks.connection.groups[0].wire
        run.saver.near_saves.ranks[numbers] = alone(SpoilingGroup(numbers[0], wire))
        run.put(_6=6.0).step()
        assert run.counts == (2, 1, 0)
        run.saver.near_saves.ranks[numbers] = ranks
        run.put(_7=7.0).step()
        return run.counts

    assert on_hosts(tmp_path, ["a", "b"], work) == [(3, 1, 0)] * 2
    assert saves_on(tmp_path, "a") == saves_on(tmp_path, "b") == [3, 5]
    assert not (tmp_path / "b" / near_names(tmp_path, "b")[0]).with_name("4").exists()


class HangingGroup(ThreadGroup):
    """A rank whose peers do not answer once it has sent files of rows."""

    def exchange(self, mark, parcels, into=None):
        if any(b"ARROW1" in parcel.tobytes() for parcel in parcels):
            self.is_lost = True
            raise RankLostError([1 - self.rank], "it did not answer within 60 s")
        return super().exchange(mark, parcels, into)


def test_a_rank_that_does_not_answer_ends_near_saves_and_no_checkpoints(tmp_path, caplog):
    def work(run):
        trained(run)
        ((numbers, ranks),) = run.saver.near_saves.ranks.items()
        run.saver.near_saves.ranks[numbers] = alone(HangingGroup(numbers[0], ranks.connection.groups[0].wire))
        run.put(_6=6.0).step().put(_7=7.0).step()
        assert run.counts == (2, 1, 1)
        run.save()

    on_hosts(tmp_path, ["a", "b"], work)
    [warning] = [record.message for record in caplog.records if "near save failed" in record.message]
    assert "no more are made in this process: saving 'near_4' failed on rank 1: the rank is lost" in warning
    assert warning.endswith("; no near save was made")
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.step == 5
    assert saves_on(tmp_path, "a") == saves_on(tmp_path, "b") == [2, 3]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_host_without_room_for_copies_leaves_the_older_near_saves_as_they_are(tmp_path):
    def work(run):
        trained(run)
        if run.near_path.name == "b":
            run.saver.near_saves.tier.dir.storage._most_bytes = 5000 + sum(
                path.stat().st_size for path in run.near_path.rglob("*") if path.is_file()
            )
        run.put(**{f"_{id_}": 1.0 for id_ in range(200, 500)}).step()
        return run.counts

    assert on_hosts(tmp_path, ["a", "b"], work) == [(2, 1, 0)] * 2
    assert saves_on(tmp_path, "a") == saves_on(tmp_path, "b") == [2, 3]


@pytest.mark.parametrize(("copies", "n_warnings"), [(None, 0), (0, 0), (1, 0), (2, 1)])
def test_that_there_are_fewer_hosts_than_copies_is_said_once(tmp_path, caplog, copies, n_warnings):
    assert on_hosts(tmp_path, ["a", "b"], trained, copies=copies) == [(2, 0, 0)] * 2
    assert len([record for record in caplog.records if "found 2 hosts" in record.message]) == n_warnings
    assert len(saves_on(tmp_path, "a")) == (0 if copies == 0 else 2)


def test_one_host_has_no_copies_and_says_nothing_of_them(tmp_path, caplog):
    assert on_hosts(tmp_path, ["a", "a"], trained) == [(2, 0, 0)] * 2
    assert not [record for record in caplog.records if "copies" in record.message]
