"""Files of near saves go between hosts, each with its checksum, in a ring of copies."""

import json
import os
import pickle
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import xxhash
from hypothesis import strategies as st
from near.test_ranks import near_names, on_hosts, trained
from servers.process import ServerProcess
from support.drawn import drawn
from support.near_runs import output_dir
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow
from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt import Near
from recckpt.checkpoint.read_again import problems
from recckpt.errors import RankLostError, RecckptError
from recckpt.format.manifest import FileEntry
from recckpt.near.moving import Move, MoveBuffers, copies_of, copy_files, move, receivers, rounds_by_pair, writers
from recckpt.near.near_dir import NearDir
from recckpt.output_dir.listing import list_checkpoints
from recckpt.parallel.ranks import Meetings
from recckpt.parallel.threads import run_all
from recckpt.storage.local import LocalStorage

HOST_LISTS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)
SIZE = 3
SAVE = "1.aa/7"
SERVERS = Path(__file__).parent.parent / "servers"
HOSTS = ["b", "b", "a", "c"]


def test_the_host_that_follows_has_the_copy_and_its_ranks_share_the_work():
    hosts = ["b", "b", "a", "a", "c"]
    assert receivers(hosts, 1) == [(4,), (4,), (0,), (1,), (2,)]
    assert copies_of(hosts, 1) == {"a": ("b",), "b": ("c",), "c": ("a",)}
    assert receivers(hosts, 2) == [(4, 2), (4, 3), (0, 4), (1, 4), (2, 0)]
    assert receivers(hosts, 0) == [()] * 5
    assert writers(hosts, 1) == [{0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3, 4}, {2, 3, 4}, {4, 0, 1}]
    assert writers(hosts, 0) == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4}]
    assert copies_of(hosts, 0) == copies_of(["a", "a"], 1) == {}
    assert receivers(["a", "a"], 1) == [(), ()]


@drawn(HOST_LISTS, st.integers(0, 7), few=50, many=5000)
def test_each_rank_is_copied_to_as_many_other_hosts_as_there_can_be(hosts, copies):
    expected = min(copies, len(set(hosts)) - 1)
    there_too = writers(hosts, copies)
    for rank, there in enumerate(receivers(hosts, copies)):
        assert {at for at, ranks in enumerate(there_too) if rank in ranks} >= {rank, *there}
        others = {hosts[receiver] for receiver in there}
        assert len(there) == len(others) == expected
        assert hosts[rank] not in others
        assert others == set(copies_of(hosts, copies).get(hosts[rank], ()))


@drawn(HOST_LISTS, st.integers(0, 7), few=50, many=5000)
def test_no_host_copies_for_more_hosts_than_another_and_no_rank_more_than_its_share(hosts, copies):
    made = receivers(hosts, copies)
    n_hosts = Counter()  # whose files a host copies
    for host, sender in {(hosts[receiver], hosts[rank]) for rank, there in enumerate(made) for receiver in there}:
        assert host != sender
        n_hosts[host] += 1
    assert set(n_hosts.values()) <= {min(copies, len(set(hosts)) - 1)}
    sizes = Counter(hosts)
    of_pairs = Counter((hosts[rank], receiver) for rank, there in enumerate(made) for receiver in there)
    for (sender, receiver), n_ranks in of_pairs.items():
        assert n_ranks <= -(-sizes[sender] // sizes[hosts[receiver]])


def put(root, move, data=None):
    """Write the file of a move for its sender; return the move with size and checksum."""
    data = os.urandom(move.n_bytes) if data is None else data
    path = root / f"{move.sender}" / SAVE / move.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return replace(move, n_bytes=len(data), xxh3=xxhash.xxh3_64_intdigest(data))


def moved(root, moves, *, group=ThreadGroup, storage=LocalStorage, round_bytes=1000):
    """Make the moves between ranks that are threads, each with a directory of its own; return their failures."""
    wire = Wire(SIZE)

    def on_rank(rank):
        files = storage(str(root / f"{rank}"))
        return alone(group(rank, wire)).in_meetings(
            lambda meetings: move(meetings, files, SAVE, moves, round_bytes=round_bytes)
        )

    first, *others = run_all(on_rank, range(SIZE), SIZE)
    assert all(other == first for other in others)
    return first


def arrived(root, move):
    path = root / f"{move.receiver}" / SAVE / move.name
    return path.read_bytes() if path.exists() else None


def sent(root, move):
    return (root / f"{move.sender}" / SAVE / move.name).read_bytes()


def leftovers(root):
    return list(root.rglob("*.tmp"))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


SIZES = [0, 1, 999, 1000, 1001, 12_345]
PAIRS = [(0, 1), (1, 2), (2, 0), (0, 2)]


def made(root):
    moves = [Move(f"sparse/{n}-{a}{b}", n, None, a, b) for n in SIZES for a, b in PAIRS]
    return [put(root, each) for each in moves]


def test_what_arrives_is_what_was_sent_whatever_its_size(tmp_path):
    moves = made(tmp_path)
    assert moved(tmp_path, [*moves[1:], replace(moves[0], xxh3=None)]) == []
    assert all(arrived(tmp_path, each) == sent(tmp_path, each) for each in moves)
    assert not leftovers(tmp_path)


def test_files_go_between_real_ranks(tmp_path):
    moves = made(tmp_path)
    gone, harmed = (put(tmp_path, Move(name, 5000, None, 1, 0)) for name in ("gone", "flipped"))
    (tmp_path / "1" / SAVE / "gone").unlink()
    flipped(tmp_path / "1" / SAVE / "flipped")
    (tmp_path / "moves").write_bytes(pickle.dumps([gone, *moves, harmed]))
    run_script(Path(__file__).with_name("moving_ranks.py"), tmp_path, SIZE)
    failures, *others = results(tmp_path, SIZE)
    assert failures == others[0] == others[1]
    assert [each.move.name for each in failures] == ["gone", "flipped"]
    assert all(arrived(tmp_path, each) == sent(tmp_path, each) for each in moves)
    assert not leftovers(tmp_path)


DAMAGE = {
    "missing": (Path.unlink, "No such file"),
    "cut": (lambda path: os.truncate(path, 5), "found 5 bytes, expected 999"),
    "longer": (lambda path: path.write_bytes(bytes(1999)), "found 1999 bytes, expected 999"),
    "flipped": (flipped, "arrived with the checksum"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_fails_its_own_move_alone(tmp_path, kind):
    harm, why = DAMAGE[kind]
    moves = made(tmp_path)
    harmed = next(each for each in moves if each.n_bytes == 999)
    harm(tmp_path / f"{harmed.sender}" / SAVE / harmed.name)
    (failure,) = moved(tmp_path, moves)
    assert failure.move == harmed
    assert why in failure.reason
    assert harmed.name in failure.reason
    assert arrived(tmp_path, harmed) is None
    assert all(arrived(tmp_path, each) == sent(tmp_path, each) for each in moves if each != harmed)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("xxh3", ["known", "unknown"])
def test_a_file_that_is_cut_while_it_is_sent_does_not_appear(tmp_path, xxh3):
    class Shrinking(LocalStorage):
        def open(self, name):
            os.truncate(self._root / name, 1500)
            return super().open(name)

    of = put(tmp_path, Move("model.pt", 4000, None, 2, 0))
    of = of if xxh3 == "known" else replace(of, xxh3=None)
    (failure,) = moved(tmp_path, [of], storage=Shrinking)
    assert "found 1500 bytes, expected 4000" in failure.reason
    assert arrived(tmp_path, of) is None
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("xxh3", ["known", "unknown"])
def test_what_the_wire_spoils_does_not_appear(tmp_path, xxh3):
    class Spoiling(ThreadGroup):
        def exchange(self, mark, parcels, into=None):
            marks, received = super().exchange(mark, parcels, into)
            for parcel in received:
                if len(parcel) == 708:
                    parcel[100] ^= 4
            return marks, received

    moves = [put(tmp_path, Move("spoiled", 700, None, 0, 1)), put(tmp_path, Move("fine", 300, None, 2, 1))]
    planned = moves if xxh3 == "known" else [replace(each, xxh3=None) for each in moves]
    (failure,) = moved(tmp_path, planned, group=Spoiling, round_bytes=5000)
    assert failure.move.name == "spoiled"
    assert "arrived with the checksum" in failure.reason
    assert [arrived(tmp_path, each) for each in moves] == [None, sent(tmp_path, moves[1])]
    assert not leftovers(tmp_path)


def test_what_cannot_be_written_fails_its_own_move_alone(tmp_path):
    moves = [put(tmp_path, Move(name, 2500, None, 0, 1)) for name in ("sparse/part", "model.pt")]
    (tmp_path / "1" / SAVE).mkdir(parents=True)
    (tmp_path / "1" / SAVE / "sparse").write_bytes(b"")
    (failure,) = moved(tmp_path, moves)
    assert failure.move == moves[0]
    assert arrived(tmp_path, moves[1]) == sent(tmp_path, moves[1])


def test_a_file_takes_the_place_of_a_damaged_one_and_nothing_to_move_is_no_meeting(tmp_path):
    of = put(tmp_path, Move("model.pt", 2500, None, 0, 1))
    put(tmp_path, Move("model.pt", 100, None, 1, 0))
    assert moved(tmp_path, [of]) == []
    assert arrived(tmp_path, of) == sent(tmp_path, of)
    assert move(Meetings(), LocalStorage("/nowhere"), SAVE, []) == []


def test_a_rank_that_fails_leaves_no_half_files_anywhere(tmp_path):
    class Failing(LocalStorage):
        def open(self, name):
            raise MemoryError(name)

    of = put(tmp_path, Move("model.pt", 2500, None, 0, 1))
    with pytest.raises((MemoryError, RecckptError), match="model"):
        moved(tmp_path, [of], storage=Failing)
    assert arrived(tmp_path, of) is None
    assert not leftovers(tmp_path)


RANKS = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] != pair[1])


@st.composite
def plans(draw):
    made = [Move(f"{n}", draw(st.integers(0, 50)), None, *draw(RANKS)) for n in range(draw(st.integers(0, 12)))]
    return made, draw(st.integers(1, 40))


@drawn(plans(), few=30, many=3000)
def test_each_byte_goes_once_and_no_rank_has_more_than_it_may(plan):
    moves, round_bytes = plan
    by_pair = rounds_by_pair(moves, round_bytes)
    for number, each in enumerate(moves):
        rounds = by_pair[each.sender, each.receiver]
        own = [stretch for stretches in rounds for stretch in stretches if stretch.number == number]
        assert [byte for stretch in own for byte in range(stretch.begin, stretch.end)] == list(range(each.n_bytes + 8))
    for at in (0, 1):  # the sender's side, the receiver's
        for rank in range(5):
            rounds = [by_pair[pair] for pair in by_pair if pair[at] == rank]
            for number in range(max(map(len, rounds), default=0)):
                there = [stretch for each in rounds if number < len(each) for stretch in each[number]]
                assert sum(stretch.n_bytes for stretch in there) <= max(round_bytes, len(rounds))


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


@pytest.mark.parametrize(
    ("copies", "expected"),
    [(1, {"a": [2, 3], "b": [0, 1, 2], "c": [0, 1, 3]}), (7, {host: [0, 1, 2, 3] for host in "abc"})],
)
def test_hosts_have_the_files_of_those_before_them_in_the_ring(tmp_path, copies, expected):
    errors, there = copied(tmp_path, copies)
    assert errors == [None] * 4
    assert there == expected
    assert (tmp_path / "c" / SAVE / "y_1").read_bytes() == bytes([1]) * 50


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


@pytest.mark.parametrize("copies", [None, 2])
def test_copies_follow_the_ring_of_more_hosts_or_are_on_each_of_them(tmp_path, copies):
    options = {} if copies is None else {"copies": copies}
    assert on_hosts(tmp_path, ["a", "b", "c"], trained, **options) == [(2, 0, 0)] * 3
    assert [saves_on(tmp_path, host) for host in "abc"] == [[2, 3] if copies else []] * 3
    (name, _) = near_names(tmp_path, "a")
    shards = [{path.name[:5] for path in (tmp_path / host / name / "sparse").iterdir()} for host in "abc"]
    assert sorted(map(len, shards)) == [3 if copies else 2] * 3
    assert all(f"0000{rank}" in there for rank, there in enumerate(shards))


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


@mostly_slow()
@pytest.mark.parametrize(("copies", "n_warnings"), [(None, 0), (0, 0), (1, 0), (2, 1)])
def test_that_there_are_fewer_hosts_than_copies_is_said_once(tmp_path, caplog, copies, n_warnings):
    assert on_hosts(tmp_path, ["a", "b"], trained, copies=copies) == [(2, 0, 0)] * 2
    assert len([record for record in caplog.records if "found 2 hosts" in record.message]) == n_warnings
    assert len(saves_on(tmp_path, "a")) == (0 if copies == 0 else 2)


def test_one_host_has_no_copies_and_says_nothing_of_them(tmp_path, caplog):
    assert on_hosts(tmp_path, ["a", "a"], trained) == [(2, 0, 0)] * 2
    assert not [record for record in caplog.records if "copies" in record.message]


@pytest.mark.slow
def test_near_saves_come_back_with_a_store_that_was_away_for_longer_than_ranks_wait(tmp_path):
    server = ServerProcess([sys.executable, SERVERS / "moto_s3.py"], r"on port (\d+)")
    try:
        endpoint = f"http://127.0.0.1:{server.said[1]}"
        s3 = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=endpoint, key="tests", secret="tests")
        s3.mkdir("bucket")
        reach = {"endpoint": endpoint, "url": "s3://bucket/runs", "pid": server.process.pid}
        (tmp_path / "server").write_text(json.dumps(reach))
        run_script(Path(__file__).with_name("away_ranks.py"), tmp_path)
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()
    before, away, after = (2, 0, 0), (2, 3, 0), (4, 3, 0)
    assert results(tmp_path, 2) == [[before, away, after]] * 2
