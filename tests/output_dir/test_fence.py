"""Two writers on one output dir: the later one wins, and the earlier one writes nothing more."""

import json
import os
import pickle
import shutil
import socket

import pytest
import torch
from support.builders import tree
from support.forge import fence_of, filled, save_tables
from support.forgetting import ForgettingRun, fill
from torch import nn

import recckpt
from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError, FormatVersionError, SaveFailedError, WriterFencedError
from recckpt.format import layout
from recckpt.format.codec import seal
from recckpt.inspect.repair import repair
from recckpt.output_dir import fence as fences
from recckpt.output_dir import fence as fencing
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.claims import claimed_epochs, last_takeover, read_claim
from recckpt.output_dir.commit import begin
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import list_checkpoints, locate, newest
from recckpt.storage import Storage, open_storage
from recckpt.storage.local import LocalStorage


@pytest.fixture
def storage(url) -> Storage:
    storage = open_storage(url)
    storage.prepare()
    return storage


def writer(url, **options) -> Saver:
    return Saver(nn.Linear(1, 1), output_dir=str(url), **options)


def test_nothing_is_claimed_before_the_first_save_and_a_claim_says_whose_it_is(storage):
    fence = Fence(storage)
    fence.check()
    assert (fence.epoch, storage.list_files("")) == (0, [])
    fence.hold()
    assert fence.epoch == 1
    assert storage.list_files(".recckpt/owner") == ["1.json", "1.list.json"]
    claim = read_claim(storage, 1)
    assert (claim.epoch, claim.pid, claim.host) == (1, os.getpid(), socket.gethostname())
    assert len(claim.nonce) == 32


def test_the_earlier_writers_are_told_who_took_over_and_since_when_and_stay_fenced(storage):
    *earlier, last = (Fence(storage) for _ in range(5))
    earlier[0].hold()
    earlier[0].check()
    for fence in (*earlier[1:], last):
        fence.hold()
    since = read_claim(storage, 5).time
    for fence in (*earlier, *earlier):
        with pytest.raises(WriterFencedError, match=f"taken over by process {os.getpid()} on .* since .*epoch 5") as e:
            fence.check()
        assert (e.value.epoch, e.value.since) == (5, since)
    with pytest.raises(WriterFencedError):
        earlier[0].hold()
    last.check()
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_claim_that_another_is_faster_with_takes_the_next_number(storage, monkeypatch):
    Fence(storage).hold()
    seen = iter([[]])  # as if the first had not claimed yet
    monkeypatch.setattr(fences, "claimed_epochs", lambda storage: next(seen, None) or claimed_epochs(storage))
    fence = Fence(storage)
    fence.hold()
    assert fence.epoch == 2


def test_a_claim_without_a_list_is_harmless_and_the_next_writer_takes_the_next_number(storage, monkeypatch):
    save_tables(storage, [filled("item", [1])], ckpt_id="a")
    with monkeypatch.context() as patch:
        patch.setattr(fencing, "publish", lambda *args: 1 / 0)
        dying = Fence(storage)
        with pytest.raises(ZeroDivisionError):
            dying.hold()
    assert [c.ckpt_id for c in list_checkpoints(storage).committed] == ["a"]
    dying.hold()
    assert dying.epoch == 3
    assert last_takeover(storage).epoch == 3


def test_a_writer_whose_output_dir_was_made_anew_is_fenced(tmp_path):
    (tmp_path / "runs").mkdir()
    old = Fence(open_storage(str(tmp_path / "runs")))
    old.hold()
    (tmp_path / "runs").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="the directory is gone: it was removed, renamed or unmounted"):
        old.check()
    (tmp_path / "runs").mkdir()
    new = Fence(open_storage(str(tmp_path / "runs")))
    new.hold()
    assert new.epoch == 1
    with pytest.raises(WriterFencedError, match="is gone or replaced"):
        Fence.check(old)


def test_saving_goes_on_once_an_output_dir_that_was_removed_is_there_again(tmp_path, caplog):
    saver = writer(tmp_path / "runs", max_keep=None)
    saver.save("a")
    (tmp_path / "runs").rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(SaveFailedError, match=r"the directory is gone: .* saves continue once it is back"):
            saver.save("b")
        assert not (tmp_path / "runs").exists()
    (tmp_path / "away").rename(tmp_path / "runs")  # as a mount that is there again
    assert saver.save("b").epoch == 1
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    assert saver.save("c").epoch == 2  # never one that was its own before
    assert "was emptied or created again since the last save" in caplog.text
    assert [c.ckpt_id for c in list_checkpoints(saver.storage).committed] == ["c"]


@pytest.mark.parametrize("again", [False, True])
def test_an_output_dir_that_is_removed_in_the_middle_of_a_save_fails_that_save_alone(tmp_path, gate, again):
    saver = writer(tmp_path / "runs")
    saver.save("a")
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("b")
    writing.wait()
    shutil.rmtree(tmp_path / "runs")
    if again:
        (tmp_path / "runs").mkdir()
    writing.open()
    with pytest.raises(SaveFailedError):
        handle.wait()
    assert (tmp_path / "runs").exists() == again
    (tmp_path / "runs").mkdir(exist_ok=True)
    assert saver.save("c").epoch == 2
    assert newest(saver.storage).ckpt_id == "c"


def test_of_two_writers_of_an_output_dir_that_was_emptied_one_goes_on(tmp_path):
    (tmp_path / "runs").mkdir()
    first, second = (Fence(open_storage(str(tmp_path / "runs"))) for _ in range(2))
    first.hold()
    second.hold()
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    second.hold()
    with pytest.raises(WriterFencedError):
        first.hold()
    second.hold()
    assert second.epoch == 3


def test_a_writer_whose_claim_was_removed_goes_on_unless_another_has_claimed_since(url):
    first, second = writer(url, max_keep=None), writer(url, max_keep=None)
    first.save("a")
    first.storage.remove(layout.claim(1))
    assert first.save("b").epoch == 2, "its list is there still"
    second.load()
    assert second.save("c").epoch == 3
    for epoch in (2, 3):
        first.storage.remove(layout.claim(epoch))
    with pytest.raises(WriterFencedError, match="epoch 3"):
        first.save("d")
    assert second.save("d").epoch == 4
    assert [c.ckpt_id for c in list_checkpoints(second.storage).committed] == ["a", "b", "c", "d"]


def test_a_new_run_in_an_old_output_dir_is_warned_once_unless_it_has_loaded_from_it(url, caplog):
    writer(url, max_keep=None).save("a")
    assert caplog.text == ""
    resumed = writer(url, max_keep=None)
    resumed.load()
    resumed.save("b")
    assert "which this run has not loaded" not in caplog.text
    new = writer(url, max_keep=None)
    manager = CheckpointManager(new, 1)
    for _ in range(3):
        manager.step()
    assert caplog.text.count("found 2 checkpoints of an earlier run, the newest 'b', which this run has not") == 1


def test_a_fenced_saver_or_manager_raises_and_changes_nothing_and_the_other_goes_on(tmp_path):
    first, second = (CheckpointManager(writer(tmp_path), 1) for _ in range(2))
    first.step()
    second.saver.save("ckpt_2")
    before = tree(tmp_path)
    for save in (lambda: first.saver.save("ckpt_3"), lambda: first.saver.save("ckpt_3"), first.step):
        with pytest.raises(WriterFencedError, match="epoch 2"):
            save()
    assert tree(tmp_path) == before
    second.step()
    assert newest(second.saver.storage).manifest.epoch == 2


def test_a_late_commit_is_ignored_by_readers_and_its_writer_is_told(url, caplog):
    first, second = writer(url), writer(url, max_keep=None)
    first.save("ckpt_1")
    real = first.storage.put_if_absent

    def late(name, data):  # the takeover comes between the last check and the commit
        if name.endswith("manifest.json"):
            second.save("ckpt_1", overwrite=True)
        real(name, data)

    first.storage.put_if_absent = late
    with pytest.raises(WriterFencedError, match="epoch 2"):
        first.save("ckpt_2")
    listing = list_checkpoints(second.storage)
    assert [(c.ckpt_id, c.manifest.epoch) for c in listing.committed] == [("ckpt_1", 2)]
    assert newest(second.storage).manifest.epoch == 2
    with pytest.raises(FileNotFoundError):
        locate(second.storage, "ckpt_2")
    with pytest.raises(FileNotFoundError):
        second.load(f"{url}/ckpt_2", direct_path=True)
    assert listing.damaged == {}
    if "memory://" in url:  # elsewhere it has no directory to put a manifest into any more
        assert list(listing.fenced) == ["ckpt_2"]
        assert "by the writer of epoch 1 after the writer of epoch 2 had taken over" in caplog.text


def test_what_was_committed_before_the_takeover_counts_after_it_and_what_dead_writers_left_goes(storage):
    for ckpt_id in ("a", "b", "dead"):
        save_tables(storage, [filled("item", [1])], ckpt_id=ckpt_id)
    storage.remove("dead/manifest.json")
    Fence(storage).hold()
    assert last_takeover(storage).epoch == 2
    assert storage.list_files("dead") == []
    assert [c.ckpt_id for c in list_checkpoints(storage).committed] == ["a", "b"]


def test_a_checkpoint_that_was_copied_out_of_its_output_dir_counts_and_one_copied_in_is_taken_over(tmp_path):
    for _ in range(3):
        elsewhere = writer(tmp_path / "elsewhere")
        elsewhere.save("x", overwrite=True)
    saver = writer(tmp_path / "runs", max_keep=None)
    (tmp_path / "elsewhere" / "x.3").rename(tmp_path / "runs" / "x")
    saver.save("a")
    assert newest(saver.storage).ckpt_id == "a"
    assert newest(saver.storage).manifest.epoch == 4
    Fence(saver.storage).hold()
    (tmp_path / "copy").mkdir()
    (tmp_path / "runs" / "a").rename(tmp_path / "copy" / "a")
    assert newest(open_storage(str(tmp_path / "copy"))).ckpt_id == "a"


def test_a_damaged_checkpoint_is_still_a_damaged_one_after_a_takeover_and_counts_once_it_is_mended(storage):
    save_tables(storage, [filled("item", [1])], ckpt_id="a")
    [name] = [name for name in storage.list_files("a") if name.endswith(".arrow")]
    data = storage.read(f"a/{name}", 1 << 20)
    storage.remove(f"a/{name}")
    Fence(storage).hold()
    listing = list_checkpoints(storage)
    assert (list(listing.damaged), listing.fenced) == (["a"], {})
    with pytest.raises(CorruptCheckpointError):
        newest(storage)
    with storage.create(f"a/{name}") as sink:
        sink.write(data)
    assert newest(storage).ckpt_id == "a"


def test_the_highest_step_is_that_of_any_attempt_and_is_handed_on(storage):
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_5", step=5)
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_9", step=9)
    storage.remove("ckpt_9/manifest.json")
    for _ in range(2):
        fence = Fence(storage)
        fence.hold()
        assert [last_takeover(storage).has_seen(f"ckpt_{step}") for step in (5, 9, 10)] == [True, True, False]


def test_a_name_that_an_earlier_writer_may_be_at_work_in_is_never_used_again(storage):
    for ckpt_id in ("best", "ckpt_3.2"):
        save_tables(storage, [filled("item", [1])], ckpt_id=ckpt_id)
        storage.remove(f"{ckpt_id}/manifest.json")
    fence = Fence(storage)
    fence.hold()
    assert storage.list_dirs() == [".recckpt"]
    for _ in range(2):
        intent, _ = begin(storage, fence, "best", step=None, overwrite=False, base=None)
        assert intent.directory == f"best.{fence.epoch}"
        names = ("best", "last", "ckpt_3", "ckpt_4")
        assert [last_takeover(storage).has_seen(name) for name in names] == [True, False, True, False]
        fence = Fence(storage)
        fence.hold()


def test_a_name_that_this_writer_has_used_is_never_used_again(storage):
    fence, names = Fence(storage), []
    for _ in range(4):
        intent, _ = begin(storage, fence, "best", step=None, overwrite=False, base=None)
        names.append(intent.directory)
        rotation.remove_leftover(storage, intent.directory, 1)
        assert storage.list_dirs() == [".recckpt"]
    assert names == ["best", "best.1", "best.1.1", "best.1.2"]


def test_the_name_of_a_delta_that_was_compacted_and_is_gone_is_not_used_again_by_the_next_writer(tmp_path):
    run = ForgettingRun(tmp_path)
    for number, ckpt_id in enumerate(("best", "last", "more", "end")):
        fill(run.user, range(100 if number == 0 else 2), float(number))
        run.saver.save(ckpt_id)
        if ckpt_id == "last":
            recckpt.rewrite.compact(str(tmp_path))  # adopted by the next save; the one after it removes the delta
    assert not (tmp_path / "last").exists()
    storage = open_storage(str(tmp_path))
    assert locate(storage, "last").manifest.supersedes
    fence = Fence(storage)
    intent, _ = begin(storage, fence, "last", step=None, overwrite=True, base=None)
    assert intent.directory == f"last.{fence.epoch}"


def test_a_writer_that_is_overtaken_while_it_makes_its_directory_goes_no_further(storage):
    first, second = Fence(storage), Fence(storage)
    first.hold()
    real = storage.make_dir

    def slow(name):
        storage.make_dir = real
        second.hold()
        real(name)

    storage.make_dir = slow
    with pytest.raises(WriterFencedError):
        begin(storage, first, "ckpt_1", step=1, overwrite=False, base=None)
    assert storage.list_files("ckpt_1") == ["INTENT"]


def test_a_save_that_fails_at_its_first_file_leaves_no_directory(tmp_path, monkeypatch):
    saver = writer(tmp_path)
    saver.save("a")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put_if_absent", lambda *args: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(SaveFailedError, match="No space left"):
            saver.save("b")
    assert saver.storage.list_dirs() == [".recckpt", "a"]
    assert saver.save("b").ckpt_id == "b"


def test_empty_directories_of_writers_that_died_go_at_the_next_takeover_and_others_by_repair(tmp_path):
    writer(tmp_path).save("a")
    for name in ("ckpt_7", "ckpt_7.1", "best"):
        (tmp_path / name).mkdir()
    writer(tmp_path).save("a", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [".recckpt", "a.2", "best"]
    assert repair(str(tmp_path), clean=True).removed == ("best",)
    assert not (tmp_path / "best").exists()


def test_a_number_whose_claim_a_later_owner_has_removed_is_not_used_again(storage, monkeypatch):
    late, first, second = Fence(storage), Fence(storage), Fence(storage)
    real = fences.put_claim

    def slow(storage, claim):  # it has found no claim, and two writers come before it has its own
        with monkeypatch.context() as patch:
            patch.setattr(fences, "put_claim", real)
            first.hold()
            second.hold()
        real(storage, claim)

    monkeypatch.setattr(fences, "put_claim", slow)
    with pytest.raises(WriterFencedError, match="epoch 2, this process has epoch 1"):
        late.hold()
    assert storage.list_files(layout.OWNER_DIR) == ["1.json", "2.json", "2.list.json"]
    for fence in (first, late):
        with pytest.raises(WriterFencedError):
            fence.check()
    second.check(is_thorough=True)


def test_a_reader_whose_list_goes_before_it_is_read_takes_the_next(storage, monkeypatch):
    Fence(storage).hold()
    real = storage.read

    def late(name, max_bytes):
        storage.read = real
        Fence(storage).hold()
        return real(name, max_bytes)

    storage.read = late
    assert last_takeover(storage).epoch == 2
    storage.read = lambda name, max_bytes: real("nowhere", max_bytes)
    with pytest.raises(CorruptCheckpointError, match=r"2\.list\.json"):
        last_takeover(storage)


def test_leftovers_are_not_swept_by_a_writer_that_is_overtaken_while_it_takes_over(storage, monkeypatch):
    save_tables(storage, [filled("item", [1])], ckpt_id="a")
    storage.remove("a/manifest.json")
    first, second = Fence(storage), Fence(storage)
    real = storage.put_if_absent

    def late(name, data):
        real(name, data)
        if name.endswith("2.list.json"):
            with monkeypatch.context() as patch:
                patch.setattr(rotation, "remove_leftover", lambda *args: None)
                second.hold()

    storage.put_if_absent = late
    with pytest.raises(WriterFencedError):
        first.hold()
    assert "INTENT" in storage.list_files("a")


def test_a_writer_leaves_to_the_next_takeover_what_an_earlier_one_makes_late(url):
    first, second = Fence(open_storage(url)), writer(url)
    second.storage.prepare()
    first.hold()
    second.save("ckpt_1")
    second.storage.make_dir("ckpt_2.1")
    write_intent(second.storage, Intent("ckpt_2.1", 1, "0" * 32, 2))
    second.save("ckpt_3")
    assert second.storage.list_files("ckpt_2.1") == ["INTENT"]
    writer(url).save("ckpt_4")
    assert second.storage.list_files("ckpt_2.1") == []


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data.replace(b"committed", b"commitTed", 1)]
)
def test_a_damaged_list_is_reported_and_loses_nothing(tmp_path, damage):
    saver = writer(tmp_path, max_keep=None)
    for ckpt_id in ("a", "b"):
        saver.save(ckpt_id)
    path = tmp_path / ".recckpt" / "owner" / "1.list.json"
    path.write_bytes(damage(path.read_bytes()))
    listing = list_checkpoints(saver.storage)
    assert [c.ckpt_id for c in listing.committed] == ["a", "b"]
    assert list(listing.damaged) == [".recckpt/owner/1.list.json"]
    again = writer(tmp_path)
    again.save("c")
    assert newest(again.storage).ckpt_id == "c"


def test_the_list_of_a_newer_version_is_refused_by_number(tmp_path):
    writer(tmp_path).save("a")
    path = tmp_path / ".recckpt" / "owner" / "1.list.json"
    values = json.loads(path.read_text()) | {"version": 9}
    values.pop("owner_xxh3")
    path.write_bytes(seal(values, "owner_xxh3"))
    with pytest.raises(FormatVersionError, match="version 9"):
        newest(open_storage(str(tmp_path)))
    with pytest.raises(FormatVersionError, match="version 9"):
        writer(tmp_path).save("b")


def test_a_restart_resumes_and_goes_on_under_plain_names(tmp_path):
    def manager():
        return CheckpointManager(Saver(nn.Linear(1, 1), output_dir=str(tmp_path)), 1)

    first = manager()
    first.step()
    first.step()
    second = manager()
    assert second.restore() == 2
    second.step()
    assert (tmp_path / "ckpt_3").is_dir()
    third = manager()
    assert third.restore() == 3
    assert third.restore(3) == 3
    assert torch.equal(third.saver.model.weight, second.saver.model.weight)


def orphaned_list(storage, epoch) -> None:
    """Leave a list without its claim, as a partial copy of an output dir does."""
    with storage.create(f".recckpt/owner/{epoch}.list.json") as sink:
        sink.write(seal(LIST | {"epoch": epoch}, "owner_xxh3"))


LIST = {"format": "recckpt-owner", "version": 1, "epoch": 0, "nonce": "0" * 32, "run": "0" * 32, "committed": []}
LIST |= {"highest_step": -1, "directories": []}


def test_a_claim_is_above_a_list_whose_claim_is_gone_and_a_commit_that_a_list_excludes_is_none(url):
    saver = writer(url)
    orphaned_list(saver.storage, 7)
    saver.save("a")
    assert (newest(saver.storage).ckpt_id, newest(saver.storage).manifest.epoch) == ("a", 8)
    real = saver.storage.put_if_absent

    def late(name, data):
        real(name, data)
        if name.endswith("manifest.json"):
            saver.storage.put_if_absent = real
            orphaned_list(saver.storage, 9)

    saver.storage.put_if_absent = late
    with pytest.raises(WriterFencedError, match="epoch 9"):
        saver.save("b")
    assert list(list_checkpoints(saver.storage).fenced) == ["a", "b"]


def test_a_number_after_which_there_is_none_is_refused_and_not_tried_for_ever(url):
    saver = writer(url)
    with saver.storage.create(".recckpt/owner/999999999999999999.json") as sink:
        sink.write(b"{}")
    with pytest.raises(CorruptCheckpointError, match=r"epoch 999999999999999999.*another output dir"):
        saver.save("a")


def test_a_takeover_removes_the_offers_of_lower_epochs_and_does_not_name_them_since_nobody_uses_them_again(storage):
    fence = Fence(storage)
    fence.hold()
    own, earlier = (layout.offer_dir("a", f"{n}f" * 16) for n in range(2))
    for directory, epoch in (("b", 1), (earlier, 1), (own, 2)):
        storage.make_dir(directory)
        write_intent(storage, Intent(directory, epoch, "0f" * 16, None, is_offer=directory != "b"))
    Fence(storage).hold()
    assert last_takeover(storage).directories == {"b"}
    assert storage.list_dirs() == [".recckpt", own]


def test_what_a_compactor_writes_where_its_offer_was_removed_goes_at_the_next_takeover(memory_url):
    storage = open_storage(memory_url)
    storage.prepare()
    late = layout.offer_dir("a", "0f" * 16)
    with storage.create(f"{late}/sparse/00000-of-00001.json") as sink:
        sink.write(b"{}")
    Fence(storage).hold()
    assert storage.list_dirs() == [".recckpt"]


def test_a_writer_knows_the_newest_place_that_its_list_has_damaged_ones_included(tmp_path):
    storage = open_storage(str(tmp_path))
    fence = fence_of(storage)
    fence.hold()
    for ckpt_id in "ab":
        save_tables(storage, [filled("item", [1])], ckpt_id=ckpt_id)
    assert fence.newest_at_takeover == (0, 0) < fence.listing.newest_place
    next((tmp_path / "b").glob("sparse/*.arrow")).unlink()
    later = Fence(storage)
    later.hold()
    assert list(later.listing.damaged) == ["b"]
    assert later.newest_at_takeover == later.listing.newest_place > later.listing.committed[-1].manifest.place


def test_a_closing_list_names_what_it_is_given_and_nothing_else_of_before_counts(storage):
    fence = fence_of(storage)
    for ckpt_id in "ab":
        save_tables(storage, [filled("item", [1])], ckpt_id=ckpt_id)
    fence.hold()
    clean = next(c.manifest.save_id for c in fence.listing.committed if c.ckpt_id == "b")
    epoch = fence.epoch
    fence.close_list(frozenset([clean]))
    assert (fence.epoch, claimed_epochs(storage)) == (epoch + 1, [epoch + 1])
    assert last_takeover(storage).save_ids == {clean}
    listing = list_checkpoints(storage)
    assert ([c.ckpt_id for c in listing.committed], list(listing.fenced)) == (["b"], ["a"])
    assert [c.ckpt_id for c in fence.listing.committed] == ["b"]
    fence.check(is_thorough=True)


def test_who_could_not_publish_a_closing_list_tries_again_unless_its_number_is_anothers(storage, monkeypatch):
    fence, later = fence_of(storage), Fence(storage)
    fence.hold()
    epoch, put = fence.epoch, type(storage).put_if_absent

    def failing(self, name, data):
        if name == layout.takeover(epoch + 1):
            raise OSError(28, "No space left on device", name)
        put(self, name, data)

    monkeypatch.setattr(type(storage), "put_if_absent", failing)
    with pytest.raises(OSError, match="No space"):
        fence.close_list(frozenset())
    fence.check(is_thorough=True)
    fence.close_list(frozenset())
    assert (fence.epoch, last_takeover(storage).epoch) == (epoch + 2, epoch + 2)
    later.hold()
    with pytest.raises(WriterFencedError):
        fence.close_list(frozenset())
    assert last_takeover(storage).epoch == later.epoch == epoch + 3
