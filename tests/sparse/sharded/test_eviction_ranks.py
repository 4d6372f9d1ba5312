"""One, two and three real processes evict the same rows at the same steps."""

import json
from pathlib import Path

import pytest
from support.rank_processes import results, run_script

from recckpt import CheckpointReader

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SIZES = (1, 2, 3)
BY = ("last_step", "count")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the ranks have left what they found."""
    root = tmp_path_factory.mktemp("ranks")
    run_script(HERE / "eviction_ranks.py", root, *SIZES[1:])
    return root


def merged(shards):
    rows = {}
    for shard in shards:
        assert not rows.keys() & shard.keys()
        rows |= shard
    return rows


def of_steps(root, size, by):
    """The rows of all ranks after each step."""
    ranks = [rank[by][0] for rank in results(root, size)]
    return {step: merged(rank[step] for rank in ranks) for step in ranks[0]}


@pytest.mark.parametrize("by", BY)
def test_the_same_rows_are_there_after_each_step_on_any_number_of_ranks(root, by):
    alone = of_steps(root, 1, by)
    assert alone == of_steps(root, 2, by) == of_steps(root, 3, by)
    assert max(map(len, alone.values())) <= 60
    n_evicted = {sum(rank[by][1] for rank in results(root, size)) for size in SIZES}
    assert len(n_evicted) == 1
    assert n_evicted.pop() > 50


@pytest.mark.parametrize("by", BY)
def test_a_run_that_goes_on_from_what_other_ranks_saved_evicts_what_they_did(root, by):
    for size in SIZES:
        resumed = merged(rank[f"resumed by {by}"] for rank in results(root, size))
        assert resumed == of_steps(root, size, by)[20]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("size", SIZES)
def test_what_was_evicted_is_deleted_by_the_deltas_and_counted_by_the_timeline(root, size, by):
    path = root / f"{by}-{size}"
    lines = [json.loads(line) for line in (path / "timeline.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] != "ended"]
    assert [line["kind"] for line in lines][:3] == ["full", "delta", "delta"]
    counted = [line["n_evicted"] for line in lines]
    assert counted == sorted(counted)
    ranks = results(root, size)
    assert counted[-1] == sum(rank[by][1] for rank in ranks) == ranks[0][by][2]
    assert by == "count" or max(line["n_deletes"] for line in lines) > 10, "else the table counts as replaced"
    for step, rows in of_steps(root, size, by).items():
        if step % 5 == 0:
            with CheckpointReader(str(path / f"ckpt_{step}")) as reader:
                ids = [id_ for batch in reader.table("t") for id_ in batch["id"].to_pylist()]
                assert sorted(ids) == sorted(rows)


def test_a_capacity_by_hand_is_that_of_all_ranks(root):
    for size in SIZES:
        found = [rank["at_once"] for rank in results(root, size)]
        assert sum(n_evicted for n_evicted, _ in found) == 85
        assert sorted(id_ for _, ids in found for id_ in ids) == [*range(85, 100)]


def test_ranks_at_different_steps_are_told_so(root):
    assert results(root, 1)[0]["apart"] is None
    for rank in results(root, 3):
        assert "evicting from 't' at step 0" in rank["apart"]
        assert "it is at evicting from 't' at step 1" in rank["apart"]


def test_a_policy_that_fails_on_one_rank_fails_on_all_with_its_error_and_none_hangs(root):
    for alone, *ranks in zip(*(rank["fails"] for size in SIZES for rank in results(root, size)), strict=True):
        assert alone[0] == []
        for said, _ in ranks:
            assert len(said) >= 2
            assert all("ZeroDivisionError: of the user" in each for each in said)
        for of_ranks in (ranks[:2], ranks[2:]):
            assert sorted(id_ for _, ids in of_ranks for id_ in ids)[-5:] == alone[1][-5:]
