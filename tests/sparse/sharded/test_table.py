"""Tables whose rows lie on many ranks, against a plain table that sees the batches of all ranks."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import OPTIMIZERS
from support.rooms import on_ranks
from support.sweeps import mostly_slow

from recckpt import Saver
from recckpt.errors import LookupFailedError
from recckpt.policies.admit import Bloom, MinCount, Probability
from recckpt.sparse import Constant, EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam, gen_slice
from recckpt.sparse.sharded.all_to_all import carrier_of
from recckpt.sparse.sharded.lookup import requests_in, route

START = Normal(0.0, 0.1, seed=3)


def ids_of(*ids):
    return torch.tensor(ids, dtype=torch.int64)


def sharded(exchange, dim=3, name="t", **options):
    return ShardedHashTable(dim, name=name, group=exchange, **{"initializer": START, **options})


def contents(table):
    """Return id -> {slot: values}."""
    columns = {"embedding": table.embeddings(), **table.slots}
    return {
        id_: {slot: values[row] for slot, values in columns.items()} for row, id_ in enumerate(table.ids().tolist())
    }


def union(shards):
    """Return the contents of all ranks, after making sure that no id is on two."""
    rows = {}
    for shard in shards:
        assert not rows.keys() & shard.keys()
        rows |= shard
    return rows


def assert_same_rows(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for id_, slots in expected.items():
        assert found[id_].keys() == slots.keys()
        for slot, values in slots.items():
            torch.testing.assert_close(found[id_][slot], values, **tolerance)


def loss_of(rows, weight=1.0):
    """A loss with a gradient of its own for every position of the batch: a mean over it."""
    factors = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).view(rows.shape)
    return weight * (torch.sigmoid(rows.double()) * factors).sum() / 7


# where ids go

BATCHES = st.lists(st.integers(-6, 6) | st.integers(-(2**63), 2**63 - 1), max_size=30)


@settings(max_examples=30)
@given(st.lists(BATCHES, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 3))
def test_every_id_is_sent_once_to_the_one_rank_whose_slice_owns_it_and_found_again(ids, n_ranks, spacing):
    ids = [np.array(batch, np.int64) for batch in ids]
    sent = route(ids, n_ranks, spacing, counted=False)
    message, lengths = sent.message()
    came_back = []
    for rank, part in enumerate(np.split(message, np.cumsum(lengths)[:-1])):
        got = requests_in(part, [len(part)], len(ids), counted=False)
        for batch, own in zip(ids, got.ids, strict=True):
            assert sorted(own) == sorted({*batch[gen_slice(rank, n_ranks).owns(batch)]})
        came_back += [*np.concatenate(got.ids), *[None] * spacing]
    for batch, positions in zip(ids, sent.positions, strict=True):
        assert [came_back[position] for position in positions] == batch.tolist()


def test_what_several_ranks_ask_for_stands_in_their_order_table_by_table():
    messages = [np.array(m, np.int64) for m in ([2, 1, 10, 11, 20], [0, 0], [1, 0, 12])]
    got = requests_in(np.concatenate(messages), [5, 2, 3], 2, counted=False)
    assert [ids.tolist() for ids in got.ids] == [[10, 11, 12], [20]]
    assert got.counts.tolist() == [[2, 1], [0, 0], [1, 0]]


# equal to one table

RUNS = st.integers(1, 5).flatmap(
    lambda size: st.lists(
        st.lists(st.lists(st.integers(-20, 20), max_size=12), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@settings(max_examples=15)
@given(RUNS, st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(["mean", "sum"]))
def test_training_over_many_ranks_is_training_of_one_table_on_all_their_batches(steps, optimizer, gradients):
    size = len(steps[0])

    def train(exchange):
        table = sharded(exchange, gradients=gradients)
        optim, losses = OPTIMIZERS[optimizer]([table]), []
        for step in steps:
            losses.append(loss_of(table(ids_of(*step[exchange.rank]))))
            losses[-1].backward()
            optim.step()
            optim.zero_grad()
        return contents(table), optim.state_dict()["state"], torch.stack(losses).detach()

    plain = HashTable(3, name="t", initializer=START)
    optim, losses = OPTIMIZERS[optimizer]([plain]), []
    for step in steps:
        losses.append(torch.stack([loss_of(plain(ids_of(*ids))) for ids in step]))
        (losses[-1].mean() if gradients == "mean" else losses[-1].sum()).backward()
        optim.step()
        optim.zero_grad()

    shards, states, found = zip(*on_ranks(size, train), strict=True)
    assert_same_rows(union(shards), contents(plain))
    assert all(state == optim.state_dict()["state"] for state in states)
    torch.testing.assert_close(torch.stack(found, 1), torch.stack(losses).detach())


@mostly_slow("policy")
@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("policy", [MinCount(3), MinCount(3, Bloom(1000, 0.01)), Probability(0.3)], ids=str)
def test_any_number_of_ranks_admits_and_counts_the_same(size, policy):
    options = {"track": ("count", "step"), "admit": policy}
    plain = HashTable(2, name="t", initializer=START, **options)

    def train(table, rank, size):
        for step in range(8):
            table.step = step
            ids = torch.randint(-9, 9, (7,), generator=torch.Generator().manual_seed(step))
            table(ids[rank::size]).sum().backward()
            table(torch.arange(100 + rank), admit=False)
        return gradients_by_id(table), contents(table), None if table.candidates is None else contents(table.candidates)

    found = on_ranks(
        size, lambda exchange: train(sharded(exchange, 2, gradients="sum", **options), exchange.rank, size)
    )
    grads, rows, candidates = zip(*found, strict=True)
    expected = train(plain, 0, 1)
    assert union(grads) == expected[0]
    assert_same_rows(union(rows), expected[1], rtol=0, atol=0)
    if policy.counts:
        assert_same_rows(union(candidates), expected[2], rtol=0, atol=0)
    assert 0 < len(plain) < 18


def test_with_one_rank_it_is_a_plain_table_bit_for_bit():
    torch.manual_seed(0)
    found = []
    draws = [torch.randint(-50, 50, (4, 5)) for _ in range(5)]
    for make in (HashTable, ShardedHashTable):
        table = make(3, name="t", initializer=START)
        assert table.slice.is_everything
        optim = SparseAdam([table], lr=0.1)
        for ids in draws:
            loss_of(table(ids)).backward()
            optim.step()
            optim.zero_grad()
        found.append(contents(table))
    assert_same_rows(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 0), (1, 2, 2)])
def test_rows_have_the_shape_of_the_ids_and_stand_in_their_order(shape):
    plain = HashTable((2, 3), name="t", initializer=START)

    def look_up(exchange):
        ids = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(exchange.rank))
        return ids, sharded(exchange, (2, 3))(ids)

    for ids, rows in on_ranks(3, look_up):
        assert rows.shape == (*shape, 2, 3)
        assert torch.equal(rows, plain(ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_rows_of_any_dtype_travel_unchanged(dtype):
    start = START if dtype.is_floating_point else Constant(7)
    plain = HashTable(3, name="t", dtype=dtype, initializer=start)
    look_up = lambda exchange: sharded(exchange, dtype=dtype, initializer=start)(ids_of(1, 2, 3, 4))  # noqa: E731
    for rows in on_ranks(2, look_up):
        assert rows.requires_grad == dtype.is_floating_point
        assert torch.equal(rows, plain(ids_of(1, 2, 3, 4)))


# gradients


def gradients_by_id(table):
    rows, grads = table.take_gradients()
    return dict(zip(table.ids()[torch.from_numpy(rows)].tolist(), grads.tolist(), strict=True))


def all_gradients(size, backward, dim=1, gradients="sum"):
    """Return the gradients of all ranks after ``backward(table, rank)``."""

    def train(exchange):
        table = sharded(exchange, dim, gradients=gradients)
        backward(table, exchange.rank)
        return gradients_by_id(table)

    return union(on_ranks(size, train))


def of_positions(table, rank):
    (table(ids_of(7, 8, 7)) * ids_of(1, 10, 100).view(3, 1)).sum().backward()


def of_several_batches(table, rank):
    for factor in (1, 10):
        (factor * table(ids_of(1, 2 + rank))).sum().backward()


def of_two_look_ups_in_one_pass(table, rank):
    (table(ids_of(1, 2)) + 10 * table(ids_of(2, 3))).sum().backward()


def of_a_graph_gone_through_twice(table, rank):
    loss = table(ids_of(1)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_rows_changed_in_place_and_ids_overwritten(table, rank):
    ids = ids_of(1, 2)
    rows = table(ids)
    ids.fill_(3)
    rows.mul_(5)
    rows.sum().backward()


def of_rows_erased_before_the_backward_pass(table, rank):
    rows = table(ids_of(1, 2, 3))
    table.erase(ids_of(2))
    rows.sum().backward()


@pytest.mark.parametrize(
    ("backward", "size", "expected"),
    [
        (of_positions, 4, {7: [404], 8: [40]}),
        (of_several_batches, 2, {1: [22], 2: [11], 3: [11]}),
        (of_two_look_ups_in_one_pass, 3, {1: [3], 2: [33], 3: [30]}),
        (of_a_graph_gone_through_twice, 2, {1: [4]}),
        (of_rows_changed_in_place_and_ids_overwritten, 2, {1: [10], 2: [10]}),
        (of_rows_erased_before_the_backward_pass, 2, {1: [2], 3: [2]}),
    ],
)
def test_gradients_are_summed_or_divided_by_the_number_of_ranks(backward, size, expected):
    assert all_gradients(size, backward) == expected
    means = {id_: [total / size for total in totals] for id_, totals in expected.items()}
    assert all_gradients(size, backward, gradients="mean") == means


def test_without_grad_nothing_is_recorded_and_in_eval_mode_nothing_is_inserted():
    def look_up(exchange):
        table = sharded(exchange, 1, initializer=Constant(5.0))
        with torch.no_grad():
            rows = table(ids_of(1, 2, 3))
        read = table.eval()(ids_of(2, 99)).tolist()
        sums = []  # of tables of 16 bits are added up in float32
        for dtype in (torch.float16, torch.bfloat16):
            narrow = sharded(exchange, name=str(dtype), dtype=dtype, gradients="sum")
            narrow(torch.ones(3000, dtype=torch.int64)).sum().backward()
            sums.append(narrow.take_gradients()[1].tolist())
        return rows.requires_grad, table.take_gradients(), read, len(table), sums

    grads, taken, read, lengths, sums = zip(*on_ranks(3, look_up), strict=True)
    assert (grads, taken, read, sum(lengths)) == ((False,) * 3, (None,) * 3, ([[5], [5]],) * 3, 3)
    assert sorted(sums) == [[[], []], [[], []], [[[9000] * 3]] * 2]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_rank_without_ids_counts_the_step_all_the_same(optimizer):
    def train(exchange):
        table = sharded(exchange)
        optim = OPTIMIZERS[optimizer]([table])
        rows = table(ids_of())
        rows.sum().backward()
        found = rows.shape, len(table), [len(part) for part in table.take_gradients()]
        table(ids_of(1)).sum().backward()
        optim.step()
        return found, len(table), optim.state_dict()["state"]

    found, lengths, states = zip(*on_ranks(4, train), strict=True)
    assert found == (((0, 3), 0, [0, 0]),) * 4, "of no ids on any rank"
    assert sorted(lengths) == [0, 0, 0, 1]
    assert states == ({"t": {"step": 1}},) * 4


# several tables


def collection(exchange, names, **options):
    return EmbeddingCollection(sharded(exchange, name=name, **options) for name in names)


def test_tables_looked_up_together_give_what_each_gives_alone_with_the_messages_of_one():
    names, counts = ["a", "b", "c", "d"], {}

    def ids_for(rank):
        draw = torch.Generator().manual_seed(rank)
        return {name: torch.randint(-9, 9, (2, 3 + i * rank), generator=draw) for i, name in enumerate(names)}

    def train(exchange, together):
        tables = collection(exchange, names)
        optim = SparseAdam(list(tables.tables), lr=0.1)
        for _ in range(2):
            before = exchange.room.n_messages
            ids = ids_for(exchange.rank)
            rows = tables(ids) if together else {t.name: t(ids[t.name]) for t in tables.tables}
            sum(loss_of(rows[name], 1 + i) for i, name in enumerate(names)).backward()
            if exchange.rank == 0:
                counts[together] = exchange.room.n_messages - before
            optim.step()
            optim.zero_grad()
        return [contents(table) for table in tables.tables], {name: r.detach() for name, r in rows.items()}

    found, expected = (on_ranks(3, lambda exchange, t=t: train(exchange, t)) for t in (True, False))
    for (tables, rows), (other_tables, other_rows) in zip(found, expected, strict=True):
        for name in names:
            assert torch.equal(rows[name], other_rows[name])
        for table, other in zip(tables, other_tables, strict=True):
            assert_same_rows(table, other, rtol=0, atol=0)
    assert counts == {True: 5, False: 20}


def test_tables_of_several_shapes_and_dtypes_are_one_collection():
    def look_up(exchange):
        kinds = {"a": (2, torch.float32), "b": (5, torch.float32), "c": (2, torch.float64), "d": (2, torch.float32)}
        tables = EmbeddingCollection(
            sharded(exchange, dim, name=name, dtype=dtype) for name, (dim, dtype) in kinds.items()
        )
        rows = tables({name: ids_of(1, 2, 3) for name in kinds})
        sum(some.sum().double() for some in rows.values()).backward()
        assert all(table.take_gradients() is not None for table in tables.tables)
        return {name: (tuple(some.shape), some.dtype) for name, some in rows.items()} == {
            name: ((3, dim), dtype) for name, (dim, dtype) in kinds.items()
        }

    assert on_ranks(2, look_up) == [True, True]


def test_a_table_that_no_loss_depends_on_has_no_gradients_and_one_of_a_single_rank_has_them_on_all():
    def train(exchange):
        tables = collection(exchange, ["unused", "used by 1", "used"], dim=1)
        rows = tables({name: ids_of(1, 2, 3, 4) for name in ("unused", "used by 1", "used")})
        (rows["used"].sum() + (rows["used by 1"].sum() if exchange.rank == 1 else 0)).backward()
        return [table.take_gradients() for table in tables.tables]

    for unused, used_by_1, used in on_ranks(3, train):
        assert unused is None
        assert used_by_1[1].eq(1 / 3).all()
        assert used[1].eq(1).all()
        assert len(used_by_1[0]) == len(used[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: EmbeddingCollection([ShardedHashTable(2, name="a"), ShardedHashTable(3, name="a")]),
            ValueError,
            r"names of their own, found \['a', 'a'\]",
        ),
        *(
            (
                lambda some=some: EmbeddingCollection(some),
                TypeError,
                f"ShardedHashTable, found the {found}: use a ShardedHashTable",
            )
            for some, found in (
                ([HashTable(2, name="t")], "HashTable 't'"),
                ({"t": ShardedHashTable(2, name="t")}, "str 't'"),
                ([None], "NoneType None"),
            )
        ),
        (
            lambda: EmbeddingCollection([ShardedHashTable(2, name="a"), ShardedHashTable(2, name="b")])(
                {"a": ids_of()}
            ),
            ValueError,
            r"found ids for \[.*\], expected for \[.*'b'\]",
        ),
        (lambda: sharded(None, gradients="average"), ValueError, "found gradients='average', expected 'mean' or 'sum'"),
        (
            lambda: sharded(-100),
            ValueError,
            "found group=-100, expected a process group that this process belongs to",
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(make, error, message, monkeypatch):
    with pytest.raises(error, match=message):
        make()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"one of 2 processes .* no process group: call .*init_process_group"):
        ShardedHashTable(2, name="t")


# errors: all ranks raise alike, and go on together


def failures(size, look_up, after=None):
    """Return the errors of all ranks; a look-up by all of them works after them."""

    def work(exchange):
        tables = collection(exchange, ["a", "b"])
        try:
            look_up(tables, exchange.rank)
        except Exception as error:
            n_rows = sum(len(table) for table in tables.tables)
            tables.tables[0].initializer = START
            assert tables({"a": ids_of(1, 2), "b": ids_of()})["a"].shape == (2, 3)
            return error, n_rows
        return None, None

    return on_ranks(size, work)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"a": torch.tensor([1], dtype=torch.int16), "b": ids_of()}, "ids must be int64, found torch.int16"),
        ({"a": [1, 2], "b": ids_of()}, "ids for 'a': found list, expected an int64 tensor"),
        (
            {"a": ids_of(1)},
            "found ids for ['a'], expected for ['a', 'b']: for a table without ids, pass an empty tensor",
        ),
        ({"a": ids_of(1), "b": ids_of(), "c": ids_of()}, "found ids for ['a', 'b', 'c'], expected for ['a', 'b']"),
        (None, "found ids for [], expected for ['a', 'b']"),
    ],
)
def test_wrong_ids_on_one_rank_raise_on_all_before_anything_changes(wrong, cause):
    good = {"a": ids_of(1, 2, 3), "b": ids_of(4)}
    for rank, (error, n_rows) in enumerate(failures(3, lambda tables, rank: tables(wrong if rank == 1 else good))):
        assert isinstance(error, LookupFailedError)
        assert error.rank == 1
        assert str(error).startswith("looking up 'a' (training, mean), 'b' (training, mean) of float32 (3,) with")
        assert f"failed on rank 1: ValueError: {cause}" in str(error)
        assert str(error).endswith("no table has changed: mend the cause on that rank")
        assert n_rows == 0
        assert (error.__cause__ is not None) == (rank == 1)


def eval_on_one(tables, rank):
    tables.train(rank != 2)
    try:
        tables.tables[0](ids_of(1))
    finally:
        tables.train()


def no_grad_on_one(tables, rank):
    with torch.set_grad_enabled(rank != 2):
        tables.tables[0](ids_of(1))


@pytest.mark.parametrize(
    ("look_up", "other"),
    [
        (lambda tables, rank: tables.tables[int(rank == 2)](ids_of(1)), "'b' (training, mean)"),
        (eval_on_one, "'a' (eval, mean)"),
        (no_grad_on_one, "without gradients"),
    ],
)
def test_ranks_that_are_at_different_lookups_raise_alike(look_up, other):
    for error, n_rows in failures(4, look_up):
        assert isinstance(error, LookupFailedError)
        assert error.rank == 2
        assert str(error).startswith("looking up 'a' (training, mean) of float32 (3,) with gradients failed on rank 2")
        assert other in str(error)
        assert "all ranks must look up the same tables in the same order and mode" in str(error)
        assert n_rows == 0


def forget_the_backward_pass(tables, rank):
    """Rank 1 goes on to the next step."""
    loss = tables.tables[0](ids_of(1)).sum()
    if rank != 1:
        loss.backward()
    tables.tables[1](ids_of(1))


def go_back_in_another_order(tables, rank):
    losses = [table(ids_of(1)).sum() for table in tables.tables]
    for loss in losses if rank == 1 else losses[::-1]:
        loss.backward()


@pytest.mark.parametrize(
    ("train", "here", "there"),
    [
        (forget_the_backward_pass, "the backward pass through 'a'", "looking up 'b'"),
        (go_back_in_another_order, "the backward pass through 'b'", "the backward pass through 'a'"),
    ],
)
def test_ranks_of_which_one_is_not_at_the_same_backward_pass_raise_alike(train, here, there):
    for error, _ in failures(3, train):
        assert isinstance(error, LookupFailedError)
        assert error.rank == 1
        assert str(error).startswith(f"{here} (training, mean) of float32 (3,) with gradients failed on rank 1: it is")
        assert f"it is at {there} (training, mean)" in str(error)
        assert str(error).endswith("with losses that depend on all of them")


def test_an_owner_that_cannot_make_a_row_raises_on_all():
    def look_up(tables, rank):
        def fill(values):
            raise MemoryError("no room for new rows")

        if rank == 0:
            tables.tables[0].initializer = type("Failing", (), {"values": lambda *args: fill(args), "unseen": 0.0})()
        tables({"a": torch.arange(20), "b": ids_of()})

    for error, _ in failures(2, look_up):
        assert "failed on rank 0: MemoryError: no room for new rows" in str(error)
        assert str(error).endswith("rows may have been inserted already: mend the cause on that rank")


@pytest.mark.parametrize(
    ("backends", "rows", "carrier"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
    ],
)
def test_gloo_carries_rows_from_the_cpu_and_nccl_from_the_device(backends, rows, carrier):
    assert carrier_of(backends, torch.device(rows)) == torch.device(carrier)


# a table like others


def test_it_stands_in_state_dicts_is_copied_with_its_model_and_saved_as_a_slice(tmp_path):
    def copied(exchange):
        model = torch.nn.ModuleDict({"x": sharded(exchange)})
        model["x"](torch.arange(50))
        twin = copy.deepcopy(model)
        fresh = torch.nn.ModuleDict({"x": sharded(exchange)})
        fresh.load_state_dict(model.state_dict())
        twin["x"](torch.arange(60))
        assert model["x"].slice == gen_slice(exchange.rank, 2)
        return len(model["x"]), len(twin["x"]), contents(fresh["x"]), model

    lengths, twins, rows, models = zip(*on_ranks(2, copied), strict=True)
    assert (sum(lengths), sum(twins)) == (50, 60)
    assert union(rows).keys() == {*range(50)}
    Saver(models[1], output_dir=str(tmp_path)).save("slice")
    whole = torch.nn.ModuleDict({"x": ShardedHashTable(3, name="t", initializer=START)})
    Saver(whole, output_dir=str(tmp_path)).load(tmp_path / "slice")
    assert_same_rows(contents(whole["x"]), rows[1], rtol=0, atol=0)
