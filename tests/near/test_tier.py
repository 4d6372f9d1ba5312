"""What a saver knows of near saves, where others change them meanwhile."""

import shutil

import pytest
from near.test_near_saves import begun, rows
from support.near_runs import NearRun, output_dir

from recckpt.format import layout
from recckpt.output_dir.fence import Fence, NearAtTakeover
from recckpt.parallel.ranks import Ranks


def before_each_check(run, work):
    """Do ``work(save)`` before a near save that may be restored is read."""
    finder = run.saver.near_saves.tier.finder
    checked_here = finder._checked_here
    finder._checked_here = lambda save, rank: (work(save), checked_here(save, rank))[1]


def test_where_what_was_listed_is_gone_all_is_listed_once_more(tmp_path):
    begun(tmp_path).put(_3=3.0).step()
    run, removed = NearRun(tmp_path), []
    near_dir = run.saver.near_saves.tier.dir

    def remove_first(save):
        if not removed:
            removed.append(save)
            near_dir.remove(save.directory)

    before_each_check(run, remove_first)
    assert rows(run.restore()) == {1: 1.0, 2: 2.0}


def test_where_all_go_time_and_again_the_checkpoint_is_restored(tmp_path, caplog):
    begun(tmp_path)
    run = NearRun(tmp_path)
    near_dir = run.saver.near_saves.tier.dir
    sealed = list(near_dir.sealed())
    near_dir.sealed = lambda: sealed
    before_each_check(run, lambda save: near_dir.remove(save.directory))
    assert rows(run.restore()) == {1: 1.0}
    assert "the process that makes them is probably still running; end it" in caplog.text


def test_the_list_is_read_after_the_near_dir(tmp_path):
    zombie, reader = begun(tmp_path), NearRun(tmp_path)
    near_dir, own = reader.saver.near_saves.tier.dir, zombie.saver.near_saves.tier
    sealed, seal = near_dir.sealed, own.seal

    def overtaken():
        own.seal = lambda *args: (Fence(output_dir(tmp_path)).hold(), seal(*args))
        zombie.put(_6=6.0).step()
        return sealed()

    near_dir.sealed = overtaken
    assert rows(reader.restore()) == {1: 1.0}
    assert zombie.counts == (1, 1, 0)


def test_the_near_dir_is_looked_at_after_the_claim(tmp_path):
    run = begun(tmp_path)

    class Looking(NearAtTakeover):
        def look(self):
            claims.extend(path.name for path in (tmp_path / "runs/.recckpt/owner").iterdir())

    claims = []
    Fence(output_dir(tmp_path), near=Looking()).hold()
    assert {"2.json"} <= set(claims)
    assert "2.list.json" not in claims
    assert run.near_dirs


def test_a_writer_that_was_overtaken_removes_nothing_of_its_successor(tmp_path):
    zombie = begun(tmp_path)
    NearRun(tmp_path).restore().put(_3=3.0).step()
    zombie.saver.near_saves.tier.forget_together(Ranks(0, 1), 1)
    assert [path.parent.name.partition(".")[0] for path in zombie.near_dirs] == ["2"]
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_leftovers_of_a_near_save_that_died_go_with_the_next(tmp_path):
    run = begun(tmp_path)
    left = run.near_dirs[0].parent / "99"
    (left / "sparse").mkdir(parents=True)
    (left / "INTENT").write_text("{}")
    run.put(_3=3.0).step()
    assert not left.exists()


def test_leftovers_of_a_near_save_that_died_take_no_room_of_the_next(tmp_path):
    run = begun(tmp_path).put(**{f"_{id_}": 1.0 for id_ in range(1000, 6000)}).step()
    run.put(_3=3.0).step()
    newest = run.near_dirs[-1]
    one = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    shutil.copytree(newest, left := newest.parent / f"{int(newest.name) + 1}")
    (left / "near.json").unlink()
    again = NearRun(tmp_path, max_bytes=int(3.2 * one)).restore().put(_4=4.0).step()
    assert again.counts == (1, 0, 0)
    assert not left.exists()


def test_half_of_a_file_in_a_near_save_that_counts_goes_before_the_next(tmp_path):
    """Who dies as a file is brought there, or as it is sealed on the second of two hosts, leaves one."""
    newest = begun(tmp_path).near_dirs[-1]
    left = [newest / layout.temporary(name) for name in ("near.json", "sparse/00000-of-00001.0.arrow")]
    for path in left:
        path.write_bytes(b"half")
    again = NearRun(tmp_path).restore().put(_3=3.0).step()
    assert newest in again.near_dirs
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("content", [b"", b"{}", b"no json"])
def test_a_seal_that_cannot_be_read_is_passed_over(tmp_path, caplog, content):
    run = begun(tmp_path)
    (run.near_dirs[0] / "near.json").write_bytes(content)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    assert "a near save is passed over" in caplog.text
