"""Every edition of the format that was ever written is read to the same bits, with torch and without."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from golden.families import FAMILIES
from support import spec_reader

import recckpt
from recckpt.inspect.verify import verify

HERE = Path(__file__).parent
PACKAGE = Path(recckpt.__file__).parent
WRITTEN = sorted(path.parent for path in HERE.glob("*/*/expected.json"))
EDITIONS = sorted({family.parent for family in WRITTEN})
OF_RANKS = {"sharded_dense", "live_columns", "live_collisions_of_ids"}


def by_name(family: Path) -> str:
    return f"{family.parent.name}/{family.name}"


def read_without_torch(edition: Path, *packages: Path) -> dict[str, list[str]]:
    """Return what differs by family, as a recckpt reads it that is found in ``packages``."""
    path = os.pathsep.join(map(str, [*packages, PACKAGE.parent]))
    command = [sys.executable, HERE / "read.py", edition]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_each_edition_has_all_families_of_its_time():
    assert [edition.name for edition in EDITIONS] == ["1"]
    assert {family.name for family in WRITTEN if family.parent.name == "1"} == FAMILIES.keys() | OF_RANKS


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda path: path.name)
def test_an_edition_is_read_without_torch_to_the_bit(edition):
    found = read_without_torch(edition)
    assert found == {family.name: [] for family in WRITTEN if family.parent == edition}


@pytest.mark.parametrize("family", WRITTEN, ids=by_name)
def test_an_edition_is_whole_and_what_the_page_of_the_format_says(family):
    for run in {family / name.partition("/")[0] for name in expected(family)["checkpoints"]}:
        assert verify(str(run)) == []
    for name, content in expected(family)["checkpoints"].items():
        path = family / name
        is_named_so = not (path / "manifest.json").exists()  # and its directory has a name that was free
        ckpt_id = path.name if is_named_so else json.loads((path / "manifest.json").read_bytes())["ckpt_id"]
        for table, rows in content["tables"].items():
            found = spec_reader.read(path.parent, ckpt_id, table)
            assert as_page_reads(rows) == {
                id_: {name: row[name] for name in rows["slots"]} for id_, row in found.items()
            }


@pytest.mark.parametrize("family", [each for each in WRITTEN if each.name in FAMILIES], ids=by_name)
def test_an_edition_is_restored_to_the_bit(family, tmp_path):
    restore = FAMILIES[family.name].restore
    if restore is not None:
        shutil.copytree(family, tmp_path / "here")
        assert restore(tmp_path / "here") == expected(family)["restored"]


NAMES = '{"n_bytes": "bytes"}', '{"n_bytes": "size"}'
CHANGES = {  # file, a text in it, and what a careless change makes of that
    "a field of the manifest has another name": ("format/manifest.py", *NAMES),
    "the seal of a manifest has a seed": ("format/codec.py", "digest(data[:-size])", "digest(data[:-size], 1)"),
    "a field of catalogs has another name": ("format/catalog.py", *NAMES),
    "checksums of batches have a seed": ("sparse/files/part_reader.py", "intdigest(values)", "intdigest(values, 1)"),
    "ids lie in another order": ("format/buckets.py", "0x94D049BB133111EB", "0x94D049BB133111ED"),
}
OF_ROWS = list(CHANGES)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_format_is_found_in_each_family(change, tmp_path):
    file, text, other = CHANGES[change]
    shutil.copytree(PACKAGE, tmp_path / "recckpt", ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / "recckpt" / file).read_text("utf-8")
    assert text in source
    (tmp_path / "recckpt" / file).write_text(source.replace(text, other), "utf-8")
    found = read_without_torch(EDITIONS[-1], tmp_path)
    without = {"objects", "sharded_dense"} if change in OF_ROWS else set[str]()
    assert found.keys() - without == {family for family, lines in found.items() if lines}


def expected(family: Path) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = json.loads(
        (family / "expected.json").read_text("utf-8")
    )
    return found


def as_page_reads(rows):
    """Return the rows of a table as :func:`spec_reader.read` gives them."""
    ids, found = rows["ids"], {}
    for number, id_ in enumerate(ids):
        found[id_] = {}
        for name, slot in rows["slots"].items():
            data = bytes.fromhex(slot["hex"])
            width = len(data) // len(ids)
            found[id_][name] = data[number * width : (number + 1) * width]
    return found


def test_an_edition_that_is_there_is_not_written_again():
    done = subprocess.run([sys.executable, HERE / "write.py", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "an edition is written once" in done.stderr
