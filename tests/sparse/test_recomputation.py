"""Tables inside ``torch.utils.checkpoint``, against the same training without it."""

import pytest
import torch
from support.rooms import on_ranks
from support.sweeps import mostly_slow
from torch.utils.checkpoint import checkpoint

from recckpt.policies.admit import Bloom, MinCount, Probability
from recckpt.policies.evict import Capacity, LowCount, Unseen
from recckpt.sparse import EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam

TRACKED = {"track": ("count", "step"), "initializer": Normal(0.0, 0.1)}
POLICIES = {
    "admit": {"admit": MinCount(3)},
    "admit by a filter": {"admit": MinCount(3, bloom=Bloom(1000, 0.01))},
    "toss": {"admit": Probability(0.3)},
    "none": {},
    "evict": {"evict": [LowCount(4) & Unseen(steps=3), Capacity(12)], "evict_every": 4},
}


def called(table, ids):
    return table(ids)


def pooled(table, ids):
    return table.bag(ids)


def collected(table, ids):
    return EmbeddingCollection([table])({"t": ids})["t"]


def run_plainly(function, *args):
    return function(*args)


def recomputed(**options):
    return lambda function, *args: checkpoint(function, *args, **options)


def recomputed_twice(function, *args):
    inner = recomputed(use_reentrant=False)
    return checkpoint(lambda *of: inner(function, *of), *args, use_reentrant=False)


def compiled(function, *args):
    return checkpoint(torch.compile(function, backend="eager"), *args, use_reentrant=False)


MODES = {
    "not reentrant": recomputed(use_reentrant=False),
    "reentrant": recomputed(use_reentrant=True),
    "nested": recomputed_twice,
    "to the end": recomputed(use_reentrant=False, preserve_rng_state=False, determinism_check="none"),
    "compiled": compiled,
}


def contents(table):
    columns = {"embedding": table.embeddings(), **table.slots}
    rows = {
        id_: {slot: values[row].tolist() for slot, values in columns.items()}
        for row, id_ in enumerate(table.ids().tolist())
    }
    waiting = None if table.candidates is None else contents(table.candidates)
    return rows, waiting, table.n_evicted


def train(table, look_up, run, n_steps=20, seed=0):
    """Train a table and return what came of it, with the outputs."""
    draws = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(layer.weight, 0.5)
    torch.nn.init.constant_(layer.bias, 0.1)
    optim = SparseAdam([table], lr=0.1)
    outputs = []

    def part(weight, ids):
        return torch.tanh(layer(look_up(table, ids) * weight))

    for step in range(n_steps):
        table.step = step
        ids = torch.randint(0, 10 + 2 * step, (3, 4), generator=draws)
        out = run(part, torch.ones((), requires_grad=True), ids)
        optim.zero_grad()
        out.square().sum().backward()
        optim.step()
        outputs.append(out.detach())
    return outputs, contents(table)


@mostly_slow("mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("look_up", [called, pooled])
def test_a_recomputation_counts_inserts_and_evicts_nothing(mode, policy, look_up):
    options = {"name": "t", **TRACKED, **POLICIES[policy]}
    found = train(HashTable(2, **options), look_up, MODES[mode])
    expected = train(HashTable(2, **options), look_up, run_plainly)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@mostly_slow("look_up")
@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", ["admit", "evict", "none"])
@pytest.mark.parametrize("look_up", [called, pooled, collected])
def test_so_do_all_ranks_of_a_sharded_table(mode, policy, look_up):
    def of_ranks(run):
        def work(exchange):
            table = ShardedHashTable(2, name="t", group=exchange, **TRACKED, **POLICIES[policy])
            return train(table, look_up, run, seed=exchange.rank)

        return on_ranks(2, work)

    torch.testing.assert_close(of_ranks(MODES[mode]), of_ranks(run_plainly), rtol=0, atol=0)


def twice(table, ids):
    """Look a table up for two features, of which the second may admit what the first has not."""
    return table(ids) + table(ids.flip(1) + 1)


@mostly_slow()
@pytest.mark.parametrize("mode", ["not reentrant", "nested", "compiled", "reentrant"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_of_two_features_gives_each_the_gradients_of_its_first_run(mode, policy):
    options = {"name": "t", **TRACKED, **POLICIES[policy]}
    found = train(HashTable(2, **options), twice, MODES[mode])
    expected = train(HashTable(2, **options), twice, run_plainly)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_look_up_of_ones_own_in_a_backward_pass_gives_new_ids_their_rows():
    table, rows = HashTable(2, name="t", **TRACKED), []
    weight = torch.ones(2, requires_grad=True)

    @torch.enable_grad()
    def look_up(grad):
        rows.append(table(torch.tensor([7, 8])))

    weight.register_hook(look_up)
    weight.sum().backward()
    rows[0].sum().backward()
    assert contents(table)[0].keys() == {7, 8}
    assert table.slots["count"].tolist() == [1, 1]
    assert table.grad.tolist() == [[1, 1]] * 2


@pytest.mark.parametrize(("start", "n_warnings"), [(torch.nn.init.normal_, 1), (Normal(), 0)])
def test_an_initializer_that_draws_from_torch_in_the_first_run_alone_is_warned_of_once(start, n_warnings, caplog):
    table = HashTable(2, name="t", initializer=start)
    for _ in range(2):
        train(table, called, MODES["not reentrant"], n_steps=2)
    found = [record for record in caplog.records if "a backward pass repeated a look-up" in record.message]
    assert len(found) == n_warnings
