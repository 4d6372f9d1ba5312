import copy
import math
import pickle
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recckpt import Saver
from recckpt.format.buckets import gen_slice
from recckpt.policies import MinCount
from recckpt.sparse.optim import SparseAdam
from recckpt.sparse.table.initializers import (
    Constant,
    FromRow,
    Normal,
    TruncatedNormal,
    Uniform,
    as_initializer,
    normal_quantile,
)
from recckpt.sparse.table.table import HashTable
from recckpt.types import SlotSpec

RANDOM = [Normal(0.5, 2.0), Uniform(-1.0, 3.0), TruncatedNormal(0.1, 0.5, -0.4, 1.0)]
IDS = np.arange(20_000)
GOLDEN = {
    Normal(): [-0.6560835173341567, 1.1917013268996683, 0.21968540044829302, 0.35260806567941205, -0.29565066733155687],
    Uniform(): [0.2558852031320079, 0.8833108082136426, 0.586941914422097, 0.6378088605981157, 0.3837484326496149],
    TruncatedNormal(): [
        -0.6219344626859602,
        1.107078829816771,
        0.20953843440313447,
        0.3359309076290339,
        -0.28182744091626444,
    ],
    TruncatedNormal(a=3, b=4, seed=-7): [
        3.354344991722384,
        3.2383684206832526,
        3.063322729190614,
        3.2703248065952475,
        3.0282213817237387,
    ],
}


def values(initializer, ids=IDS, seed: int = 1, dtype: str = "float32", shape=(8,)) -> torch.Tensor:
    return initializer.values(np.asarray(ids, np.int64), seed, SlotSpec("embedding", dtype, shape))


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
def test_an_id_starts_the_same_whatever_its_order_and_batch(initializer):
    whole = values(initializer)
    order = np.random.default_rng(0).permutation(len(IDS))
    assert torch.equal(values(initializer, IDS[order]), whole[torch.from_numpy(order)])
    pieces = [values(initializer, piece) for piece in np.array_split(IDS, 13)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
def test_ids_positions_tables_and_seeds_all_give_other_values(initializer):
    whole = values(initializer)
    assert len(whole.unique()) > 0.98 * whole.numel()
    others = [values(initializer, seed=2), values(type(initializer)(seed=5)), values(initializer, IDS + 1)]
    assert all((other == whole).float().mean() < 0.001 for other in others)


def test_values_never_change_between_versions():
    ids = [0, 1, -1, 2**63 - 1, -(2**63)]
    for initializer, numbers in GOLDEN.items():
        torch.testing.assert_close(
            values(initializer, ids, dtype="float64", shape=(1,)).flatten(),
            torch.tensor(numbers, dtype=torch.float64),
            rtol=1e-12,
            atol=0,
        )


def kolmogorov_smirnov(sample: torch.Tensor, cdf) -> float:
    """The largest distance between two distribution functions, times sqrt(n); 1.95 is 1 in 1,000."""
    ordered = np.sort(sample.double().flatten().numpy())
    expected = np.array([cdf(x) for x in ordered])
    n = len(ordered)
    steps = np.arange(n + 1) / n
    return math.sqrt(n) * max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())


def truncated_cdf(t: TruncatedNormal):
    normal = NormalDist(t.mean, t.std)
    low, high = normal.cdf(t.a), normal.cdf(t.b)
    return lambda x: (normal.cdf(x) - low) / (high - low)


@pytest.mark.parametrize(
    ("initializer", "cdf"),
    [
        (Normal(0.5, 2.0), NormalDist(0.5, 2.0).cdf),
        (Uniform(-1.0, 3.0), lambda x: (x + 1) / 4),
        (TruncatedNormal(0.1, 0.5, -0.4, 1.0), truncated_cdf(TruncatedNormal(0.1, 0.5, -0.4, 1.0))),
        (TruncatedNormal(0.0, 1.0, 1.0, 2.0), truncated_cdf(TruncatedNormal(0.0, 1.0, 1.0, 2.0))),
        (TruncatedNormal(0.0, 1.0, -9.0, -1.5), truncated_cdf(TruncatedNormal(0.0, 1.0, -9.0, -1.5))),
    ],
    ids=["normal", "uniform", "truncated", "truncated above", "truncated below"],
)
@pytest.mark.parametrize("ids", [IDS[:4000], IDS[:4000] << 40, -IDS[:4000]], ids=["dense", "high bits", "negative"])
def test_values_follow_their_distribution(initializer, cdf, ids):
    assert kolmogorov_smirnov(values(initializer, ids), cdf) < 2.2


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
def test_moments_are_those_of_torch(initializer):
    ours = values(initializer)
    theirs = torch.empty(200_000)
    generator = torch.Generator().manual_seed(0)
    if isinstance(initializer, Normal):
        theirs.normal_(initializer.mean, initializer.std, generator=generator)
    elif isinstance(initializer, Uniform):
        theirs.uniform_(initializer.a, initializer.b, generator=generator)
    else:
        t = initializer
        torch.nn.init.trunc_normal_(theirs, t.mean, t.std, t.a, t.b, generator=generator)
    torch.testing.assert_close(ours.mean(), theirs.mean(), atol=0.02, rtol=0)
    torch.testing.assert_close(ours.std(), theirs.std(), atol=0.02, rtol=0)


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
def test_positions_and_neighbouring_ids_are_not_correlated(initializer):
    whole = values(initializer).double()
    columns = torch.corrcoef(torch.cat([whole[:-1], whole[1:]], 1).T).fill_diagonal_(0)
    assert columns.abs().max() < 4.5 / math.sqrt(len(IDS))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_all_dtypes_get_the_same_values_rounded(dtype):
    exact = values(Normal(), dtype="float64")
    rounded = values(Normal(), dtype=dtype)
    assert rounded.dtype == getattr(torch, dtype)
    torch.testing.assert_close(rounded.double(), exact, rtol=2 * torch.finfo(rounded.dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bounds_hold_after_rounding(dtype):
    for initializer in (Uniform(-0.1, 0.1), TruncatedNormal(0, 1, -0.1, 0.1)):
        bound = torch.tensor(0.1, dtype=getattr(torch, dtype))
        assert values(initializer, dtype=dtype).abs().max() <= bound


def test_the_quantile_is_that_of_the_standard_library_and_a_far_tail_is_reached():
    for p in (1e-300, 1e-20, 1e-9, 0.01, 0.0749, 0.0751, 0.3, 0.5, 0.9249, 0.9251, 1 - 1e-12):
        assert normal_quantile(p) == pytest.approx(NormalDist().inv_cdf(p), rel=2e-7, abs=1e-15)
    far = values(TruncatedNormal(0.0, 1.0, 8.0, 9.0), dtype="float64")
    assert 8 <= far.min() <= far.max() <= 9
    assert far.mean() == pytest.approx(8.1214, abs=0.002)
    assert values(Normal(3.0, 0.0)).unique().tolist() == [3.0], "without spread"


def test_no_ids_and_matrix_rows_have_the_right_shape():
    assert values(Normal(), []).shape == (0, 8)
    assert values(Uniform(), shape=(2, 3)).shape == (20_000, 2, 3)
    assert values(Constant(1), [5], shape=()).tolist() == [1]


@pytest.mark.parametrize("initializer", [None, Normal()])
def test_rows_start_by_the_id_and_the_name_of_the_table(initializer):
    first, again, other = (HashTable(4, name=name, initializer=initializer) for name in ("t", "t", "u"))
    ids = torch.arange(100)
    assert torch.equal(first(ids), again(ids.flip(0)).flip(0))
    assert not torch.isclose(first(ids), other(ids)).any()
    assert first.eval()(torch.tensor([1000])).tolist() == [[0] * 4], "the mean, of an id without a row"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_integer_tables_start_at_constants_only(dtype):
    assert HashTable(2, name="t", dtype=dtype)(torch.tensor([5])).tolist() == [[0, 0]]
    for constant in (-3, 0, torch.iinfo(dtype).max - 1):
        table = HashTable(2, name="t", dtype=dtype, initializer=Constant(constant))
        assert table(torch.tensor([1])).tolist() == table.eval()(torch.tensor([2])).tolist() == [[constant] * 2]
    for initializer in (*RANDOM, torch.nn.init.normal_):
        with pytest.raises(ValueError, match="Constant"):
            HashTable(2, name="t", dtype=dtype, initializer=initializer)


def test_torch_initializers_use_the_random_numbers_of_torch():
    table = HashTable((4, 4), name="t", initializer=torch.nn.init.xavier_uniform_)
    torch.manual_seed(0)
    found = table(torch.arange(10)).detach()
    torch.manual_seed(0)
    assert torch.equal(found, torch.nn.init.xavier_uniform_(torch.empty(10, 4, 4)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *(
            (lambda value=value: as_initializer(Constant(value), torch.int8, (2,)), ValueError, "int8")
            for value in (1.5, 128, -129, math.inf, math.nan)
        ),
        *(
            (lambda some=some: HashTable(2, name="t", initializer=some), TypeError, r"instance|expected")
            for some in (Normal, 0.5, "normal", object())
        ),
        (lambda: Normal(std=-1), ValueError, "expected"),
        (lambda: Normal(mean=math.nan), ValueError, "expected"),
        (lambda: Uniform(1, 1), ValueError, "expected"),
        (lambda: Uniform(2, 1), ValueError, "expected"),
        (lambda: Uniform(0, math.inf), ValueError, "expected"),
        (lambda: TruncatedNormal(std=0), ValueError, "expected"),
        (lambda: TruncatedNormal(a=1, b=1), ValueError, "expected"),
        (lambda: TruncatedNormal(a=100, b=101), ValueError, "expected"),
        (lambda: Normal("0"), TypeError, "expected"),
        (lambda: Uniform(seed=0.5), TypeError, "expected"),
        (lambda: Constant(None), TypeError, "expected"),
    ],
)
def test_what_is_no_initializer_and_parameters_out_of_range_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("initializer", [*RANDOM, Constant(1.5)], ids=str)
def test_initializers_are_values(initializer):
    assert copy.deepcopy(initializer) == pickle.loads(pickle.dumps(initializer)) == initializer
    assert repr(initializer).startswith(type(initializer).__name__)


# Where nobody says


@pytest.mark.parametrize("shape", [(16,), (64,), (8, 8)])
def test_a_table_without_an_initializer_starts_ids_at_random_rows_of_length_about_1(shape):
    rows = HashTable(shape, name="t")(torch.arange(5000))
    assert len(rows.flatten(1).unique(dim=0)) == 5000
    lengths = rows.detach().flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths.square().mean().item(), 1.0, atol=0.02, rtol=0)


def test_a_product_of_two_tables_trains_as_they_are_made():
    users, items = HashTable(8, name="user"), HashTable(8, name="item")
    optim = SparseAdam([users, items], lr=0.05)
    ids = torch.arange(20)
    losses = []
    for _ in range(60):
        optim.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits((users(ids) * items(ids)).sum(1), (ids % 2).float())
        loss.backward()
        optim.step()
        losses.append(loss.item())
    assert losses[0] < 1.5
    assert losses[-1] < 0.1


def half(ids):
    return ids // 2


def test_a_new_row_begins_as_its_fallback_is_now_and_goes_its_own_way():
    table = HashTable(2, name="t", initializer=FromRow(half, otherwise=Constant(9.0)))
    optimizer = SparseAdam([table], lr=0.1)
    table.insert(torch.tensor([5]), torch.tensor([[1.0, 2.0]]))
    table(torch.tensor([5])).sum().backward()
    optimizer.step()
    now = table(torch.tensor([5])).detach()
    assert not torch.equal(now, torch.tensor([[1.0, 2.0]]))
    assert torch.equal(table(torch.tensor([10, 11])).detach(), now.repeat(2, 1))
    assert table.slots["sparse_adam_exp_avg"][1:].tolist() == [[0.0, 0.0], [0.0, 0.0]]  # as of any new row
    optimizer.zero_grad()
    table(torch.tensor([10])).sum().backward()
    optimizer.step()
    assert torch.equal(table(torch.tensor([11])).detach(), now)
    assert torch.equal(table(torch.tensor([5])).detach(), now)
    assert not torch.equal(table(torch.tensor([10])).detach(), now)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_id_whose_fallback_has_no_row_or_is_as_new_begins_otherwise(dtype):
    table = HashTable((2, 3), name="t", dtype=dtype, initializer=FromRow(half, otherwise=Constant(9.0)))
    table.insert(torch.tensor([4]), torch.full((1, 2, 3), 0.5, dtype=dtype))
    read = table(torch.tensor([20, 10, 8, 4])).detach()  # the fallback of 20 is new too
    assert read[:, 0, 0].tolist() == [9.0, 9.0, 0.5, 0.5]
    assert table.eval()(torch.tensor([1000])).unique().tolist() == [9.0]


def test_one_fallback_for_all_and_the_default_where_it_is_not_there():
    table, plain = HashTable(4, name="t", initializer=FromRow(-1)), HashTable(4, name="t")
    assert torch.equal(table(torch.tensor([3])), plain(torch.tensor([3])))
    table.insert(torch.tensor([-1]), torch.ones(1, 4))
    assert table(torch.tensor([7])).tolist() == [[1.0] * 4]
    assert table.eval()(torch.tensor([8])).tolist() == [[0.0] * 4]


def test_ids_that_are_not_admitted_yet_read_their_fallback():
    table = HashTable(2, name="t", initializer=FromRow(-1), admit=MinCount(3))
    table.insert(torch.tensor([-1]), torch.full((1, 2), 7.0))
    assert table(torch.tensor([5])).tolist() == [[7.0, 7.0]]
    assert len(table) == 1


def test_rows_that_began_as_others_are_saved_and_come_back_as_they_are(tmp_path):
    def made():
        table = HashTable(2, name="t", initializer=FromRow(half, otherwise=Constant(9.0)))
        return table, Saver(nn.ModuleDict({"t": table}), output_dir=tmp_path)

    table, saver = made()
    table.insert(torch.tensor([5]), torch.tensor([[1.0, 2.0]]))
    table(torch.tensor([10]))
    table.insert(torch.tensor([5]), torch.tensor([[3.0, 4.0]]))
    saver.save("c", step=1)
    table, saver = made()
    saver.load()
    assert table(torch.tensor([10, 11])).tolist() == [[1.0, 2.0], [3.0, 4.0]]


WRONG_FALLBACKS = {
    "no id": (lambda: FromRow("item"), TypeError, "found fallback='item', expected an id"),
    "another": (lambda: FromRow(1, otherwise=FromRow(2)), TypeError, "another FromRow as otherwise"),
    "integers": (
        lambda: HashTable(2, name="t", dtype=torch.int64, initializer=FromRow(1)),
        ValueError,
        "a table of torch.int64 starts at a constant",
    ),
    "beyond int64": (lambda: FromRow(2**63), ValueError, "found fallback=9223372036854775808, expected an int64"),
    "several ranks": (
        lambda: HashTable(2, name="t", initializer=FromRow(1), slice=gen_slice(0, 2)),
        ValueError,
        "FromRow needs the rows of all ids",
    ),
    "floats": (
        lambda: HashTable(2, name="t", initializer=FromRow(lambda ids: ids / 2))(torch.tensor([1])),
        ValueError,
        r"fallback returned float64 of shape \(1,\), expected an int64 for each of 1 ids",
    ),
    "too few": (
        lambda: HashTable(2, name="t", initializer=FromRow(lambda ids: ids[:1]))(torch.tensor([1, 2])),
        ValueError,
        r"fallback returned int64 of shape \(1,\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_FALLBACKS)
def test_a_fallback_that_cannot_be_is_refused(wrong):
    make, kind, message = WRONG_FALLBACKS[wrong]
    with pytest.raises(kind, match=message):
        make()


def test_a_function_that_returns_a_list_is_not_asked_of_no_ids():
    table = HashTable(2, name="t", initializer=FromRow(lambda ids: [-1 for _ in ids]), admit=MinCount(1))
    table.insert(torch.tensor([-1]), torch.full((1, 2), 7.0))
    assert table(torch.tensor([5, 6])).tolist() == [[7.0, 7.0]] * 2  # all are admitted, and none is refused


def test_a_recomputation_reads_what_the_look_up_has_read():
    table = HashTable(2, name="t", initializer=FromRow(5), admit=MinCount(2))
    read, weight = [], torch.ones(2, requires_grad=True)

    def look_up(ids):
        rows = table(ids)
        read.append(rows.detach())
        return rows * weight  # for whose gradient the rows are read once more

    checkpoint(look_up, torch.tensor([5, 5, 10]), use_reentrant=False).sum().backward()
    assert len(read) == 2
    assert torch.equal(read[0], read[1])
