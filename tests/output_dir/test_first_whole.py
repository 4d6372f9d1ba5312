import gc
import json
from pathlib import Path

import pytest
import torch
from support.rotating_run import N_ROWS, Run
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.cli import main
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.first_whole import first_whole
from recckpt.storage.objects import ObjectStorage

DAMAGED = ("model.pt", "io_state_0.pt", "dense/00000-of-00001.json", "sparse/00000-of-00001.json")
REMOVED = CheckpointRemovedError("runs/ckpt_1")


class Looks:
    """Finds and uses what a script says: a value, or an error to raise."""

    def __init__(self, *script):
        self.script, self.seen = list(script), []

    def find(self):
        step = self.script.pop(0)
        self.seen.append(step)
        if isinstance(step, CheckpointNotFoundError):
            raise step
        return step

    def use(self, found):
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize("n_removed", range(4))
def test_what_was_removed_is_looked_for_again_up_to_three_times(n_removed):
    looks = Looks(*[REMOVED] * n_removed, "ckpt_2")
    assert first_whole(looks.find, looks.use) == "ckpt_2"
    assert len(looks.seen) == n_removed + 1


def test_a_fourth_time_it_is_an_error_that_says_what_to_do():
    looks = Looks(*[REMOVED] * 4, "never")
    with pytest.raises(CheckpointRemovedError, match=r"pin\(step\)"):
        first_whole(looks.find, looks.use)
    assert looks.script == ["never"]


def test_what_was_never_there_is_not_looked_for_again():
    looks = Looks(CheckpointNotFoundError("none"), "never")
    with pytest.raises(CheckpointNotFoundError):
        first_whole(looks.find, looks.use)
    assert looks.script == ["never"]


def test_what_is_gone_for_good_is_said_to_have_been_removed():
    looks = Looks(REMOVED, *[CheckpointNotFoundError("none")] * 3)
    with pytest.raises(CheckpointRemovedError):
        first_whole(looks.find, looks.use)


def test_a_moment_without_a_checkpoint_is_passed():
    looks = Looks(REMOVED, CheckpointNotFoundError("none"), "ckpt_3")
    assert first_whole(looks.find, looks.use) == "ckpt_3"


def test_other_errors_pass():
    looks = Looks(REMOVED, CorruptCheckpointError("f", "", found=1, expected=2), "never")
    with pytest.raises(CorruptCheckpointError):
        first_whole(looks.find, looks.use)
    assert looks.script == ["never"]


DAMAGE = CorruptCheckpointError("f", "", found=1, expected=2)


def test_what_is_damaged_is_replaced_as_long_as_there_is_something_to_take_its_place():
    others, seen = [DAMAGE] * 9 + ["ckpt_1"], []

    def instead(located, error):
        seen.append((located, error))
        return others.pop(0)

    looks = Looks(DAMAGE, "never")
    assert first_whole(looks.find, looks.use, instead=instead) == "ckpt_1"
    assert seen == [(DAMAGE, DAMAGE)] * 10
    assert looks.script == ["never"]


def test_damage_that_nothing_takes_the_place_of_is_raised():
    looks = Looks(DAMAGE, "never")
    with pytest.raises(CorruptCheckpointError):
        first_whole(looks.find, looks.use, instead=lambda located, error: None)
    assert looks.script == ["never"]


def test_damage_that_is_met_before_anything_is_located_is_raised():
    def locate():
        raise DAMAGE

    with pytest.raises(CorruptCheckpointError):
        first_whole(locate, print, instead=lambda located, error: "never")


def test_what_takes_the_place_of_damage_may_be_removed_as_well():
    looks = Looks(*[DAMAGE] * 4, "never")
    with pytest.raises(CheckpointRemovedError):
        first_whole(looks.find, looks.use, instead=lambda located, error: REMOVED)
    assert looks.script == ["never"]


def test_what_was_located_before_is_the_first_of_four_looks(caplog):
    caplog.set_level("INFO", "recckpt")
    looks = Looks(*[REMOVED] * 3, "never")
    with pytest.raises(CheckpointRemovedError):
        first_whole(looks.find, looks.use, first=REMOVED)
    assert looks.script == ["never"]
    assert [record.message.endswith("; looking again") for record in caplog.records] == [True] * 3


class Rotates:
    """Lets a run save, and rotate, in the middle of each of the next reads: when its second part is opened."""

    def __init__(self, monkeypatch, run):
        self.run, self.times, self._open, self._opened = run, 0, ObjectStorage.open, set()
        monkeypatch.setattr(ObjectStorage, "open", lambda storage, name: self.open(storage, name))

    def open(self, storage, name):
        is_part = name.endswith(".arrow") and storage.url == self.run.saver.output_dir
        self._opened |= {name} if is_part else set()
        of_one = [other for other in self._opened if other.split("/")[0] == name.split("/")[0]]
        if is_part and len(of_one) == 2 and self.times:
            self._opened.clear()
            self.times -= 1
            self.run.save()
        return self._open(storage, name)


@pytest.fixture
def rotates(memory_url, monkeypatch):
    run = Run(memory_url)
    run.save()
    return Rotates(monkeypatch, run)


LOADS = {
    "load": lambda run, url: run.saver.load(ckpt_path=url),
    "bank": lambda run, url: run.saver.load_by_config({"path": url}),
    "model bank": lambda run, url: run.manager.load_model_bank([{"path": url}]),
}


def reader_of(kind, url):
    """Return a run that is to be loaded, and what loads it."""
    if kind == "restore":
        run = Run(url)
        return run, lambda: run.manager.restore()
    run = Run("memory://elsewhere/runs")
    return run, lambda: LOADS[kind](run, url)


@mostly_slow("kind")
@pytest.mark.parametrize("kind", ["restore", *LOADS])
@pytest.mark.parametrize("n_rows", [0, 5])
@pytest.mark.parametrize("times", [1, 3])
def test_a_load_of_what_goes_in_the_middle_ends_with_all_of_what_is_there_then(
    rotates, memory_url, kind, n_rows, times
):
    reader, load = reader_of(kind, memory_url)
    for table in reader.tables.values():
        table(torch.arange(n_rows))
    rotates.times = times
    load()
    assert rotates.times == 0
    assert reader.checked() == 1 + times


@mostly_slow()
@pytest.mark.parametrize("kind", ["restore", *LOADS])
def test_a_load_that_never_gets_to_its_end_says_so_and_the_next_one_mends_it(rotates, memory_url, kind):
    reader, load = reader_of(kind, memory_url)
    load()
    rotates.times = 100
    with pytest.raises(CheckpointRemovedError) as caught:
        load()
    assert caught.value.path == f"{memory_url}/ckpt_4"
    assert [len(table) for table in reader.tables.values()] == [
        0 if name in caught.value.emptied else N_ROWS for name in reader.tables
    ]
    rotates.times = 0
    load()
    assert reader.checked() == rotates.run.manager.global_step


def test_a_checkpoint_that_was_asked_for_by_name_is_not_replaced_by_another(rotates, memory_url):
    reader = Run("memory://elsewhere/runs")
    for asked in (
        {"ckpt_path": f"{memory_url}/ckpt_1"},
        {"ckpt_path": f"{memory_url}/ckpt_2", "direct_path": True},
        {"ckpt_path": memory_url, "ckpt_id": "ckpt_3"},
    ):
        rotates.times = 1
        with pytest.raises(CheckpointRemovedError, match=r"ckpt_\d: its writer removed"):
            reader.saver.load(**asked)


@pytest.mark.parametrize("read", [locate_path, CheckpointReader])
def test_a_checkpoint_that_goes_while_its_files_are_counted_is_not_damaged(rotates, memory_url, monkeypatch, read):
    listed = ObjectStorage.listed

    def save_and_look(storage, directory):
        if directory == "ckpt_1" and rotates.times:
            rotates.times -= 1
            rotates.run.save()
        return listed(storage, directory)

    monkeypatch.setattr(ObjectStorage, "listed", save_and_look)
    rotates.times = 1
    with pytest.raises(CheckpointNotFoundError):
        read(f"{memory_url}/ckpt_1")


def test_a_reader_of_what_is_gone_says_so(rotates, memory_url):
    with CheckpointReader(memory_url) as reader:
        rotates.run.save()
        with pytest.raises(CheckpointRemovedError, match="ckpt_1: its writer removed"):
            list(reader.table("t"))
        with pytest.raises(CheckpointRemovedError):
            reader.read_tensor("top.weight")


@pytest.fixture
def commands(memory_url, monkeypatch, capsys):
    """Runs commands on a run that saves, and rotates, before each of the next files is opened."""
    run, opened, read, left = Run(memory_url), ObjectStorage.open, ObjectStorage.read, []
    run.save()

    def save_before(name):
        if (name.endswith(".arrow") or "/dense/" in name) and left:
            left.pop()
            run.save()

    def open_after_saving(storage, name):
        save_before(name)
        return opened(storage, name)

    def read_after_saving(storage, name, max_bytes):
        save_before(name)
        return read(storage, name, max_bytes)

    def command(*args, saves):
        left.extend([None] * saves)
        code = main([*map(str, args), "--json"])
        out, err = capsys.readouterr()
        assert not left
        return json.loads(out) if code == 0 else err

    monkeypatch.setattr(ObjectStorage, "open", open_after_saving)
    monkeypatch.setattr(ObjectStorage, "read", read_after_saving)
    return command


@pytest.mark.parametrize("args", [["head", "t"], ["get", "u", "50"], ["head", "u", "-n", "1000"]])
def test_a_command_reads_what_is_there_by_then(commands, memory_url, args):
    for step, saves in ((1, 0), (4, 3)):
        rows = commands(args[0], memory_url, *args[1:], saves=saves)["rows"]
        assert {value for row in rows for value in row["embedding"]} == {step}
    assert "its writer removed this checkpoint" in commands(args[0], memory_url, *args[1:], saves=4)


def test_show_describes_what_is_there_by_then(commands, memory_url):
    shown = commands("show", memory_url, saves=2)
    assert (shown["step"], len(shown["tensors"])) == (3, 2)
    assert "its writer removed this checkpoint" in commands("show", memory_url, saves=4)


def test_a_plan_is_made_of_what_is_there_by_then(commands, memory_url, tmp_path):
    names, bank = tmp_path / "names", tmp_path / "bank.json"
    names.write_text("t@embedding\ntop.weight\n")
    bank.write_text(json.dumps([{"path": memory_url, "strict": False}]))
    planned = commands("plan", "--model-names", names, bank, saves=3)
    assert planned["sources"] == [f"{memory_url}/ckpt_4"]
    assert "its writer removed this checkpoint" in commands("plan", "--model-names", names, bank, saves=4)


def test_a_bank_that_is_followed_is_offered_from_what_was_read(rotates, memory_url):
    """What a checkpoint offers is asked once more after it was loaded, when it may be gone."""
    reader = Run("memory://elsewhere/runs")
    rotates.times = 1
    reader.manager.load_model_bank([{"path": memory_url, "is_dynamic": True}])
    assert reader.checked() == 2
    rotates.run.save()
    rotates.times = 1
    [report] = reader.manager.reload_dynamic()
    assert "ckpt_4" in report.sources[0]
    assert reader.checked() == 4


def test_files_that_are_mapped_are_let_go_after_a_load(tmp_path):
    run = Run(str(tmp_path))
    run.save()
    run.manager.restore()
    followed = Run("memory://elsewhere/runs")
    followed.manager.load_model_bank([{"path": str(tmp_path), "is_dynamic": True}])
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@mostly_slow()
@pytest.mark.parametrize("damaged", DAMAGED)
def test_files_that_are_mapped_are_let_go_where_a_restore_passes_over_a_damaged_checkpoint(tmp_path, damaged):
    run = Run(str(tmp_path))
    run.save()
    run.manager.pin(1)
    run.save()
    path = tmp_path / "ckpt_2" / damaged
    path.write_bytes(bytes(path.stat().st_size))
    gc.collect()
    gc.disable()  # what is let go is let go without it
    try:
        assert run.manager.restore() == 1
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("damaged", DAMAGED)
def test_files_that_are_mapped_are_let_go_by_a_load_whose_error_is_kept(tmp_path, damaged):
    run = Run(str(tmp_path))
    run.save()
    path = tmp_path / "ckpt_1" / damaged
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CorruptCheckpointError) as kept:
        run.manager.restore()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert kept.tb
