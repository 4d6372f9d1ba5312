"""Positions in iterable datasets of Hugging Face, with the library itself."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from recckpt import CheckpointManager
from recckpt.positions import ElasticShards

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'recckpt[integrations]'")
from datasets.distributed import split_dataset_by_node  # noqa: E402  # once it is known to be there

N_SHARDS, ROWS = 5, 7


def numbered(firsts):
    for first in firsts:
        for number in range(first, first + ROWS):
            yield {"n": number}


def made(n_shards=N_SHARDS):
    firsts = [ROWS * number for number in range(n_shards)]
    return datasets.IterableDataset.from_generator(numbered, gen_kwargs={"firsts": firsts})


def of_arrow():
    return datasets.Dataset.from_dict({"n": list(range(N_SHARDS * ROWS))}).to_iterable_dataset(num_shards=N_SHARDS)


KINDS = {
    "a generator": made,
    "shuffled": lambda: made().shuffle(seed=3, buffer_size=4),
    "of torch": lambda: made().with_format("torch"),
    "mapped and filtered": lambda: made().map(lambda row: {"n": row["n"]}).filter(lambda row: row["n"] % 3 > 0),
    "concatenated": lambda: datasets.concatenate_datasets([made(3), made(2)]),
    "of Arrow": of_arrow,
    "of Arrow, shuffled, as Arrow": lambda: of_arrow().shuffle(seed=1, buffer_size=3).with_format("arrow"),
}


def numbers(batches):
    return [int(number.as_py() if hasattr(number, "as_py") else number) for batch in batches for number in batch["n"]]


def read_by_workers(shards):
    return DataLoader(shards, batch_size=None, num_workers=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", [None, read_by_workers], ids=["no workers", "workers"])
def test_an_epoch_that_is_broken_off_goes_on_where_it_was_also_the_second(kind, loader):
    all_of_it = sorted(numbers(KINDS[kind]().iter(8)))
    straight, broken_off = (ElasticShards(KINDS[kind](), 3, loader=loader) for _ in range(2))
    for epoch in range(2):
        wanted = numbers(straight)
        assert sorted(wanted) == all_of_it
        used = numbers(islice(iter(broken_off), 4))
        resumed = ElasticShards(KINDS[kind](), 3, loader=loader)
        resumed.load_io_state(broken_off.dump_io_state())
        assert resumed.epoch == epoch
        used += numbers(resumed)
        assert sorted(used) == all_of_it
        if loader is None:
            assert used == wanted
        broken_off = resumed


@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=N_SHARDS), max_size=3))
def test_each_example_of_an_epoch_is_used_once_over_restarts_with_other_ranks(kind, lives):
    states, used = None, []
    for life in [*lives, [None] * 2]:
        ranks = [ElasticShards(KINDS[kind](), 3, rank=rank, ranks=len(life)) for rank in range(len(life))]
        for rank, data in enumerate(ranks):
            if states is not None:
                data.load_io_state(data.merge_io_state(states, rank, len(life)))
        for data, n_batches in zip(ranks, life, strict=True):
            if data.epoch == 0:
                used += numbers(islice(iter(data), n_batches))
        states = [data.dump_io_state() for data in ranks]
    assert sorted(used) == sorted(numbers(KINDS[kind]().iter(8)))


def test_a_run_with_workers_saves_the_position_and_restores_it_with_others(tmp_path):
    def run(steps, n_workers):
        def read(shards):
            return DataLoader(shards, batch_size=None, num_workers=n_workers)

        data = ElasticShards(made().with_format("torch"), 3, loader=read)
        with CheckpointManager.attach(nn.Linear(1, 1), loader=data, output_dir=tmp_path, save_interval=2) as manager:
            manager.restore()
            for batch in data:
                yield batch
                manager.step()
                if manager.global_step == steps:
                    return

    used = numbers([*run(4, 2), *run(9, 3), *run(100, 1)])
    assert sorted(used) == list(range(N_SHARDS * ROWS))


def test_what_is_split_by_node_and_what_is_no_iterable_dataset_are_refused():
    with pytest.raises(ValueError, match="dataset is already split by node: pass the whole dataset"):
        ElasticShards(split_dataset_by_node(made(), rank=0, world_size=2), 3)
    with pytest.raises(
        ValueError, match=r"found a Dataset, which has no n_shards: pass a dataset with len\(\) to ElasticLoader"
    ):
        ElasticShards(datasets.Dataset.from_dict({"n": [1]}), 3)


@pytest.mark.parametrize("part", ["take", "skip"])
def test_a_part_that_is_counted_over_all_shards_is_refused(part):
    dataset = getattr(made(), part)(9).map(lambda row: row)
    with pytest.raises(ValueError, match=rf"dataset has a {part}\(\) that counts over all shards"):
        ElasticShards(dataset, 3)
