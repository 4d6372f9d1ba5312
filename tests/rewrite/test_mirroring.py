"""A mirror has what its run has, whole at each moment, and is an output dir like any other."""

import errno
import logging
import shutil

import pytest
import torch
from faults.storage_faults import Faults
from support.builders import tree
from support.forgetting import ForgettingRun, fill, ids_at
from support.mirrors import check_same, check_whole, directories_of, ids_of, listing_of
from support.spec_reader import read
from support.sweeps import mostly_slow

import recckpt
from recckpt import CheckpointManager, CheckpointReader
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.policies.keep import All
from recckpt.rewrite.mirroring import Mirror
from recckpt.storage import open_storage

CHAIN = ("ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    ForgettingRun(root).save_chain()
    return root


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def to(tmp_path):
    return tmp_path / "to"


@mostly_slow()
def test_all_checkpoints_are_copied_byte_for_byte_and_a_second_pass_copies_nothing(run, url):
    to = f"{url}-mirror"
    done = recckpt.rewrite.mirror(run, to)
    assert (done.copied, done.newest, done.damaged) == (CHAIN, "ckpt_4", {})
    assert done.n_bytes == sum(c.manifest.n_bytes for c in listing_of(run).committed)
    check_same(run, to)
    assert open_storage(to).read(layout.INDEX_FILE, 99).decode().split() == list(CHAIN)
    again = recckpt.rewrite.mirror(run, to)
    assert (again.copied, again.removed, again.n_bytes) == ((), (), 0)


def test_what_readers_and_restores_get_of_a_mirror_is_what_the_run_gives_and_only_what_is_new_is_copied(run, to):
    recckpt.rewrite.mirror(run, to)
    assert all(read(to, name, "user") == read(run, name, "user") for name in CHAIN)
    with CheckpointReader(to) as reader:
        assert reader.manifest.step == 4
    copied = shutil.copytree(to, to.with_name("copied"))
    (copied / layout.MIRROR).unlink()
    assert ForgettingRun(copied).saver.load().global_step == 4
    going_on = ForgettingRun(run)
    going_on.saver.load()
    fill(going_on.user, ids_at(6), 5.0)
    going_on.saver.save("ckpt_5", step=5)
    before = tree(to / "ckpt_1")
    assert recckpt.rewrite.mirror(run, to).copied == ("ckpt_5",)
    assert tree(to / "ckpt_1") == before
    check_same(run, to)


def test_the_newest_comes_first_an_overwritten_one_is_replaced_and_an_ephemeral_one_goes_with_that_of_the_run(
    tmp_path, to
):
    trainer = ForgettingRun(tmp_path / "run", deltas=False)
    for step in (1, 2, 3):
        trainer.saver.save(f"ckpt_{step}", step=step)
    assert recckpt.rewrite.mirror(tmp_path / "run", to).copied == ("ckpt_3", "ckpt_2", "ckpt_1")
    trainer.saver.save("ckpt_3", step=3, overwrite=True)
    trainer.saver.save("now", step=4, ephemeral=True)
    recckpt.rewrite.mirror(tmp_path / "run", to)
    assert ids_of(to) == ["ckpt_1", "ckpt_2", "ckpt_3", "now"]
    assert [c.manifest.save_id for c in listing_of(to).committed] == [
        c.manifest.save_id for c in listing_of(tmp_path / "run").current
    ]
    check_same(tmp_path / "run", to)
    trainer.saver.save("ckpt_5", step=5)
    recckpt.rewrite.mirror(tmp_path / "run", to)
    assert ids_of(to) == ["ckpt_1", "ckpt_2", "ckpt_3", "ckpt_5"]


def test_what_rotation_removed_goes_and_a_policy_of_its_own_keeps_it(tmp_path):
    trainer = ForgettingRun(tmp_path / "run", deltas=False, max_keep=2)
    for step in range(1, 6):
        trainer.saver.save(f"ckpt_{step}", step=step)
        done = recckpt.rewrite.mirror(tmp_path / "run", tmp_path / "same")
        recckpt.rewrite.mirror(tmp_path / "run", tmp_path / "more", keep=4)
        recckpt.rewrite.mirror(tmp_path / "run", tmp_path / "all", keep=All())
        recckpt.rewrite.mirror(tmp_path / "run", tmp_path / "one", keep=1)
    assert done.removed == ("ckpt_3",)
    assert ids_of(tmp_path / "same") == ["ckpt_4", "ckpt_5"]
    assert ids_of(tmp_path / "more") == ["ckpt_2", "ckpt_3", "ckpt_4", "ckpt_5"]
    assert ids_of(tmp_path / "all") == [f"ckpt_{step}" for step in range(1, 6)]
    assert ids_of(tmp_path / "one") == ["ckpt_5"]


def test_of_a_delta_all_links_are_there_and_what_was_compacted_comes_in_the_place_of_what_it_supersedes(run, to):
    recckpt.rewrite.mirror(run, to, keep=1)
    assert directories_of(to) == {*CHAIN}, "whatever the policy says"
    check_same(run, to)
    form = recckpt.rewrite.compact(run, "ckpt_3", adopt=True).directory
    done = recckpt.rewrite.mirror(run, to)
    assert (done.copied, done.removed) == ((form,), ("ckpt_3",))
    assert b'"offer": true' in (to / form / layout.INTENT).read_bytes()
    assert ids_of(to) == list(CHAIN)
    check_same(run, to)


def test_what_is_pinned_in_the_run_is_pinned_in_the_mirror_and_unpinned_with_it(run, to):
    recckpt.rewrite.mirror(run, to)
    rotation.pin(open_storage(str(run)), "ckpt_2")
    rotation.pin(open_storage(str(to)), "ckpt_1")  # by somebody who uses the mirror
    recckpt.rewrite.mirror(run, to)
    assert rotation.pinned_ids(open_storage(str(to))) == {"ckpt_1", "ckpt_2"}
    rotation.unpin(open_storage(str(run)), "ckpt_2")
    recckpt.rewrite.mirror(run, to)
    assert rotation.pinned_ids(open_storage(str(to))) == {"ckpt_1"}


KINDS = ("model.pt", "extra.pt", "sparse/00000-of-00001.json", "sparse/00000-of-00001.g0.00.arrow")


@mostly_slow()
@pytest.mark.parametrize("name", [*reversed(KINDS), layout.MANIFEST])
def test_a_damaged_checkpoint_is_never_copied_and_the_others_are(run, to, name):
    good = (run / "ckpt_2" / name).read_bytes()
    data = bytearray(good)
    data[len(data) // 2] ^= 4
    (run / "ckpt_2" / name).write_bytes(data)
    done = recckpt.rewrite.mirror(run, to)
    assert done.copied == ("ckpt_1",)
    assert f"ckpt_2/{name}" in done.damaged["ckpt_2"]
    assert ([*done.damaged], done.left_out) == (["ckpt_2"], {"ckpt_3": "ckpt_2", "ckpt_4": "ckpt_2"})
    assert done.removed == (), "what was begun was no checkpoint"
    assert ids_of(to) == ["ckpt_1"]
    check_whole(to)
    (run / "ckpt_2" / name).write_bytes(good)
    assert recckpt.rewrite.mirror(run, to).copied == ("ckpt_2", "ckpt_3", "ckpt_4")
    check_same(run, to)


def test_every_flipped_byte_of_a_part_is_seen(run, to):
    part = run / "ckpt_1" / KINDS[3]
    data = part.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 9)):
        part.write_bytes(bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]]))
        done = recckpt.rewrite.mirror(run, to)
        assert (done.copied, [*done.damaged], directories_of(to)) == ((), ["ckpt_1"], set()), at


def test_what_is_damaged_in_the_run_stays_in_the_mirror_and_what_stands_on_a_form_is_not_left_out(run, to, tmp_path):
    recckpt.rewrite.mirror(run, to)
    (run / "ckpt_1" / "model.pt").rename(tmp_path / "model.pt")
    done = recckpt.rewrite.mirror(run, to)
    assert ([*done.damaged], done.left_out) == (["ckpt_1"], {}), "the deltas are whole in the mirror"
    assert (done.removed, ids_of(to)) == ((), list(CHAIN))
    check_whole(to)
    (tmp_path / "model.pt").rename(run / "ckpt_1" / "model.pt")
    recckpt.rewrite.compact(run, "ckpt_3", adopt=True)
    (run / "ckpt_2" / "model.pt").unlink()
    done = recckpt.rewrite.mirror(run, tmp_path / "other")
    assert ([*done.damaged], done.left_out) == (["ckpt_2"], {})
    assert ids_of(tmp_path / "other") == ["ckpt_1", "ckpt_3", "ckpt_4"]


def test_what_stands_on_what_cannot_be_read_is_named_and_logged_once(run, to, tmp_path, caplog):
    (run / "ckpt_2").rename(tmp_path / "elsewhere")
    (run / "ckpt_2").symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.ERROR):
        done = recckpt.rewrite.mirror(run, to)
    assert ([*done.damaged], done.left_out) == (["ckpt_2"], {"ckpt_3": "ckpt_2", "ckpt_4": "ckpt_2"})
    first, *others = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{run}: ckpt_2 is damaged, and not copied: ")
    assert others == [f"{run}: {name} builds on ckpt_2, and is not copied" for name in ("ckpt_3", "ckpt_4")]


def test_what_is_damaged_in_the_mirror_alone_stays_for_whoever_wants_to_salvage_it(tmp_path, to):
    trainer = ForgettingRun(tmp_path / "run", deltas=False, max_keep=1)
    for step in (1, 2):
        trainer.saver.save(f"ckpt_{step}", step=step)
        recckpt.rewrite.mirror(tmp_path / "run", to, keep=All())
    (to / "ckpt_1" / "model.pt").unlink()
    assert recckpt.rewrite.mirror(tmp_path / "run", to, keep=1).removed == ()
    assert (to / "ckpt_1" / layout.MANIFEST).exists()


def test_what_is_missing_in_the_mirror_is_copied_again(run, to):
    recckpt.rewrite.mirror(run, to)
    (to / "ckpt_1" / "model.pt").unlink()
    (to / "ckpt_3" / layout.MANIFEST).write_bytes(b"{}")
    done = recckpt.rewrite.mirror(run, to)
    assert set(done.copied) == {*CHAIN}  # the deltas stood on what was damaged; only its files were read again
    assert done.n_bytes == (run / "ckpt_1" / "model.pt").stat().st_size
    check_same(run, to)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_an_interrupted_copy_goes_on_with_the_files_that_are_missing(run, tmp_path, memory_url, kind):
    to = str(tmp_path / "to") if kind == "local" else memory_url
    made = Mirror(run, to)
    faults = Faults(made._to)
    faults.plant(31, errno.ENOSPC, for_ever=True)
    with pytest.raises(OSError, match="No space left"):
        made.update()
    assert directories_of(to) == set()
    n_there = sum(name.endswith((".pt", ".arrow", ".json")) for name in open_storage(to).list_files("ckpt_1"))
    assert n_there > 0
    done = recckpt.rewrite.mirror(run, to)
    total = sum(c.manifest.n_bytes for c in listing_of(run).committed)
    assert (done.copied, 0 < done.n_bytes < total) == (CHAIN, True)
    check_same(run, to)


def test_what_the_run_removes_while_it_is_copied_is_not_there_and_what_came_after_is(tmp_path, to):
    trainer = ForgettingRun(tmp_path / "run", deltas=False, max_keep=1)
    trainer.saver.save("ckpt_1", step=1)
    made = Mirror(tmp_path / "run", to)
    draft, removals = made._to.draft, iter([None])

    def save_meanwhile(name):
        for _ in removals:
            trainer.saver.save("ckpt_2", step=2)
        return draft(name)

    made._to.draft = save_meanwhile
    assert made.update().copied == ("ckpt_2",)
    assert open_storage(str(to)).list_dirs() == [layout.OWN_DIR, "ckpt_2"]
    check_same(tmp_path / "run", to)


def test_nobody_saves_in_a_mirror_until_its_note_is_gone_and_then_it_is_none(run, to):
    following = Mirror(run, to)
    following.update()
    before = tree(to)
    what = f"{to} is a mirror of {run}, and must not be saved to.*remove .recckpt/mirror.json there"
    writers = (
        lambda: ForgettingRun(to),
        lambda: CheckpointManager.attach(torch.nn.Linear(1, 1), output_dir=str(to), save_interval=1),
        lambda: recckpt.rewrite.forget(to, "user", ids_at(5)),
        lambda: recckpt.rewrite.compact(run, "ckpt_3", out=to),
        lambda: recckpt.rewrite.compact(to, adopt=True),
    )
    for write in writers:
        with pytest.raises(RecckptError, match=what):
            write()
    assert tree(to) == before
    (to / layout.MIRROR).unlink()
    trainer = ForgettingRun(to)
    assert trainer.saver.load().global_step == 4
    trainer.saver.save("ckpt_5", step=5)
    assert listing_of(to).current[-1].manifest.kind == "delta"  # on what was mirrored
    before = tree(to)
    for late in (following.update, lambda: recckpt.rewrite.mirror(run, to)):
        with pytest.raises(RecckptError, match="found ckpt_1/, which no mirror has written"):
            late()
    assert tree(to) == before


def test_a_saver_that_was_made_before_the_mirror_saves_nothing_there(run, to):
    trainer = ForgettingRun(to)
    recckpt.rewrite.mirror(run, to)
    before = tree(to)
    with pytest.raises(RecckptError, match=f"{to} is a mirror of {run}"):
        trainer.saver.save("ckpt_5", step=5)
    assert tree(to) == before


def before_it(call, act):
    """Do something once, before the first of some calls."""
    acts = iter([act])

    def wrapped(*args):
        for each in acts:
            each()
        return call(*args)

    return wrapped


def test_a_mirror_that_finds_a_saver_has_come_since_it_looked_leaves_the_place_to_it(run, to):
    trainer, made = ForgettingRun(to), Mirror(run, to)
    made._to.replace = before_it(made._to.replace, lambda: trainer.saver.save("ckpt_5", step=5))
    with pytest.raises(RecckptError, match=r"found .recckpt/owner/1.json: a saver has claimed this place"):
        made.update()
    assert not (to / layout.MIRROR).exists()
    trainer.saver.save("ckpt_6", step=6)
    assert ids_of(to) == ["ckpt_5", "ckpt_6"]


def test_a_saver_that_finds_a_mirror_has_come_since_it_looked_leaves_the_place_to_it(run, to):
    trainer, made = ForgettingRun(to), Mirror(run, to)
    storage = trainer.saver.storage
    storage.put_if_absent = before_it(storage.put_if_absent, made._hold.take)
    with pytest.raises(RecckptError, match=f"{to} is a mirror of {run}"):
        trainer.saver.save("ckpt_5", step=5)
    assert made.update().copied == CHAIN
    check_same(run, to)


def test_the_note_of_a_mirror_that_is_damaged_or_newer_is_in_the_way_of_all_who_write(run, to):
    recckpt.rewrite.mirror(run, to)
    note = to / layout.MIRROR
    good = note.read_bytes()
    flip, other = good[:40] + bytes([good[40] ^ 1]) + good[41:], good.replace(b'"pid": ', b'"pid": 1')
    for data in (b"", good[:-9], flip, other, b"[]"):
        note.write_bytes(data)
        for write in (lambda: recckpt.rewrite.mirror(run, to), lambda: ForgettingRun(to)):
            with pytest.raises(CorruptCheckpointError, match=r"mirror\.json.*if this directory is a mirror, remove it"):
                write()
    note.write_bytes(good.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(FormatVersionError):
        recckpt.rewrite.mirror(run, to)
    note.write_bytes(good)
    assert recckpt.rewrite.mirror(run, to).copied == ()


def test_of_two_mirrors_into_one_place_both_go_on_pass_by_pass_and_a_mirror_has_mirrors(run, to, tmp_path):
    first, second = Mirror(run, to), Mirror(run, to)
    for each in (first, second, first, second):
        each.update()
        done = recckpt.rewrite.mirror(to, tmp_path / "second")
    assert done.copied == ()
    check_same(run, to)
    check_same(run, tmp_path / "second")


def test_another_run_and_what_is_no_mirror_are_refused_before_anything_changes(run, to, tmp_path):
    ForgettingRun(tmp_path / "other").saver.save("ckpt_1", step=1)
    recckpt.rewrite.mirror(run, to)
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / layout.OWN_DIR)
    cases = [
        (tmp_path / "other", to, RecckptError, f"is a mirror of {run}, and not of the run"),
        (tmp_path / "other", run, RecckptError, "found ckpt_1/, which no mirror has written"),
        (tmp_path / "other", tmp_path / "copy", RecckptError, "found ckpt_1/, which no mirror has written"),
        (run, run, ValueError, "a mirror must be outside its run"),
        (run, run / "inside", ValueError, "a mirror must be outside its run"),
        (tmp_path / "nothing", to, CheckpointNotFoundError, "does not exist"),
    ]
    for source, target, error, message in cases:
        before = tree(tmp_path)
        with pytest.raises(error, match=message):
            recckpt.rewrite.mirror(source, target)
        assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "name", [layout.TIMELINE, layout.INDEX_FILE, layout.FORGOTTEN, ".notes", "mine/thesis.txt", f"{layout.PINS_DIR}/a"]
)
def test_a_place_with_anything_else_in_it_is_refused_before_anything_changes(run, url, name):
    to = open_storage(url)
    to.prepare()
    parents = [name[:at] for at in range(len(name)) if name[at] == "/"]
    for parent in parents:
        to.make_dir(parent)
    to.put_if_absent(name, b"mine\n")
    found = "mine/" if name.startswith("mine") else name
    with pytest.raises(RecckptError, match=f"found {found}, which no mirror has written, .*move away what is there"):
        recckpt.rewrite.mirror(run, url)
    assert to.list_files("") == [name]
    assert to.read(name, 99) == b"mine\n"
    to.remove(name)


def test_what_a_first_pass_left_before_it_had_a_note_is_gone_over(run, to):
    (to / layout.OWN_DIR).mkdir(parents=True)
    (to / layout.probe()).touch()
    (to / layout.temporary(layout.MIRROR)).touch()
    assert recckpt.rewrite.mirror(run, to).copied == CHAIN
    check_same(run, to)


@pytest.mark.slow
def test_a_prefix_of_s3_with_nothing_but_its_marker_is_empty(run, s3_url):
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    fs = open_storage(s3_url)._fs
    fs.call_s3("put_object", Bucket=bucket, Key=f"{prefix}/", Body=b"")  # as the console makes a "folder"
    assert recckpt.rewrite.mirror(run, s3_url).copied == CHAIN


def test_a_pass_over_a_mirror_lists_no_files_of_its_root_and_a_run_that_was_begun_anew_is_another(run, to, monkeypatch):
    for option in ({"keep": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match="found"):
            recckpt.rewrite.mirror(run, to, **option)
    assert not to.exists()
    recckpt.rewrite.mirror(run, to)
    (to / "mine.txt").touch()  # what a person adds later stays
    following, listed = Mirror(run, to), []
    list_files = following._to.list_files
    monkeypatch.setattr(following._to, "list_files", lambda name: listed.append(name) or list_files(name))
    following.update()
    assert "" not in listed
    assert (to / "mine.txt").exists()
    shutil.rmtree(run)
    ForgettingRun(run).saver.save("ckpt_1", step=1)
    with pytest.raises(RecckptError, match="not of the run that is now in"):
        recckpt.rewrite.mirror(run, to)
    assert ids_of(to) == list(CHAIN)
