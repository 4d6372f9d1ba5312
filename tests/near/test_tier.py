"""What a saver knows of near saves, where others change them meanwhile."""

import pytest
from near.test_near_saves import begun, rows
from support.near_runs import NearRun, output_dir

from recckpt.output_dir.fence import Fence
from recckpt.output_dir.near_at_takeover import NearAtTakeover


def test_where_what_was_listed_is_gone_all_is_listed_once_more(tmp_path):
    begun(tmp_path).put(_3=3.0).step()
    run = NearRun(tmp_path)
    tier, n_looks = run.saver.near_saves.tier, []
    look, problem_of = tier.look, tier._problem_of

    def removed_before(save):
        if len(n_looks) == 1:
            tier.dir.remove(save.directory)
        return problem_of(save)

    tier.look = lambda: (n_looks.append(1), look())
    tier._problem_of = removed_before
    assert rows(run.restore()) == {1: 1.0, 2: 2.0}
    assert len(n_looks) == 2


def test_where_all_go_time_and_again_the_checkpoint_is_restored(tmp_path, caplog):
    begun(tmp_path)
    run = NearRun(tmp_path)
    tier = run.saver.near_saves.tier
    problem_of, remove = tier._problem_of, tier.dir.remove
    tier._problem_of = lambda save: (remove(save.directory), problem_of(save))[1]
    seen = tier.dir.saves()
    tier.dir.saves = lambda: seen
    assert rows(run.restore()) == {1: 1.0}


def test_the_list_is_read_after_the_near_dir(tmp_path):
    zombie, reader = begun(tmp_path), NearRun(tmp_path)
    tier, own = reader.saver.near_saves.tier, zombie.saver.near_saves.tier
    look, seal = tier.look, own.seal

    def overtaken():
        own.seal = lambda *args: (Fence(output_dir(tmp_path)).hold(), seal(*args))
        zombie.put(_6=6.0).step()
        look()

    tier.look = overtaken
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
    zombie.saver.near_saves.tier.forget(1)
    assert [path.parent.name.partition(".")[0] for path in zombie.near_dirs] == ["2"]
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_leftovers_of_a_near_save_that_died_go_with_the_next(tmp_path):
    run = begun(tmp_path)
    left = run.near_dirs[0].parent / "99"
    (left / "sparse").mkdir(parents=True)
    (left / "INTENT").write_text("{}")
    run.put(_3=3.0).step()
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"no json"])
def test_a_seal_that_cannot_be_read_is_passed_over(tmp_path, caplog, content):
    run = begun(tmp_path)
    (run.near_dirs[0] / "near.json").write_bytes(content)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    assert "a near save is passed over" in caplog.text
