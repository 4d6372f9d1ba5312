"""Copies of near saves: the hosts of a ring have each other's files, or all ranks learn that one has not arrived."""

from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt.errors import RecckptError
from recckpt.format.manifest import FileEntry
from recckpt.near.copying import copy_files
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
            ranks.in_meetings(lambda meetings: copy_files(meetings, storage, SAVE, files, hosts=HOSTS, copies=copies))
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
