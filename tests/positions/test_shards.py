"""Positions in the shards of an iterable dataset: each example of an epoch is used once, by whichever rank and worker.

Those of real ``datasets`` are in tests/integrations/test_datasets.py.
"""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.numbered_shards import ROWS, Numbers
from support.rank_processes import results, run_script
from torch import nn
from torch.utils.data import DataLoader

from recckpt import CheckpointManager
from recckpt.positions import ElasticLoader, ElasticShards

N = sum(ROWS)
LIFE = st.lists(st.integers(0, 5), min_size=1, max_size=len(ROWS))


class Workers:
    """As a DataLoader with workers, all in this process; which of them is the next to give a batch is drawn."""

    def __init__(self, shards, n_workers, drawn):
        self.shards, self.n_workers, self.drawn = shards, n_workers, drawn

    def __iter__(self):
        readers = [(number, iter(self.shards)) for number in range(self.n_workers)]
        while readers:
            one = self.drawn.choice(readers)
            info = SimpleNamespace(id=one[0], num_workers=self.n_workers)
            with patch("torch.utils.data.get_worker_info", return_value=info):
                item = next(one[1], None)
            if item is None:
                readers.remove(one)
            else:
                yield item


def numbers(batches):
    return [number for batch in batches for number in batch["n"]]


@given(st.booleans(), st.lists(st.tuples(LIFE, st.integers(0, 3)), max_size=4), st.integers(0, 3), st.randoms())
def test_each_example_of_an_epoch_is_used_once_over_restarts_with_other_ranks_and_workers(shuffle, lives, seed, drawn):
    """Each life has so many ranks, which use so many batches each, and workers; the last one goes to the end."""
    states, used = None, []
    for life, n_workers in [*lives, ([None] * 2, 1)]:
        options = {"shuffle": shuffle, "seed": seed, "ranks": len(life)}
        if n_workers:
            options["loader"] = lambda shards, n=n_workers: Workers(shards, n, drawn)
        ranks = [ElasticShards(Numbers(), 2, rank=rank, **options) for rank in range(len(life))]
        for rank, data in enumerate(ranks):
            if states is not None:
                data.load_io_state(data.merge_io_state(states, rank, len(life)))
        for data, n_batches in zip(ranks, life, strict=True):
            if data.epoch == 0:
                used += numbers(islice(iter(data), n_batches))
        states = [data.dump_io_state() for data in ranks]
    assert sorted(used) == list(range(N))


@pytest.mark.parametrize("n_used", [0, 1, 4, 10, 11, 15])
def test_as_many_ranks_go_on_with_the_batches_that_would_have_come(n_used):
    def batches(data):
        while True:
            yield from data

    straight, broken_off, resumed = (ElasticShards(Numbers(), 2, seed=5) for _ in range(3))
    wanted = list(islice(batches(straight), 40))
    given_first = list(islice(batches(broken_off), n_used))
    resumed.load_io_state(broken_off.dump_io_state())
    assert given_first + list(islice(batches(resumed), 40 - n_used)) == wanted
    assert sorted(numbers(wanted[:11])) == sorted(numbers(wanted[11:22])) == list(range(N))
    assert wanted[:11] != wanted[11:22], "each epoch has another order of shards"


def test_workers_that_read_ahead_leave_the_position_at_the_batches_that_were_given():
    def read(shards):
        return DataLoader(shards, batch_size=None, num_workers=2)

    data, resumed = (ElasticShards(Numbers(), 2, loader=read) for _ in range(2))
    used = numbers(islice(iter(data), 4))
    resumed.load_io_state(data.dump_io_state())
    assert sorted(used + numbers(resumed)) == list(range(N))
    assert resumed.epoch == 1
    assert sorted(numbers(resumed)) == list(range(N))


def test_what_is_left_of_the_shards_is_dealt_so_that_each_rank_gets_some():
    """Shards that are used up are not dealt anew."""
    data = ElasticShards(Numbers((2,) * 8), 2, shuffle=False)
    list(islice(iter(data), 5))
    states = [data.dump_io_state()]
    ranks = [ElasticShards(Numbers((2,) * 8), 2, shuffle=False, rank=rank, ranks=4) for rank in range(4)]
    for rank, each in enumerate(ranks):
        each.load_io_state(each.merge_io_state(states, rank, 4))
    assert [numbers(each) for each in ranks] == [
        [],
        [10, 11],
        [12, 13],
        [14, 15],
    ]  # the fifth is known to end by the next


def test_the_last_examples_of_a_shard_may_be_left_out_and_another_size_of_batches_goes_on():
    assert [batch["n"] for batch in ElasticShards(Numbers(), 3, drop_last=True, shuffle=False)] == [
        *([0, 1, 2], [5, 6, 7], [8, 9, 10], [12, 13, 14], [15, 16, 17])
    ]
    data, larger = ElasticShards(Numbers(), 2), ElasticShards(Numbers(), 5)
    used = numbers(islice(iter(data), 4))
    larger.load_io_state(data.dump_io_state())
    assert sorted(used + numbers(larger)) == list(range(N))


def test_a_run_goes_on_where_it_was(tmp_path):
    def run(steps):
        data = ElasticShards(Numbers(), 2)
        with CheckpointManager.attach(nn.Linear(1, 1), loader=data, output_dir=tmp_path, save_interval=2) as manager:
            manager.restore()
            for batch in data:
                yield batch
                manager.step()
                if manager.global_step == steps:
                    return

    assert sorted(numbers([*run(4), *run(7), *run(100)])) == list(range(N))


def test_two_ranks_save_and_three_restore_and_use_the_rest_of_the_epoch_once(tmp_path):
    script = Path(__file__).with_name("shards_ranks.py")
    run_script(script, tmp_path, 2)
    run_script(script, tmp_path, 3)
    used = [number for of_rank in (*results(tmp_path, 2), *results(tmp_path, 3)) for number in of_rank]
    assert sorted(used) == list(range(N))


def split():
    data = SimpleNamespace(
        **{name: getattr(Numbers(), name) for name in ("n_shards", "shard", "skip", "iter", "set_epoch")}
    )
    data._distributed = "as split_dataset_by_node leaves it"
    return data


WRONG = {
    "a list": (
        {"dataset": [1]},
        "IterableDataset of Hugging Face, found a list, which has no n_shards",
    ),
    "split by node": ({"dataset": split()}, "dataset is already split by node: pass the whole dataset"),
    "batch size": ({"batch_size": 0}, "batch_size must be an int of at least 1, found 0"),
    "batches of batches": ({"loader": lambda s: DataLoader(s, batch_size=2)}, "loader: .*pass batch_size=None"),
    "workers that stay": (
        {"loader": lambda s: DataLoader(s, batch_size=None, num_workers=1, persistent_workers=True)},
        "loader: persistent workers do not see the next epoch",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_refused(wrong):
    options, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        ElasticShards(**{"dataset": Numbers(), "batch_size": 4, **options})


def test_other_data_and_more_ranks_than_shards_are_refused():
    data = ElasticShards(Numbers(), 2)
    next(iter(data))
    with pytest.raises(ValueError, match="found 5 shards, expected 6: use that, or omit the position"):
        ElasticShards(Numbers((*ROWS, 1)), 2).load_io_state(data.dump_io_state())
    with pytest.raises(ValueError, match="the position is in other data: the first 5 samples differ"):
        ElasticLoader(range(5), 2).load_io_state(data.dump_io_state())
    with pytest.raises(RuntimeError, match="rank 5 of 6 gets no batch of an epoch of 5 shards: use fewer ranks"):
        next(iter(ElasticShards(Numbers(), 2, rank=5, ranks=6)))
