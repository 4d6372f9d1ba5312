"""Bad deltas: whatever reads them raises the named error with the link, found and expected, and nothing changes."""

import json
import shutil
from pathlib import Path

import pytest
from support.builders import Run, state_of, tree
from support.forge import Forge
from support.sweeps import mostly_slow

from recckpt import CheckpointReader, Deltas
from recckpt.errors import CorruptCheckpointError
from recckpt.inspect.verify import verify

ALWAYS = Deltas(max_dirty=1.0, max_chain_bytes=1000.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An output dir with the full ckpt_3 and the deltas ckpt_6 and ckpt_9; never written to."""
    root = tmp_path_factory.mktemp("saved")
    run = Run(root, interval=3, max_keep=None, deltas=ALWAYS).train(9)
    run.saver.close()
    return root


@pytest.fixture
def output_dir(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "runs"))


@pytest.fixture
def newest(output_dir):
    return Forge(output_dir / "ckpt_9")


def deletes_of(forge):
    [name] = [name for name in forge.parts if ".deletes." in name]
    return name


def refused(output_dir, step=9):
    """Check that restore and readers refuse the checkpoint and verify names it; return the error of restore."""
    live = Run(output_dir, interval=1000, seed=5).train(3)
    files, state = tree(output_dir), state_of(live)
    with pytest.raises(CorruptCheckpointError) as caught:
        live.manager.restore(step)
    assert state_of(live) == state
    assert caught.value.found
    assert caught.value.expected
    with pytest.raises(CorruptCheckpointError):
        read_all(output_dir / f"ckpt_{step}")
    assert f"ckpt_{step}" in {problem.directory for problem in verify(str(output_dir))}
    assert tree(output_dir) == files
    return caught.value


def read_all(path):
    with CheckpointReader(path) as reader:
        for name in reader.tables():
            list(reader.table(name))


# What the newest says of itself


def held(**changes):
    """Change what the manifest says that the delta holds of its tables."""

    def edit(forge):
        forge.edit_manifest(lambda values: [table["delta"].update(changes) for table in values["tables"]])

    return edit


def in_catalog(edit):
    return lambda forge: forge.edit_catalog(lambda values: edit(values["parts"]))


def with_more_rows(values):
    for table in values["tables"]:
        table["rows"] += 1


@mostly_slow()
@pytest.mark.parametrize(
    ("harm", "file", "found"),
    [
        pytest.param(held(upserts=1), "manifest.json", "1 upserts", id="upserts"),
        pytest.param(held(deletes=99), "manifest.json", "99 deletes", id="deletes"),
        pytest.param(held(upserts=-1), "manifest.json", "-1", id="negative upserts"),
        pytest.param(held(replaced=1), "manifest.json", "", id="replaced is no flag"),
        pytest.param(lambda f: f.edit_manifest(with_more_rows), "", "rows", id="rows that the chain does not give"),
        pytest.param(
            lambda f: f.edit_manifest(lambda v: [table.pop("delta") for table in v["tables"]]),
            "manifest.json",
            "",
            id="a table without what the delta holds",
        ),
        pytest.param(lambda f: f.edit_manifest(lambda v: v.update(kind="full")), "manifest.json", "", id="kind"),
        pytest.param(lambda f: f.edit_manifest(lambda v: v.update(parent=None)), "manifest.json", "", id="no parent"),
        pytest.param(lambda f: f.edit_manifest(lambda v: v.update(chain=[])), "manifest.json", "", id="no chain"),
        pytest.param(
            lambda f: f.edit_manifest(lambda v: v["parent"].update(manifest="0" * 16)), "", "", id="another parent"
        ),
        pytest.param(in_catalog(lambda parts: parts[-1].update(holds="rows")), ".json", "", id="deletes said rows"),
        pytest.param(in_catalog(lambda parts: parts[-1].pop("holds")), ".json", "", id="deletes not said so"),
        pytest.param(in_catalog(lambda parts: parts[-1].update(holds="ids")), ".json", "'ids'", id="holds"),
        pytest.param(in_catalog(lambda parts: parts[0].update(holds="deletes")), ".json", "", id="rows said deletes"),
        pytest.param(in_catalog(lambda parts: parts.pop()), "manifest.json", "deletes", id="deletes left out"),
    ],
)
def test_a_delta_that_contradicts_itself_is_refused(output_dir, newest, harm, file, found):
    harm(newest)
    error = refused(output_dir)
    assert error.path.startswith("ckpt_9/")
    assert error.path.endswith(file)
    assert found in error.found


def test_a_part_of_deletes_with_slots_is_refused(output_dir, newest):
    name = deletes_of(newest)
    newest.edit_part(lambda batch: batch.append_column("embedding", batch.column("id")), name, rows=False)
    error = refused(output_dir)
    assert (error.path, error.where) == (f"ckpt_9/{name}", "its columns")


@pytest.mark.parametrize("harm", ["missing", "cut", "zeros"])
def test_deletes_that_are_not_whole_are_refused(output_dir, newest, harm):
    path = newest.path(deletes_of(newest))
    data = path.read_bytes()
    path.unlink()
    if harm != "missing":
        path.write_bytes(data[:-1] if harm == "cut" else bytes(len(data)))
    assert refused(output_dir).path == f"ckpt_9/{deletes_of(newest)}"


# What it stands on


def edited(forge):
    forge.edit_manifest(lambda values: values.update(step=7))


@mostly_slow("link")
@pytest.mark.parametrize("link", ["ckpt_3", "ckpt_6"])
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(lambda forge: shutil.rmtree(forge.directory), id="missing"),
        pytest.param(lambda forge: forge.path("manifest.json").unlink(), id="without a manifest"),
        pytest.param(lambda forge: forge.path("manifest.json").write_bytes(b"{"), id="with a damaged manifest"),
        pytest.param(edited, id="of another checksum"),
        pytest.param(lambda forge: forge.path(forge.parts[0]).unlink(), id="without a part"),
        pytest.param(lambda forge: forge.path(forge.parts[0]).write_bytes(b"x"), id="with a part that is cut"),
    ],
)
def test_a_delta_whose_link_is_damaged_is_refused_by_the_name_of_the_link(output_dir, link, harm):
    harm(Forge(output_dir / link))
    error = refused(output_dir)
    assert link in f"{error.path} {error.found} {error.expected}"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda tables: tables[0]["slots"].reverse(), "slots", id="other slots"),
        pytest.param(lambda tables: tables[0]["slots"][0].update(dtype="float16"), "float16", id="another dtype"),
        pytest.param(lambda tables: tables.pop(0), "no table", id="without the table"),
    ],
)
def test_a_link_whose_tables_do_not_fit_is_refused_though_its_checksum_is_the_one_named(
    output_dir, newest, change, found
):
    link = Forge(output_dir / "ckpt_6")
    link.edit_manifest(lambda values: change(values["tables"]))
    seal = json.loads(link.path("manifest.json").read_text())["manifest_xxh3"]
    newest.edit_manifest(lambda values: values["parent"].update(manifest=seal))
    assert found in str(refused(output_dir))


@pytest.mark.parametrize("seq", [1, 2])
def test_a_delta_that_is_not_newer_than_its_parent_or_names_it_wrongly_is_refused(output_dir, newest, seq):
    right = newest.manifest["seq"]
    newest.edit_manifest(lambda values: values.update(seq=seq))
    error = refused(output_dir)
    assert (error.path, error.where) == ("ckpt_9/manifest.json", "parent 'ckpt_6'")
    assert "ckpt_6/ committed as (1, 2)" in error.found, "so that there are no cycles"
    newest.edit_manifest(lambda values: values.update(seq=right))
    newest.edit_manifest(lambda values: [link.update(ckpt_id="x") for link in (values["parent"], values["chain"][0])])
    assert refused(output_dir).found == "ckpt_6/ with the id 'ckpt_6'"


def test_a_delta_of_another_run_or_without_its_links_is_refused(output_dir, tmp_path):
    assert verify(str(output_dir)) == []
    alone = tmp_path / "alone"
    shutil.copytree(output_dir / "ckpt_9", alone / "ckpt_9")
    with pytest.raises(CorruptCheckpointError, match=r"ckpt_6/, ckpt_3/"):
        CheckpointReader(alone / "ckpt_9")
    assert [problem.directory for problem in verify(str(alone))] == ["ckpt_9"]
    assert [problem.directory for problem in verify(str(alone / "ckpt_9"))] == ["ckpt_9"]
    other = tmp_path / "other"
    Run(other, interval=3, max_keep=None, deltas=ALWAYS, seed=3).train(9).saver.close()
    shutil.rmtree(output_dir / "ckpt_9")
    shutil.copytree(other / "ckpt_9", output_dir / "ckpt_9")
    assert "ckpt_6" in str(refused(output_dir))
