"""Which files of a near save a rank reads, by what it has and what it is to load."""

from dataclasses import replace

import pytest
from near.test_near_saves import begun

from recckpt.format import layout
from recckpt.load.needed_files import needed_files
from recckpt.load.open_source import Needs
from recckpt.output_dir.listing import list_checkpoints

NOTHING = Needs(0, 1, {}, positions=False, gathers=False, tensors={})


@pytest.fixture
def manifest(tmp_path):
    """Return that of a checkpoint of a table."""
    run = begun(tmp_path)
    return list_checkpoints(run.saver.storage).current[-1].manifest


def with_rows(names):
    return {name for name in names if layout.has_rows(name)}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_rank_without_tables_reads_no_rows_whatever_it_is_to_load(manifest, is_whole):
    names = needed_files(manifest, NOTHING, is_whole=is_whole)
    assert names
    assert not with_rows(names)
    assert with_rows(file.name for file in manifest.files)


@pytest.mark.parametrize("needs", [replace(NOTHING, slices={"t": None}), replace(NOTHING, tensors={"top.weight": 3})])
def test_what_may_have_another_name_there_may_be_in_any_file(manifest, needs):
    assert needed_files(manifest, needs, is_whole=False) == {file.name for file in manifest.files}
