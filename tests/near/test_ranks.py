"""Near saves of several ranks that see one near dir, restored by any number of them."""

import shutil

import pytest
from load.test_source import Chain
from near.test_near_saves import rows
from support.near_runs import NearRun, newest_list, output_dir, parts_of
from support.sweeps import mostly_slow
from support.thread_ranks import ThreadGroup, Wire, alone, on_ranks

import recckpt
from recckpt.inspect.watch import Watcher
from recckpt.inspect.watch_text import facts, line
from recckpt.output_dir.index_file import read_timeline
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import gen_slice

OTHERS = {f"_{id_}": 0.5 for id_ in range(100, 120)}


def run_of(root, rank, size, connect, wire, **options):
    """Return the run of one rank, whose near saves have a group of their own."""
    run = NearRun(root, slice=gen_slice(rank, size), shard_id=rank, shard_num=size, **options)
    connect(run.saver)
    run.saver.near_saves.ranks[rank, size] = alone(ThreadGroup(rank, wire))
    return run


def on_near_ranks(root, size, work, **options):
    """Do ``work(run)`` on several ranks; return what each gives."""
    wire = Wire(size)
    return on_ranks(size, lambda rank, connect: work(run_of(root, rank, size, connect, wire, **options)))


def trained(run):
    run.put(_1=1.0, _2=2.0, **OTHERS).step().put(_3=3.0, _4=4.0).step()
    if 4 in run.rows:
        run.erase(4)
    run.put(_5=5.0).step()
    return run.counts


def together(parts):
    whole = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


@mostly_slow()
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_two_ranks_have_saved_is_restored_by_any_number(tmp_path, size):
    assert on_near_ranks(tmp_path, 2, trained) == [(2, 0, 0)] * 2
    left = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
    assert together(on_near_ranks(tmp_path, size, lambda run: rows(run.restore()))) == left

    on_near_ranks(tmp_path, size, lambda run: run.restore().put(_6=6.0).save())
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.kind == "delta"
    assert rows(NearRun(tmp_path).restore(near=False)) == {**left, 6: 6.0}, "deletes are marks too"


def test_what_fails_on_one_rank_fails_the_near_save_on_all(tmp_path, monkeypatch):
    def failing(run):
        run.put(_1=1.0, **OTHERS).step().put(_2=2.0)
        if run.saver.near_saves.ranks.keys() == {(1, 2)}:
            storage = run.saver.near_saves.tier.dir.storage
            storage.create = lambda name: (_ for _ in ()).throw(OSError(28, "no room", name))
        run.step()
        return run.counts

    assert on_near_ranks(tmp_path, 2, failing) == [(0, 1, 0)] * 2
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}


def on_hosts(root, hosts, work, **options):
    """Do ``work(run)`` on a rank for each near dir that is named, a host each; return what each gives."""
    wire, size = Wire(len(hosts)), len(hosts)

    def on_rank(rank, connect):
        return work(run_of(root, rank, size, connect, wire, near=hosts[rank], **options))

    return on_ranks(size, on_rank)


def near_names(root, host):
    return sorted(str(seal.parent.relative_to(root / host)) for seal in (root / host).rglob("near.json"))


def test_each_host_has_the_seal_of_a_near_save_and_the_files_of_its_ranks(tmp_path):
    assert on_hosts(tmp_path, ["a", "a", "b"], trained, copies=0) == [(2, 0, 0)] * 3
    names = near_names(tmp_path, "a")
    assert len(names) == 2
    assert names == near_names(tmp_path, "b")
    for name in names:
        on_a, on_b = tmp_path / "a" / name, tmp_path / "b" / name
        assert (on_a / "near.json").read_bytes() == (on_b / "near.json").read_bytes()
        shards = [{path.name[:5] for path in near.glob("sparse/*")} for near in (on_a, on_b)]
        assert shards == [{"00000", "00001"}, {"00002"}]


def test_every_host_keeps_two_generations(tmp_path):
    on_hosts(tmp_path, ["a", "b"], lambda run: trained(run.put(_1=3.0).step()) and run.step().step())
    assert len(near_names(tmp_path, "a")) == 2
    assert near_names(tmp_path, "a") == near_names(tmp_path, "b")


def test_what_fails_on_one_host_is_given_up_on_all(tmp_path):
    def failing(run):
        run.put(_1=1.0, **OTHERS).step().put(_2=2.0).step().put(_3=3.0)
        if run.near_path.name == "b":
            storage = run.saver.near_saves.tier.dir.storage
            storage.put_if_absent = lambda name, data: (_ for _ in ()).throw(OSError(28, "no room", name))
        run.step()
        return run.counts

    assert on_hosts(tmp_path, ["a", "b"], failing) == [(1, 1, 0)] * 2
    assert len(near_names(tmp_path, "a")) == 1
    assert [path for host in "ab" for path in (tmp_path / host).rglob("INTENT")] == [
        tmp_path / host / name / "INTENT" for host in "ab" for name in near_names(tmp_path, "a")
    ]


def test_a_takeover_names_what_lies_on_hosts_of_other_ranks_alone(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained, copies=0)
    on_hosts(tmp_path, ["new", "b", "a"], lambda run: run.put(_9=9.0).save())
    assert len(newest_list(tmp_path)["near"]) == 2


def test_damage_of_one_rank_is_seen_by_all(tmp_path):
    on_near_ranks(tmp_path, 2, trained)
    damaged = parts_of(NearRun(tmp_path).near_dirs[-1])[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert together(on_near_ranks(tmp_path, 3, lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


WORLDS = [["a"], ["a", "b"], ["b", "a", "a"], ["a", "new", "b"], ["new", "b", "a", "a"]]


@mostly_slow()
@pytest.mark.parametrize("hosts", WORLDS, ids="-".join)
def test_what_hosts_have_saved_is_restored_where_each_file_is_on_one_of_them(tmp_path, hosts):
    assert on_hosts(tmp_path, ["a", "a", "b", "b"], trained, copies=0) == [(2, 0, 0)] * 4
    left = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
    is_there = {"a", "b"} <= set(hosts)
    expected = left if is_there else {1: 1.0, 2: 2.0}
    assert together(on_hosts(tmp_path, hosts, lambda run: rows(run.restore()))) == expected
    on_hosts(tmp_path, hosts, lambda run: run.restore().put(_6=6.0).step().save())
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.kind == "delta"
    assert rows(NearRun(tmp_path).restore(near=False)) == {**expected, 6: 6.0}, "deletes are marks too"


@pytest.mark.parametrize("hosts", [["b"], ["b", "new"], ["new", "b", "b"]], ids="-".join)
def test_what_another_host_has_a_copy_of_survives_the_loss_of_a_host(tmp_path, hosts):
    on_hosts(tmp_path, ["a", "a", "b"], trained)
    assert together(on_hosts(tmp_path, hosts, lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}


def test_what_is_damaged_on_one_host_is_taken_from_another(tmp_path, caplog):
    on_hosts(tmp_path, ["a", "b"], trained)
    newest = near_names(tmp_path, "a")[-1]
    for path in [*(tmp_path / "a" / newest).glob("sparse/00000*"), *(tmp_path / "b" / newest).glob("[!sI]*.pt")]:
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    parts_of(tmp_path / "b" / newest)[-1].unlink()
    assert together(on_hosts(tmp_path, ["a", "b"], lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
    assert "another host has an intact copy of a file" in caplog.text
    on_hosts(tmp_path, ["a", "b"], lambda run: run.restore().put(_6=6.0).step())
    assert together(on_hosts(tmp_path, ["a", "b"], lambda run: rows(run.restore()))).keys() == {1, 2, 3, 5, 6}


def test_damage_on_every_host_lets_the_one_before_be_restored(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained)
    newest = near_names(tmp_path, "a")[-1]
    for host in "ab":
        part = parts_of(tmp_path / host / newest)[0]
        part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert together(on_hosts(tmp_path, ["a", "b"], lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


def test_a_host_without_a_near_dir_of_its_own_is_brought_only_what_its_ranks_read(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained, copies=0)
    on_hosts(tmp_path, ["new", "b", "a", "a"], lambda run: rows(run.restore()))
    brought = {path.name for path in (tmp_path / "new").rglob("sparse/*")}
    assert brought
    assert {name[:5] for name in brought} == {"00000"}


def test_where_a_bank_has_damage_each_host_still_reads_its_own_near_dir(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained, copies=0)
    chain = Chain(tmp_path / "bank", "u")
    chain.damage("form")

    def work(run):
        run.manager.load_model_bank([{"path": str(chain.root), "load": ["u"]}])
        return rows(run)

    assert together(on_hosts(tmp_path, ["a", "b"], work, others=["u"])) == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}


def test_a_near_dir_that_is_a_copy_of_another_is_one_of_its_own_to_a_restore(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained)
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    on_hosts(tmp_path, ["a"], lambda run: run.restore().put(_6=6.0).step().put(_7=7.0).step())
    left = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0, 6: 6.0, 7: 7.0}
    assert together(on_hosts(tmp_path, ["a", "b"], lambda run: rows(run.restore()))) == left


def test_a_host_that_cannot_use_its_near_dir_is_named_once_and_fails_no_checkpoint_to_those_who_look(tmp_path, caplog):
    (tmp_path / "b").write_text("a file")
    counts = on_hosts(tmp_path, ["a", "b"], lambda run: trained(run) and run.save().counts)
    assert counts == [(0, 3, 0)] * 2
    failures = [record.message for record in caplog.records if "near save failed" in record.message]
    assert len(failures) == 1
    assert "failed on rank 1" in failures[0]
    storage = output_dir(tmp_path)
    assert [line["kind"] for line in read_timeline(storage)] == ["near", "full"], (
        "one line for those that fail in a row"
    )
    status = Watcher(storage).look()
    assert status.failed == []
    said = {fact.name: fact for fact in facts(status)}["near failed"]
    assert said.mood == "doubtful"
    assert said.text.startswith(
        "3 of 3 before ckpt_3, the last: SaveFailedError: saving 'near_3' failed on rank 1: NotA"
    )
    assert "near failed 3 of 3 before ckpt_3" in line(status)
    how = recckpt.report(storage.url)
    assert how.is_healthy
    assert any("3 of the 3 near saves before the newest checkpoint failed" in each.what for each in how.findings)
