"""Files that a writer removes while they are read: they are open already, or what is there now is taken."""

import gc
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from support.forge import filled, save_tables
from support.rotating_run import N_ROWS, Run
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.cli import main
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.listing import locate
from recckpt.output_dir.open_files import OpenFiles, first_whole
from recckpt.output_dir.rotation import remove
from recckpt.storage import open_storage
from recckpt.storage.objects import ObjectStorage

FILE = "ckpt_1/data"
DAMAGED = ("model.pt", "io_state_0.pt", "dense/00000-of-00001.json", "sparse/00000-of-00001.json")
REMOVED = CheckpointRemovedError("runs/ckpt_1")


@pytest.fixture
def storage(url):
    storage = open_storage(url)
    storage.prepare()
    storage.make_dir("ckpt_1")
    storage.put_if_absent("ckpt_1/manifest.json", b"{}")
    storage.put_if_absent(FILE, b"0123456789")
    return storage


def held(storage):
    return OpenFiles(storage, "ckpt_1", {"data": 10})


READS = {
    "open": lambda files: files.open(FILE).read(),
    "read": lambda files: files.read(FILE, 100),
    "size": lambda files: b"0123456789"[: files.size(FILE)],
    "map": lambda files: bytes(files.map(FILE) or b"0123456789"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_held_files_read_as_those_of_the_storage(storage, read):
    assert read(held(storage)) == read(storage) == b"0123456789"
    assert held(storage).read(FILE, 3) == b"012"


def test_a_mapped_file_is_a_file(tmp_path):
    storage = open_storage(str(tmp_path))
    storage.make_dir("ckpt_1")
    storage.put_if_absent(FILE, b"0123456789")
    with held(storage).open(FILE) as file:
        assert (file.read(2), file.tell(), file.read(0), file.read(None)) == (b"01", 2, b"", b"23456789")
        assert (file.seek(-4, 2), file.read(2), file.seek(1, 1), file.read(99), file.read(5)) == (
            6,
            b"67",
            9,
            b"9",
            b"",
        )
        assert (file.seek(50), file.read(1)) == (50, b"")
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
        assert pa.PythonFile(file, "r").size() == 10


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_mapped_files_stay_whole_when_they_are_removed(tmp_path, read):
    storage = open_storage(str(tmp_path))
    storage.make_dir("ckpt_1")
    storage.put_if_absent(FILE, b"0123456789")
    files = held(storage)
    shutil.rmtree(tmp_path / "ckpt_1")
    assert read(files) == b"0123456789"


@pytest.mark.parametrize("read", ["open", "read", "size"])
def test_a_file_that_went_after_its_manifest_was_removed_by_its_writer(storage, read, monkeypatch):
    monkeypatch.setattr("recckpt.output_dir.open_files._MOST_MAPS", 0)  # as where there are no maps
    files = held(storage)
    storage.remove("ckpt_1/manifest.json")
    storage.remove(FILE)
    with pytest.raises(CheckpointRemovedError, match=r"ckpt_1: its writer removed.*manager\.pin\(step\).*max_keep"):
        READS[read](files)
    with pytest.raises(CheckpointRemovedError):
        OpenFiles(storage, "ckpt_1", {"data": 10}).read(FILE, 10)


@pytest.mark.parametrize("read", ["open", "read", "size"])
def test_a_file_that_is_gone_while_the_manifest_is_there_is_damage(storage, read):
    storage.remove(FILE)
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/data: found no such file, expected 10 bytes"):
        READS[read](held(storage))


def test_a_file_may_go_in_the_middle_of_a_read(storage, monkeypatch):
    monkeypatch.setattr("recckpt.output_dir.open_files._MOST_MAPS", 0)
    with held(storage).open(FILE) as file:
        assert file.read(2) == b"01"
        file._file = Vanished()
        storage.remove("ckpt_1/manifest.json")
        with pytest.raises(CheckpointRemovedError):
            file.read(2)


class Vanished:
    """A file whose object is deleted between two ranged reads."""

    def read(self, size):
        raise FileNotFoundError

    def close(self):
        pass


def test_holding_a_thousand_files_takes_no_descriptors(tmp_path):
    storage = open_storage(str(tmp_path))
    (tmp_path / "ckpt_1").mkdir()
    for number in range(1000):
        (tmp_path / "ckpt_1" / str(number)).write_bytes(b"%d" % number)
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = OpenFiles(storage, "ckpt_1", {str(number): 4 for number in range(1000)})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    shutil.rmtree(tmp_path / "ckpt_1")
    assert [files.read(f"ckpt_1/{number}", 9) for number in range(1000)] == [b"%d" % n for n in range(1000)]


def test_files_of_a_checkpoint_that_rotation_is_about_to_remove_are_all_held(tmp_path):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("t", range(100))], batch_bytes=100)
    checkpoint = locate(storage, "ckpt_1")
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    files = OpenFiles(storage, checkpoint.directory, sizes)
    remove(storage, checkpoint, 1)
    assert not (tmp_path / "ckpt_1").exists()
    assert {name: len(files.read(f"ckpt_1/{name}", 1 << 20)) for name in sizes} == sizes


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


DAMAGE, NONE = CorruptCheckpointError("f", "", found=1, expected=2), CheckpointNotFoundError("none")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        *[([REMOVED] * n_removed + ["ckpt_2"], None) for n_removed in range(4)],
        ([REMOVED] * 4, CheckpointRemovedError),
        ([NONE], CheckpointNotFoundError),  # what was never there
        ([REMOVED] + [NONE] * 3, CheckpointRemovedError),  # for good
        ([REMOVED, NONE, "ckpt_3"], None),
        ([REMOVED, DAMAGE], CorruptCheckpointError),
    ],
)
def test_what_was_removed_is_looked_for_again_up_to_three_times_and_other_errors_pass(script, error):
    looks = Looks(*script, "never")
    if error is None:
        assert first_whole(looks.find, looks.use) == script[-1]
    else:
        with pytest.raises(error, match=r"pin\(step\)" if error is CheckpointRemovedError else "") as caught:
            first_whole(looks.find, looks.use)
        assert type(caught.value) is error
    assert looks.script == ["never"]


def test_what_is_damaged_is_replaced_as_long_as_there_is_something_to_take_its_place():
    others, seen = [DAMAGE] * 9 + ["ckpt_1"], []

    def instead(located, error):
        seen.append((located, error))
        return others.pop(0)

    looks = Looks(DAMAGE, "never")
    assert first_whole(looks.find, looks.use, instead=instead) == "ckpt_1"
    assert seen == [(DAMAGE, DAMAGE)] * 10
    assert looks.script == ["never"]


def test_damage_that_nothing_takes_the_place_of_or_is_met_at_once_is_raised_and_what_does_may_be_removed():
    def locate():
        raise DAMAGE

    looks = Looks(DAMAGE, "never")
    for find, instead in ((looks.find, None), (locate, "never")):
        with pytest.raises(CorruptCheckpointError):
            first_whole(find, looks.use, instead=lambda located, error, instead=instead: instead)
    assert looks.script == ["never"]
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
    """Lets a run save, and rotate, in the middle of each of the next reads: when its second part is read."""

    def __init__(self, monkeypatch, run):
        self.run, self.times, self._read, self._seen = run, 0, ObjectStorage.read, set()
        monkeypatch.setattr(ObjectStorage, "read", lambda storage, name, *span: self.read(storage, name, *span))

    def read(self, storage, name, *span):
        is_part = name.endswith(".arrow") and storage.url == self.run.saver.output_dir
        self._seen |= {name} if is_part else set()
        of_one = [other for other in self._seen if other.split("/")[0] == name.split("/")[0]]
        if is_part and len(of_one) == 2 and self.times:
            self._seen.clear()
            self.times -= 1
            self.run.save()
        return self._read(storage, name, *span)


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

    def read_after_saving(storage, name, *span):
        save_before(name)
        return read(storage, name, *span)

    def command(*args, saves):
        left.extend([None] * saves)
        code = main([*map(str, args), "--json"])
        out, err = capsys.readouterr()
        assert not left
        return json.loads(out) if code == 0 else err

    monkeypatch.setattr(ObjectStorage, "open", open_after_saving)
    monkeypatch.setattr(ObjectStorage, "read", read_after_saving)
    return command


@mostly_slow()
@pytest.mark.parametrize("args", [["head", "t"], ["get", "u", "50"], ["head", "u", "-n", "1000"]])
def test_a_command_reads_what_is_there_by_then(commands, memory_url, args):
    for step, saves in ((1, 0), (4, 3)):
        rows = commands(args[0], memory_url, *args[1:], saves=saves)["rows"]
        assert {value for row in rows for value in row["embedding"]} == {step}
    assert "its writer removed this checkpoint" in commands(args[0], memory_url, *args[1:], saves=4)


def test_show_describes_what_is_there_by_then_and_a_plan_is_made_of_it(commands, memory_url, tmp_path):
    shown = commands("show", memory_url, saves=2)
    assert (shown["step"], len(shown["tensors"])) == (3, 2)
    assert "its writer removed this checkpoint" in commands("show", memory_url, saves=4)
    names, bank = tmp_path / "names", tmp_path / "bank.json"
    names.write_text("t@embedding\ntop.weight\n")
    bank.write_text(json.dumps([{"path": memory_url, "strict": False}]))
    planned = commands("plan", "--model-names", names, bank, saves=3)
    assert planned["sources"] == [f"{memory_url}/ckpt_10"]
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
