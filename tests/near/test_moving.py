"""Files of near saves that go from rank to rank: they arrive whole, or the reason is known to all ranks."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import strategies as st
from support.drawn import drawn
from support.rank_processes import results, run_script
from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt.errors import RecckptError
from recckpt.near.moves import Move, rounds_by_pair
from recckpt.near.moving import move
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.threads import run_all
from recckpt.storage.local import LocalStorage

SIZE = 3
SAVE = "1.aa/7"


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


def test_a_file_takes_the_place_of_a_damaged_one(tmp_path):
    of = put(tmp_path, Move("model.pt", 2500, None, 0, 1))
    put(tmp_path, Move("model.pt", 100, None, 1, 0))
    assert moved(tmp_path, [of]) == []
    assert arrived(tmp_path, of) == sent(tmp_path, of)


def test_a_rank_that_fails_leaves_no_half_files_anywhere(tmp_path):
    class Failing(LocalStorage):
        def open(self, name):
            raise MemoryError(name)

    of = put(tmp_path, Move("model.pt", 2500, None, 0, 1))
    with pytest.raises((MemoryError, RecckptError), match="model"):
        moved(tmp_path, [of], storage=Failing)
    assert arrived(tmp_path, of) is None
    assert not leftovers(tmp_path)


def test_nothing_to_move_is_no_meeting():
    assert move(Meetings(), LocalStorage("/nowhere"), SAVE, []) == []


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
