"""Positions in the data that go over to any number of ranks: each sample of an epoch is used once."""

import logging
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow
from torch import nn
from torch.utils.data import DataLoader

from recckpt import CheckpointManager, Saver
from recckpt.errors import StateMismatchError
from recckpt.positions.epochs import ElasticLoader
from recckpt.positions.files import ElasticFiles

ROWS = (5, 0, 7, 3, 4)  # of each row group


def read_by_workers(data, batches):
    return DataLoader(data, batch_sampler=batches, num_workers=2, persistent_workers=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of Parquet and one of Arrow, each with all row groups; their values are the numbers of the rows."""
    root, first = tmp_path_factory.mktemp("files"), 0
    paths = [root / "a.parquet", root / "b", root / "c.feather"]
    for path in paths:
        tables = []
        for rows in ROWS:
            columns = {
                "n": pa.array(range(first, first + rows), pa.int64()),
                "other": pa.array([0.5] * rows, pa.float64()),
            }
            tables.append(pa.table(columns))
            first += rows
        if path.name == "c.feather":
            with pa.ipc.new_file(path, tables[0].schema) as writer:
                for table in tables:
                    writer.write_batch(
                        pa.RecordBatch.from_arrays([c.combine_chunks() for c in table.columns], table.column_names)
                    )
        else:
            with parquet.ParquetWriter(path, tables[0].schema) as writer:
                for table in tables:
                    writer.write_table(table)
    return paths


def numbers(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch.column("n").to_pylist()


def makers(files):
    """Return what makes each kind of data of 57 samples, and the number of its samples."""

    def loader(**options):
        return ElasticLoader(range(57), 4, **options)

    def of_files(**options):
        return ElasticFiles(files, 4, columns=["n"], **options)

    return [loader, of_files]


@mostly_slow()
@pytest.mark.parametrize("kind", [0, 1], ids=["loader", "files"])
@given(st.booleans(), st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=4), st.integers(0, 3))
def test_each_sample_of_an_epoch_is_used_once_over_restarts_with_other_ranks(files, kind, shuffle, lives, seed):
    """Each life has so many ranks, which use so many batches each; the last one goes to the end."""
    make, states, used = makers(files)[kind], None, []
    for life in [*lives, [None] * 2]:
        ranks = [make(shuffle=shuffle, seed=seed, rank=rank, ranks=len(life)) for rank in range(len(life))]
        for rank, data in enumerate(ranks):
            if states is not None:
                data.load_io_state(data.merge_io_state(states, rank, len(life)))
        for data, n_batches in zip(ranks, life, strict=True):
            if data.epoch == 0:
                used += [number for batch in islice(iter(data), n_batches) for number in numbers(batch)]
        states = [data.dump_io_state() for data in ranks]
    assert sorted(used) == list(range(57))


@mostly_slow()
@pytest.mark.parametrize("kind", [0, 1], ids=["loader", "files"])
@pytest.mark.parametrize("n_used", [0, 1, 5, 14, 15, 16, 40])
def test_as_many_ranks_go_on_with_the_batches_that_would_have_come(files, kind, n_used):
    make = makers(files)[kind]

    def batches(data):
        while True:
            yield from map(numbers, data)

    straight, broken_off, resumed = make(), make(), make()
    wanted = list(islice(batches(straight), 60))
    given = list(islice(batches(broken_off), n_used))
    resumed.load_io_state(broken_off.dump_io_state())
    assert given + list(islice(batches(resumed), 60 - n_used)) == wanted
    assert len({tuple(batch) for batch in wanted}) == 60  # each epoch in another order


@pytest.mark.parametrize("kind", [0, 1], ids=["loader", "files"])
def test_a_rank_that_is_through_ends_its_epoch_when_it_resumes(files, kind):
    make = makers(files)[kind]
    data, resumed = make(), make()
    batches = iter(data)
    used = [number for batch in islice(batches, 15) for number in numbers(batch)]
    assert len(used) == 57
    resumed.load_io_state(data.dump_io_state())  # before the ``for`` has ended
    assert (list(resumed), resumed.epoch) == ([], 1)
    assert list(batches) == []
    assert data.epoch == 1


def test_an_iterator_after_one_that_was_broken_off_begins_the_next_epoch():
    data = ElasticLoader(range(10), 5)
    next(iter(data))
    assert data.epoch == 0
    assert sorted(number for batch in data for number in numbers(batch)) == list(range(10))
    assert data.epoch == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_drop_last_all_ranks_get_as_many_full_batches(ranks):
    loaders = [ElasticLoader(range(57), 4, drop_last=True, rank=rank, ranks=ranks) for rank in range(ranks)]
    lengths = {len(loader) for loader in loaders}
    batches = [numbers(batch) for loader in loaders for batch in loader]
    assert lengths == {57 // ranks // 4}
    assert {len(batch) for batch in batches} == {4}
    assert len({number for batch in batches for number in batch}) == 4 * len(batches)


def test_files_leave_out_a_last_batch_that_is_not_full(files):
    batches = list(ElasticFiles(files, 10, drop_last=True))
    assert [batch.num_rows for batch in batches] == [10] * 5
    assert batches[0].schema.names == ["n", "other"]


def test_the_length_is_that_of_the_next_for():
    data = ElasticLoader(range(10), 4)
    assert len(data) == 3
    batches = iter(data)
    next(batches)
    state = data.dump_io_state()
    assert len(data) == 3
    data.load_io_state(state)
    assert len(data) == 2


def read_statefully(data, batches):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return torchdata.StatefulDataLoader(data, batch_sampler=batches, num_workers=1)


@mostly_slow()
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("read", [read_by_workers, read_statefully])
def test_workers_that_read_ahead_leave_the_position_at_the_batches_that_were_given(read):
    data = ElasticLoader(range(40), 4, loader=read)
    plain = ElasticLoader(range(40), 4)
    wanted = [numbers(batch) for _ in range(2) for batch in plain]
    batches = iter(data)
    assert [numbers(batch) for batch in islice(batches, 3)] == wanted[:3]
    assert data.dump_io_state()["used"] == 12
    resumed = ElasticLoader(range(40), 4, loader=read)
    resumed.load_io_state(data.dump_io_state())
    assert [numbers(batch) for batch in batches] == wanted[3:10]
    assert [numbers(batch) for one in (resumed, data, resumed) for batch in one] == [*wanted[3:], *wanted[10:]]


def test_ranks_that_were_an_epoch_ahead_use_some_samples_once_more_and_the_log_says_how_many(caplog):
    ahead, behind = (ElasticLoader(range(20), 2, shuffle=False, rank=rank, ranks=2) for rank in range(2))
    used = [number for batch in ahead for number in numbers(batch)]
    next(iter(ahead))
    used += [number for batch in islice(iter(behind), 3) for number in numbers(batch)]
    alone = ElasticLoader(range(20), 2, shuffle=False)
    with caplog.at_level(logging.WARNING):
        alone.load_io_state(alone.merge_io_state([ahead.dump_io_state(), behind.dump_io_state()], 0, 1))
    assert "ranks [0] were ahead of epoch 0: 2 samples come again" in caplog.text
    assert sorted([*used, *(number for batch in alone for number in numbers(batch))]) == list(range(20))


def test_the_share_of_a_rank_without_a_state_comes_again():
    """Such as one on which the position was not registered."""
    loaders = [ElasticLoader(range(20), 2, shuffle=False, rank=rank, ranks=2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    alone = ElasticLoader(range(20), 20, shuffle=False)
    alone.load_io_state(alone.merge_io_state([loaders[1].dump_io_state()], 0, 1))
    assert numbers(next(iter(alone))) == [0, 2, *range(4, 20)]


def test_data_in_its_own_order_may_grow(files):
    data, more = ElasticLoader(range(10), 4, shuffle=False), ElasticLoader(range(14), 4, shuffle=False)
    next(iter(data))
    more.load_io_state(data.dump_io_state())
    assert [numbers(batch) for batch in more] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    one, all_files = ElasticFiles(files[:1], 4, shuffle=False), ElasticFiles(files, 4, shuffle=False)
    next(iter(one))
    all_files.load_io_state(one.dump_io_state())
    assert [number for batch in all_files for number in numbers(batch)] == list(range(4, 57))


OTHER_DATA = {
    "samples": (lambda files: ElasticLoader(range(9), 4), "found 10 samples, expected 9: use that"),
    "more samples, shuffled": (lambda files: ElasticLoader(range(11), 4), "found 10 samples, expected 11: use that"),
    "seed": (lambda files: ElasticLoader(range(10), 4, seed=1), r"another order: found \{'shuffle': True, 'seed': 0\}"),
    "order": (lambda files: ElasticLoader(range(10), 4, shuffle=False), r"expected \{'shuffle': False, 'seed': 0\}"),
}


@pytest.mark.parametrize("other", OTHER_DATA)
def test_a_position_in_other_data_is_refused(files, other):
    make, message = OTHER_DATA[other]
    data = ElasticLoader(range(10), 4)
    next(iter(data))
    with pytest.raises(ValueError, match=f"{message}.*omit the position with 'exclude'"):
        make(files).load_io_state(data.dump_io_state())


def test_a_position_in_other_files_is_refused_and_one_in_moved_files_is_not(files, tmp_path):
    data = ElasticFiles(files[:2], 4)
    next(iter(data))
    (tmp_path / files[0].parent.name).mkdir()
    moved = [tmp_path / files[0].parent.name / path.name for path in files[:2]]
    for path, at in zip(files, moved, strict=False):
        at.write_bytes(path.read_bytes())
    ElasticFiles(moved, 4).load_io_state(data.dump_io_state())
    with pytest.raises(ValueError, match="the first 10 row groups differ: use the same data, or omit the position"):
        ElasticFiles([files[0], files[2]], 4).load_io_state(data.dump_io_state())


def test_an_iterator_of_before_a_load_says_that_restore_comes_first():
    data = ElasticLoader(range(10), 4)
    batches = iter(data)
    next(batches)
    data.load_io_state(data.dump_io_state())
    with pytest.raises(RuntimeError, match=r"this iterator is over: .*call restore\(\) before iter\(\)"):
        next(batches)


def test_a_position_of_another_number_of_ranks_than_there_are_is_refused():
    data = ElasticLoader(range(10), 4)
    next(iter(data))
    state = data.merge_io_state([data.dump_io_state()], 0, 2)
    data.load_io_state(state)
    with pytest.raises(RuntimeError, match=r"loaded for rank 0 of 2, but this is rank 0 of 1: call init_process_group"):
        next(iter(data))


class Fewer:
    def __init__(self, data, batches):
        self.batches = batches

    def __iter__(self):
        return islice(iter(self.batches), 2)


WRONG = {
    "seed": ({"seed": -1}, "seed must be an int from 0"),
    "shuffle": ({"shuffle": 1}, "shuffle must be True or False"),
    "drop_last": ({"drop_last": None}, "drop_last must be True or False"),
    "batch size": ({"batch_size": 0}, "batch_size must be an int of at least 1, found 0"),
    "ranks": ({"rank": 2, "ranks": 2}, r"pass both rank and ranks, rank 0 to ranks - 1, found rank=2, ranks=2"),
    "no length": ({"dataset": iter([])}, "dataset must have len.., found a list_iterator: pass an iterable one"),
    "out of order": (
        {"loader": lambda data, batches: DataLoader(data, batch_sampler=batches, num_workers=1, in_order=False)},
        "it yields batches out of order",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_refused(wrong):
    options, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        ElasticLoader(**{"dataset": range(10), "batch_size": 4, **options})


def test_a_loader_that_gives_fewer_batches_than_it_was_asked_for_is_refused():
    with pytest.raises(RuntimeError, match="loader: it yielded 2 batches, expected 3, as its batch sampler has"):
        list(ElasticLoader(range(10), 4, loader=Fewer))


def test_files_that_are_none_are_refused(tmp_path, files):
    (tmp_path / "text").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"text' is neither a Parquet nor an Arrow file: it begins with b'a,b"):
        ElasticFiles([tmp_path / "text"], 4)
    with pytest.raises(ValueError, match="paths must be a list of files, found '"):
        ElasticFiles(str(files[0]), 4)
    with pytest.raises(FileNotFoundError):
        ElasticFiles([tmp_path / "gone"], 4)


def test_files_are_read_by_their_url(files):
    assert [batch.num_rows for batch in ElasticFiles([f"file://{files[0]}"], 19)] == [19]


@mostly_slow()
@pytest.mark.parametrize("read", [None, read_by_workers], ids=["no workers", "workers"])
def test_a_run_goes_on_as_if_it_had_not_stopped_with_the_random_numbers_that_it_draws(tmp_path, read):
    def run(root, *, steps):
        torch.manual_seed(5)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ElasticLoader(range(10), 3, loader=read)
        with CheckpointManager.attach(model, optimizer, loader=data, output_dir=root, save_interval=2) as manager:
            manager.restore()
            while manager.global_step < steps:
                for batch in data:
                    yield numbers(batch), torch.rand(1).item()
                    manager.step()
                    if manager.global_step == steps:
                        break

    plain = ElasticLoader(range(10), 3)
    straight = list(run(tmp_path / "straight", steps=12))
    assert [batch for batch, _ in straight] == [numbers(batch) for _ in range(3) for batch in plain]
    assert [*run(tmp_path / "resumed", steps=5), *run(tmp_path / "resumed", steps=12)] == straight


def test_a_saver_refuses_a_position_in_other_data_by_its_name(tmp_path):
    model = nn.Linear(1, 1)
    for n, action in ((10, Saver.save), (9, Saver.load)):
        with Saver(model, output_dir=tmp_path) as saver:
            saver.register_io_state("clicks", ElasticLoader(range(n), 3))
            if action is Saver.save:
                saver.save("c", step=1)
                continue
            with pytest.raises(
                StateMismatchError, match=r"'clicks'[\s\S]*ElasticLoader.load_io_state refused it: .*found 10 samples"
            ):
                saver.load()


def test_two_ranks_save_and_three_restore_and_use_the_rest_of_the_epoch_once(tmp_path):
    script = Path(__file__).with_name("epochs_ranks.py")
    run_script(script, tmp_path, 2)
    run_script(script, tmp_path, 3)
    used = [number for of_rank in (*results(tmp_path, 2), *results(tmp_path, 3)) for number in of_rank]
    assert sorted(used) == list(range(57))


def test_files_need_no_torch(files):
    code = "import sys; from recckpt.positions import ElasticFiles; data = ElasticFiles(sys.argv[1:], 4)"
    code += "; assert data.dump_io_state()['ranks'] == 1; next(iter(data)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *files], check=True)


def test_orders_stay_those_of_every_version():
    """A position within an epoch is one in its order, so that a release must not change it."""
    assert [numbers(batch) for batch in ElasticLoader(range(8), 8, seed=3)] == [[1, 4, 2, 0, 3, 5, 7, 6]]
    assert np.random.RandomState([3, 0]).permutation(8).tolist() == [1, 4, 2, 0, 3, 5, 7, 6]


def test_of_a_state_of_another_rank_all_of_the_own_share_comes_again():
    """As where only one of the ranks had registered the object."""
    first, other = (ElasticLoader(range(20), 2, shuffle=False, rank=rank, ranks=2) for rank in range(2))
    next(iter(first))
    other.load_io_state(first.dump_io_state())
    assert [number for batch in other for number in numbers(batch)] == list(range(1, 20, 2))


def test_a_state_of_before_the_first_batch_is_of_the_ranks_that_there_are_by_then(monkeypatch):
    data = ElasticLoader(range(20), 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = data.dump_io_state()
    assert (state["rank"], state["ranks"]) == (1, 2)


def test_with_drop_last_batches_stay_full_when_their_size_changes():
    data, other = (ElasticLoader(range(40), size, drop_last=True) for size in (4, 10))
    list(islice(iter(data), 3))
    other.load_io_state(data.dump_io_state())
    assert [len(batch) for batch in other] == [10, 10]


def test_ranks_that_were_several_epochs_ahead_are_named_with_what_comes_again(caplog):
    ahead, behind = (ElasticLoader(range(8), 2, shuffle=False, rank=rank, ranks=2) for rank in range(2))
    for _ in range(3):
        list(ahead)
    next(iter(ahead))
    with caplog.at_level(logging.WARNING):
        ahead.merge_io_state([ahead.dump_io_state(), behind.dump_io_state()], 0, 1)
    assert "ranks [0] were ahead of epoch 0: 2 samples, and 2 whole epochs of theirs come again" in caplog.text


@pytest.mark.parametrize("read", [dict, list])
def test_a_position_of_another_kind_of_object_is_refused(read):
    for call in ("load_io_state", "merge_io_state"):
        arguments = (read(),) if call == "load_io_state" else ([read()], 0, 1)
        with pytest.raises(ValueError, match="the position belongs to an object of another kind"):
            getattr(ElasticLoader(range(4), 2), call)(*arguments)


NOTHING_FOR_A_RANK = {
    "samples": lambda files: ElasticLoader(range(2), 1, rank=2, ranks=3),
    "full batches": lambda files: ElasticLoader(range(7), 4, drop_last=True, rank=0, ranks=2),
    "groups": lambda files: ElasticFiles(files[:1], 4, rank=8, ranks=9),
}


@pytest.mark.parametrize("kind", NOTHING_FOR_A_RANK)
def test_a_rank_that_gets_nothing_of_an_epoch_says_so_and_does_not_loop_for_ever(files, kind):
    with pytest.raises(RuntimeError, match=r"rank \d of \d gets no batch of an epoch of \d (samples|row groups): use"):
        next(iter(NOTHING_FOR_A_RANK[kind](files)))


WRONG_FILES = {
    "a column": ({"columns": ["typo"]}, r"columns: '.*a.parquet' has no 'typo'; it has \['n', 'other'\]"),
    "one name": ({"columns": "n"}, r"columns must be a list of names, found 'n'; pass \['n'\]"),
    "no files": ({"paths": []}, "paths: there are no rows in 0 files"),
}


@pytest.mark.parametrize("wrong", WRONG_FILES)
def test_files_or_columns_that_are_not_there_are_refused(files, wrong):
    options, message = WRONG_FILES[wrong]
    with pytest.raises(ValueError, match=message):
        ElasticFiles(**{"paths": files, "batch_rows": 4, **options})


def test_columns_come_in_the_order_in_which_they_were_asked_for(files):
    for path in files:
        assert next(iter(ElasticFiles([path], 4, columns=["other", "n"]))).schema.names == ["other", "n"]


def test_a_damaged_file_is_named(tmp_path, files):
    data = files[0].read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    with pytest.raises(OSError, match=r"a.parquet, row group 0 cannot be read: "):
        list(ElasticFiles([tmp_path / "a.parquet"], 4, shuffle=False))
    (tmp_path / "cut.parquet").write_bytes(data[:-9])
    with pytest.raises(OSError, match=r"cut.parquet cannot be read: "):
        ElasticFiles([tmp_path / "cut.parquet"], 4)


def test_files_of_the_same_name_in_other_directories_are_other_data(tmp_path, files):
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "part.parquet").write_bytes(files[0].read_bytes())
    data = ElasticFiles([tmp_path / "day=1/part.parquet"], 4)
    next(iter(data))
    with pytest.raises(ValueError, match="the first 5 row groups differ"):
        ElasticFiles([tmp_path / "day=2/part.parquet"], 4).load_io_state(data.dump_io_state())


def test_a_loader_that_goes_on_behind_its_sampler_is_refused_before_its_batch_is_given():
    data = ElasticLoader(range(4), 2, loader=lambda data, batches: [[0, 1], [2, 3], [4, 5]])
    given = iter(data)
    assert [next(given), next(given)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="it yields more than the 2 batches of its batch sampler"):
        next(given)
