import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn
from torch.optim import lr_scheduler

import recckpt
from recckpt.errors import StateMismatchError
from recckpt.sparse.optim import (
    SparseAdagrad,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseOptimizer,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from recckpt.sparse.sharded.table import ShardedHashTable
from recckpt.sparse.table.initializers import Constant
from recckpt.sparse.table.table import HashTable

ALL = [SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam, SparseAdamW, SparseAdamWTF]
VOCABULARY, DIM = 60, 5
SAME_RULE = [
    (SparseSGD, torch.optim.SGD, {"lr": 0.1}),
    (SparseAdagrad, torch.optim.Adagrad, {"lr": 0.1}),
    (
        SparseAdagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2},
    ),
    (SparseAdagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "maximize": True}),
    (SparseAdam, torch.optim.SparseAdam, {"lr": 0.01}),
    (SparseAdam, torch.optim.SparseAdam, {"lr": 0.05, "betas": (0.5, 0.7), "eps": 1e-3}),
]


def table_of(name: str = "t", dtype: torch.dtype = torch.float32, seed: int = 0) -> HashTable:
    """A table with a random row for each id of the vocabulary."""
    table = HashTable(DIM, name=name, dtype=dtype)
    values = torch.randn(VOCABULARY, DIM, generator=torch.Generator().manual_seed(seed))
    table.insert(torch.arange(VOCABULARY), values.to(dtype))
    return table


def twin_of(table: HashTable, sparse: bool = True) -> nn.Embedding:
    embedding = nn.Embedding(VOCABULARY, DIM, sparse=sparse, dtype=table.dtype)
    embedding.weight.data.copy_(table.embeddings())
    return embedding


def batches(n: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield (
            torch.randint(0, VOCABULARY, (7, 3), generator=generator),
            torch.randn(7, 3, DIM, generator=generator),
        )


def backward(lookup, ids, weights) -> None:
    torch.sigmoid(lookup(ids) * weights).sum().backward()


def train(table: HashTable, optimizer: torch.optim.Optimizer, n_steps: int = 5, seed: int = 0) -> None:
    for ids, weights in batches(n_steps, seed):
        backward(table, ids, weights.to(table.dtype))
        optimizer.step()
        optimizer.zero_grad()


def bits(table: HashTable) -> list[torch.Tensor]:
    return [table.ids(), table.embeddings(), *(table.slots[name] for name in sorted(table.slots))]


def same(a: HashTable, b: HashTable) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


# The rules


@mostly_slow()
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize(("ours", "theirs", "options"), SAME_RULE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rule_is_that_of_torch_on_sparse_gradients(ours, theirs, options, dtype):
    table = table_of(dtype=dtype)
    embedding = twin_of(table)
    optimizer, reference = ours([table], **options), theirs(embedding.parameters(), **options)
    for ids, weights in batches(30):
        for lookup in (table, embedding):
            backward(lookup, ids, weights.to(dtype))
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    torch.testing.assert_close(table.embeddings(), embedding.weight.detach(), rtol=1e-6, atol=1e-6)


ADAGRAD = {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SparseAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 1e-2}),
        (SparseAdamW, torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.3, "betas": (0.6, 0.9)}),
        (SparseAdagrad, torch.optim.Adagrad, {**ADAGRAD, "maximize": False}),
        (SparseAdagrad, torch.optim.Adagrad, {**ADAGRAD, "maximize": True}),
    ],
)
def test_a_rule_with_a_decay_is_that_of_torch_where_every_row_has_a_gradient(ours, theirs, options):
    table = table_of()
    embedding = twin_of(table, sparse=False)
    optimizer, reference = ours([table], **options), theirs(embedding.parameters(), **options)
    weights = torch.randn(20, VOCABULARY, DIM, generator=torch.Generator().manual_seed(1))
    for step in range(20):
        for lookup, either in ((table, optimizer), (embedding, reference)):
            backward(lookup, torch.arange(VOCABULARY), weights[step])
            either.step()
            either.zero_grad()
    torch.testing.assert_close(table.embeddings(), embedding.weight.detach(), rtol=1e-6, atol=1e-6)
    assert SparseAdamW([table_of()]).defaults["weight_decay"] == 1e-2


def test_adamw_decays_touched_rows_only():
    table = table_of()
    before = table.embeddings()
    optimizer = SparseAdamW([table], lr=0.1, weight_decay=0.5)
    (table(torch.tensor([3])) * 0).sum().backward()
    optimizer.step()
    after = table.embeddings()
    torch.testing.assert_close(after[3], before[3] * 0.95)
    after[3] = before[3]
    assert torch.equal(after, before)


def test_adamw_of_tensorflow_decays_without_the_learning_rate_and_is_adam_else():
    """By the loop of RecIS's block_apply_adamw, written out for one value."""
    table = table_of()
    optimizer = SparseAdamWTF([table], lr=0.1, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.25)
    value, exp_avg, exp_avg_sq = table.lookup(torch.tensor([3]))[0][0, 0].item(), 0.0, 0.0
    for step in range(1, 6):
        table(torch.tensor([3])).sum().mul(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        alpha = -0.1 / (1 - 0.8**step) * math.sqrt(1 - 0.9**step)
        exp_avg = exp_avg * 0.8 + 0.2 * step
        exp_avg_sq = exp_avg_sq * 0.9 + 0.1 * step * step
        value = value * 0.75 + alpha * exp_avg / (math.sqrt(exp_avg_sq) + 1e-2)
        assert table.lookup(torch.tensor([3]))[0][0, 0].item() == pytest.approx(value, rel=1e-5)
    before, after = table_of().embeddings(), table.embeddings()
    after[3] = before[3]
    assert torch.equal(after, before), "rows without a gradient do not decay"


def test_row_wise_adagrad_is_the_rule_of_fbgemm():
    table = HashTable((2, 2), name="t", initializer=Constant(0))
    optimizer = SparseRowWiseAdagrad([table], lr=0.5, eps=1e-3, initial_accumulator_value=0.1)
    grads = torch.tensor([[1.0, 2], [3, 4]])
    weights, total = torch.zeros(2, 2), 0.1
    for _ in range(3):
        (table(torch.tensor([9, 9])) * grads / 2).sum().backward()
        optimizer.step()
        total += (1 + 4 + 9 + 16) / 4
        weights = weights - 0.5 * grads / (math.sqrt(total) + 1e-3)
    torch.testing.assert_close(table.embeddings()[0], weights)
    assert table.slots["sparse_rowwise_adagrad_sum"].tolist() == [pytest.approx(total)]


@pytest.mark.parametrize("maximize", [False, True])
def test_row_wise_adagrad_decays_its_weights_and_its_learning_rate(maximize):
    table = HashTable(2, name="t", initializer=Constant(1))
    optimizer = SparseRowWiseAdagrad([table], lr=0.5, lr_decay=0.25, weight_decay=0.3, maximize=maximize)
    weights, total = np.ones(2), 0.0
    for step in range(1, 4):
        (table(torch.tensor([9])) * torch.tensor([1.0, -2])).sum().backward()
        optimizer.step()
        grads = (-1 if maximize else 1) * np.array([1.0, -2]) + 0.3 * weights
        total += (grads**2).mean()
        weights = weights - 0.5 / (1 + (step - 1) * 0.25) * grads / (math.sqrt(total) + 1e-8)
    np.testing.assert_allclose(table.embeddings()[0].numpy(), weights, rtol=1e-6)


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tables_compute_in_float32_and_round_once(rule, dtype):
    table, exact = table_of(dtype=dtype), table_of()
    exact.insert(torch.arange(VOCABULARY), table.embeddings().float())
    for each in (table, exact):
        optimizer = rule([each], lr=0.125)
        (each(torch.arange(VOCABULARY)) * torch.ones(DIM, dtype=each.dtype)).sum().backward()
        optimizer.step()
    assert torch.equal(table.embeddings(), exact.embeddings().to(dtype))
    for name in optimizer.slot_names:
        assert table.slots[name].dtype == torch.float32
        assert torch.equal(table.slots[name], exact.slots[name])


@pytest.mark.parametrize("rule", ALL)
def test_only_rows_with_a_gradient_change(rule):
    table = table_of()
    optimizer = rule([table], lr=0.1)
    before = bits(table)
    ids = torch.tensor([4, 17, 4])
    table(ids).sum().backward()
    optimizer.step()
    for old, new in zip(before[1:], bits(table)[1:], strict=True):
        changed = (old != new).view(VOCABULARY, -1).any(1).nonzero().flatten()
        assert changed.tolist() == [4, 17]


@pytest.mark.parametrize("rule", ALL)
def test_the_order_of_the_rows_is_of_no_consequence(rule):
    first, second = table_of(), HashTable(DIM, name="t")
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))
    second.insert(order, first.embeddings()[order])
    for table in (first, second):
        train(table, rule([table], lr=0.1), 10)
    assert torch.equal(first.embeddings()[order], second.embeddings())
    for name in rule.slot_names:
        assert torch.equal(first.slots[name][order], second.slots[name])


# Slots


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (SparseSGD, []),
        (SparseAdagrad, ["sparse_adagrad_sum"]),
        (SparseRowWiseAdagrad, ["sparse_rowwise_adagrad_sum"]),
        (SparseAdam, ["sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"]),
        (SparseAdamW, ["sparse_adamw_exp_avg", "sparse_adamw_exp_avg_sq"]),
        (SparseAdamWTF, ["sparse_adamw_tf_exp_avg", "sparse_adamw_tf_exp_avg_sq"]),
    ],
)
def test_slot_names_tell_which_slots_belong_to_the_optimizer(rule, names):
    table = table_of()
    table.add_slot("of_the_user", ())
    optimizer = rule([table])
    assert list(optimizer.slot_names) == names
    assert list(table.slots) == ["of_the_user", *names]
    if rule is SparseAdagrad:
        SparseAdagrad([table], initial_accumulator_value=0.25)
        table(torch.tensor([1000]))
        sums = table.slots["sparse_adagrad_sum"]
        assert (sums[0].tolist(), sums[-1].tolist()) == ([0] * DIM, [0.25] * DIM), "of old rows and of new ones"


def test_moments_follow_their_rows_when_others_are_erased():
    table, reference = table_of(), table_of()
    optimizers = [SparseAdam([each], lr=0.1) for each in (table, reference)]
    for each, optimizer in zip((table, reference), optimizers, strict=True):
        train(each, optimizer)
    table.erase(torch.arange(0, VOCABULARY, 2))
    ids = torch.arange(1, VOCABULARY, 2)
    for each, optimizer in zip((table, reference), optimizers, strict=True):
        each(ids).sum().backward()
        optimizer.step()
    assert torch.equal(table.lookup(ids)[0], reference.lookup(ids)[0])
    optimizers[0].zero_grad()
    table(ids[:2]).sum().backward()
    table.erase(ids[:2])
    before = bits(table)
    optimizers[0].step()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(table), strict=True)), "erased before the step"
    assert optimizers[0].state_dict()["state"] == {"t": {"step": 7}}


@pytest.mark.parametrize("kind", [HashTable, ShardedHashTable])
@pytest.mark.parametrize("is_left_in_eval_mode", [True, False])
def test_a_step_in_eval_mode_says_once_that_ids_without_rows_get_none(caplog, kind, is_left_in_eval_mode):
    table = kind(2, name="t", padding_id=-1)
    optimizer = SparseSGD([table], lr=0.1)
    table(torch.arange(60))
    table.eval()
    table(torch.arange(500)).sum().backward()  # a validation with gradients, which no step uses
    optimizer.zero_grad()
    table.train(not is_left_in_eval_mode)
    for _ in range(2):
        table(torch.arange(-1, 310)).sum().backward()
        optimizer.step()
    lines = [record.getMessage() for record in caplog.records]
    assert len(table) == (60 if is_left_in_eval_mode else 310)
    assert [line.partition(" have no row")[0] for line in lines] == (
        ["table 't': 250 of the 310 ids with gradients in this step"] if is_left_in_eval_mode else []
    )


# As a torch optimizer


@pytest.mark.parametrize("rule", ALL)
def test_it_is_a_torch_optimizer(rule):
    table = table_of()
    optimizer = rule({"t": table}, lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.tables == {"t": table}
    assert rule.__name__ in repr(optimizer)
    assert "lr: 0.5" in repr(optimizer)


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("zero_first", [False, True])
def test_steps_accumulate_as_if_the_loop_had_counted(rule, zero_first):
    table, reference = table_of(), table_of()
    optimizer, plain = rule([table], lr=0.1), rule([reference], lr=0.1)
    optimizer.set_grad_accum_steps(3)
    for number, (ids, weights) in enumerate(batches(6), 1):
        if zero_first:
            optimizer.zero_grad()
        backward(table, ids, weights)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        backward(reference, ids, weights)
        if number % 3 == 0:
            plain.step()
            plain.zero_grad()
        assert same(table, reference)
    assert optimizer.state_dict()["state"] == {"t": {"step": 2}}
    twin = copy.deepcopy(optimizer)
    twin.step()
    assert twin.state_dict()["state"] == {"t": {"step": 2}}, "a copy goes on accumulating"


def test_a_load_begins_to_count_anew_as_the_gradients_so_far_are_gone():
    table, optimizer = accumulating()
    saved = optimizer.state_dict()
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    for expected in (0, -2):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert table.embeddings().tolist() == [[expected]]
    for steps in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match="set_grad_accum_steps: steps must be an int of at least 1"):
            optimizer.set_grad_accum_steps(steps)


def test_a_step_that_was_interrupted_while_it_updated_is_one_to_repeat(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    table, optimizer = accumulating()
    for _ in range(2):
        table(torch.tensor([1])).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "_update", interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
    optimizer.zero_grad()
    assert table.embeddings().tolist() == [[0]]
    optimizer.step()
    assert table.embeddings().tolist() == [[-2]]


def accumulating():
    """Return a table of zeros and its optimizer, which updates with each second step."""
    table = HashTable(1, name="t", initializer=Constant(0.0))
    optimizer = SparseSGD([table], lr=1.0)
    optimizer.set_grad_accum_steps(2)
    return table, optimizer


def test_closures_and_hooks_are_called_and_a_step_without_gradients_does_nothing():
    table, calls = table_of(), []
    optimizer = SparseAdamW([table], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    before = bits(table)
    table(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    assert optimizer.step() is None
    assert calls == ["before", "after"]
    assert all(torch.equal(a, b) for a, b in zip(before, bits(table), strict=True))
    assert optimizer.state_dict()["state"] == {}

    def closure():
        optimizer.zero_grad()
        loss = table(torch.tensor([1])).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)


def test_each_table_counts_its_own_steps():
    tables = [table_of("a"), table_of("b")]
    optimizer = SparseAdam(tables)
    for step in range(4):
        tables[0](torch.tensor([1])).sum().backward()
        if step % 2:
            tables[1](torch.tensor([1])).sum().backward()
        optimizer.step()
    assert optimizer.state_dict()["state"] == {"a": {"step": 4}, "b": {"step": 2}}


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: np.float64(0.9) ** step),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20, cycle_momentum=True),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]),
    ],
)
def test_schedulers_of_torch_set_the_learning_rate(schedule):
    table = table_of()
    embedding = twin_of(table)
    pairs = [
        (table, SparseAdam([table], lr=0.1)),
        (embedding, torch.optim.SparseAdam(embedding.parameters(), lr=0.1)),
    ]
    schedulers = [schedule(optimizer) for _, optimizer in pairs]
    for ids, weights in batches(8):
        for (lookup, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            backward(lookup, ids, weights)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    rates = [optimizer.param_groups[0]["lr"] for _, optimizer in pairs]
    assert rates[0] == rates[1] != 0.1
    torch.testing.assert_close(table.embeddings(), embedding.weight.detach(), rtol=1e-6, atol=1e-6)


def test_a_learning_rate_may_be_a_tensor_or_set_on_a_plateau():
    table, reference = table_of(), table_of()
    optimizer, plain = SparseSGD([table], lr=torch.tensor(0.5)), SparseSGD([reference], lr=0.5)
    train(table, optimizer)
    train(reference, plain)
    assert same(table, reference)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    train(table, optimizer)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    scheduler = lr_scheduler.ReduceLROnPlateau(plain, patience=0, factor=0.5)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert plain.param_groups[0]["lr"] == 0.125


def test_groups_have_hyper_parameters_of_their_own():
    slow, fast, late = table_of("slow"), table_of("fast"), table_of("late")
    optimizer = SparseSGD([{"tables": [slow]}, {"tables": {"fast": fast}, "lr": 1.0}], lr=0.1)
    optimizer.add_param_group({"tables": late, "lr": 0.5})
    before = slow.embeddings()
    for table in (slow, fast, late):
        table(torch.tensor([3])).sum().backward()
    optimizer.step()
    changes = [(before - table.embeddings())[3, 0].item() for table in (slow, fast, late)]
    assert changes == pytest.approx([0.1, 1.0, 0.5])
    assert list(optimizer.tables) == ["slow", "fast", "late"]


# Bad input


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, {"lr": lr}) for rule in ALL for lr in (-1.0, math.nan, math.inf, "0.1", None)),
        *((SparseAdam, {"betas": betas}) for betas in ((1.0, 0.9), (0.9, -0.1), (0.9,), 0.9)),
        (SparseAdam, {"eps": -1}),
        (SparseAdamW, {"weight_decay": -0.1}),
        (SparseAdamWTF, {"weight_decay": 1.5}),
        *((SparseAdagrad, {name: -0.1}) for name in ("lr_decay", "weight_decay", "initial_accumulator_value")),
        (SparseAdagrad, {"maximize": 1}),
        (SparseRowWiseAdagrad, {"eps": math.nan}),
        (SparseRowWiseAdagrad, {"weight_decay": -0.1}),
    ],
)
def test_hyper_parameters_out_of_range_are_refused_and_the_table_is_left_alone(rule, options):
    table = table_of()
    with pytest.raises(ValueError, match=f"found {next(iter(options))}|maximize must be True or False, found 1"):
        rule([table], **options)
    assert list(table.slots) == []
    with pytest.raises(ValueError, match="int64"):
        rule([HashTable(2, name="t", dtype=torch.int64)])


def test_a_table_is_named_once_and_what_is_no_table_is_refused():
    for tables in ([nn.Linear(2, 2)], [torch.zeros(2)], [{"params": []}], "tables", None, [], {}):
        with pytest.raises(ValueError if tables in ([], {}) else TypeError, match=r"found|none"):
            SparseSGD(tables)
    one = table_of("a")
    with pytest.raises(ValueError, match="'a' is listed twice: list it once"):
        SparseSGD([one, one])
    with pytest.raises(ValueError, match="'a' shares its name with another table: rename one"):
        SparseSGD([one, table_of("a")])
    optimizer = SparseSGD([one])
    with pytest.raises(ValueError, match="'a' is listed twice"):
        optimizer.add_param_group({"tables": [table_of("b"), one]})
    assert list(optimizer.tables) == ["a"]


# State


def make_pair(rule, order: int = 1, **options) -> tuple[list[HashTable], SparseOptimizer]:
    tables = [table_of("a"), table_of("b")][::order]
    return tables, rule(tables, **options)


@pytest.mark.parametrize("rule", ALL)
def test_a_state_dict_is_small_plain_and_loads_with_weights_only(rule, tmp_path):
    tables, optimizer = make_pair(rule, lr=torch.tensor(0.1))
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)
    for table in tables:
        train(table, optimizer)
    scheduler.step()
    state = optimizer.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert state["state"] == {"a": {"step": 5}, "b": {"step": 5}}
    assert type(state["param_groups"][0]["lr"]) is float
    assert (tmp_path / "state.pt").stat().st_size < 5000


@pytest.mark.parametrize("rule", ALL)
def test_slots_of_steps_that_nobody_counted_are_warned_of_where_the_rule_uses_the_step(rule, caplog):
    table = table_of()
    first = rule([table])
    train(table, first)
    second = rule([table])
    second.load_state_dict(first.state_dict())
    train(table, second)
    assert not caplog.text
    train(table, rule([table]))
    is_said = "counts the steps of this table from 1" in caplog.text
    assert is_said == (rule in {SparseAdam, SparseAdamW, SparseAdamWTF})
    if rule is SparseAdagrad:
        train(table, rule([table], lr_decay=0.1))
        assert "counts the steps of this table from 1" in caplog.text


@mostly_slow()
@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("order", [1, -1])
def test_training_resumes_bit_for_bit(rule, order):
    tables, optimizer = make_pair(rule, lr=0.1)
    for table in tables:
        train(table, optimizer)
    kept, state = copy.deepcopy(tables), copy.deepcopy(optimizer.state_dict())
    for table in tables:
        train(table, optimizer, seed=1)

    others, resumed = make_pair(rule, order, lr=0.7)
    for other in others:
        other.load_state_dict({other.name: next(table for table in kept if table.name == other.name)})
    resumed.load_state_dict(state)
    for other in others[::order]:
        train(other, resumed, seed=1)
    assert all(same(a, b) for a, b in zip(tables, others[::order], strict=True))
    assert resumed.state_dict()["state"] == optimizer.state_dict()["state"]


def test_groups_are_matched_by_their_tables():
    def make(order: int) -> SparseOptimizer:
        groups = [{"tables": [table_of("a")], "lr": 0.1}, {"tables": [table_of("b"), table_of("c")], "lr": 0.2}]
        return SparseSGD(groups[::order])

    optimizer, other = make(1), make(-1)
    optimizer.param_groups[0]["lr"] = 0.5
    other.load_state_dict(optimizer.state_dict())
    assert {tuple(group["tables"]): group["lr"] for group in other.param_groups} == {
        ("a",): 0.5,
        ("b", "c"): 0.2,
    }
    train(other.tables["a"], other)
    assert other.state_dict()["state"] == {"a": {"step": 5}}


def test_what_a_scheduler_keeps_in_the_groups_survives():
    _, optimizer = make_pair(SparseSGD, lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    _, other = make_pair(SparseSGD)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["initial_lr"] == 0.1
    _, plain = make_pair(SparseSGD)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_new_rows_begin_with_the_value_that_was_loaded():
    old = SparseAdagrad([table_of("a")], initial_accumulator_value=0.5)
    table = table_of("a")
    optimizer = SparseAdagrad([table])
    optimizer.load_state_dict(old.state_dict())
    table(torch.tensor([1_000_000]))
    assert table.slots["sparse_adagrad_sum"][-1].tolist() == [0.5] * DIM


def test_all_missing_and_unexpected_tables_and_another_rule_are_named_and_nothing_changes():
    optimizer = SparseAdam([table_of(name) for name in "abc"])
    other = SparseAdam([table_of(name) for name in "bxy"], lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateMismatchError) as caught:
        optimizer.load_state_dict(other.state_dict())
    assert caught.value.missing == ["a", "c"]
    assert caught.value.unexpected == ["x", "y"]
    with pytest.raises(StateMismatchError, match="slots"):
        optimizer.load_state_dict(SparseAdamW([table_of(name) for name in "abc"]).state_dict())
    with pytest.raises(StateMismatchError, match="sparse optimizer"):
        optimizer.load_state_dict(torch.optim.Adam(nn.Embedding(2, 2).parameters()).state_dict())
    assert optimizer.state_dict() == before


def damaged(state: dict, /, **changes) -> dict:
    return {**copy.deepcopy(state), **changes}


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: None,
        lambda s: {},
        lambda s: damaged(s, slots=[]),
        lambda s: damaged(s, slots=None),
        lambda s: damaged(s, param_groups=None),
        lambda s: damaged(s, state={"a": {"step": -1}}),
        lambda s: damaged(s, state={"a": {"step": 1.5}}),
        lambda s: damaged(s, state={"a": {}}),
        lambda s: damaged(s, state={"x": {"step": 1}}),
        lambda s: damaged(s, param_groups=[]),
        lambda s: damaged(s, param_groups=[{"tables": ["a", "b"]}]),
        lambda s: damaged(s, param_groups=[{**s["param_groups"][0], "lr": -1.0}]),
        lambda s: damaged(s, param_groups=[{**s["param_groups"][0], "betas": (0.9,)}]),
        lambda s: damaged(s, param_groups=[{**s["param_groups"][0], "tables": [n]} for n in "ab"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage):
    tables, optimizer = make_pair(SparseAdam)
    train(tables[0], optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"does not fit|found"):
        optimizer.load_state_dict(damage(before))
    assert optimizer.state_dict() == before


def test_a_deep_copy_with_its_model_trains_apart():
    table = table_of()
    optimizer = SparseAdam([table], lr=0.1)
    train(table, optimizer)
    state = optimizer.state_dict()
    for _ in ("a warm start, say", "and then the restore"):
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["state"] == state["state"]
    twin, twin_optimizer = copy.deepcopy((table, optimizer))
    assert twin_optimizer.tables == {"t": twin}
    train(twin, twin_optimizer, seed=1)
    assert not same(table, twin)
    train(table, optimizer, seed=1)
    assert same(table, twin)
    assert twin_optimizer.state_dict() == optimizer.state_dict()
    alone = copy.deepcopy(optimizer)
    train(alone.tables["t"], alone)
    train(table, optimizer)
    assert same(alone.tables["t"], table), "one that is copied alone trains the copy of its table"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ALL)
def test_the_rules_are_the_same_on_cuda(rule):
    table, twin = table_of(), table_of().cuda()
    for each in (table, twin):
        optimizer = rule([each], lr=0.1)
        for ids, weights in batches(10):
            backward(each, ids.to(each.device), weights.to(each.device))
            optimizer.step()
    torch.testing.assert_close(table.embeddings(), twin.embeddings().cpu(), rtol=1e-5, atol=1e-5)


def test_of_two_optimizers_of_one_table_the_older_is_refused_and_takes_no_gradients():
    table = table_of()
    older, newer = SparseAdam([table], lr=0.1), SparseSGD([table], lr=0.1)
    table(torch.tensor([1])).sum().backward()
    before = table.embeddings()
    with pytest.raises(ValueError, match=r"SparseAdam: another sparse optimizer was made later for \['t'\]"):
        older.step()
    assert torch.equal(table.embeddings(), before)
    newer.step()
    assert not torch.equal(table.embeddings(), before)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda model: model.parameters(), "a Parameter"),
        (lambda model: model.named_parameters(), "a tuple"),
        (lambda model: model, "a Model"),
        (lambda model: [model], "a Model"),
        (lambda model: nn.ModuleDict({"t": model.table}), "a str"),
        (lambda model: [{"params": model.parameters()}], r"\['params'\]"),
        (lambda model: model.table.parameters(), "a Parameter"),
    ],
)
def test_what_is_no_table_is_refused_with_the_way_to_the_tables_of_a_model(make, found):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.top = table_of(), nn.Linear(DIM, 1)

    model, remedy = Model(), r"recckpt\.recis\.filter_out_sparse_param\(model\)"
    with pytest.raises((TypeError, ValueError), match=f"found {found}: {remedy}"):
        SparseAdamW(make(model))
    assert SparseAdamW(recckpt.recis.filter_out_sparse_param(model)).tables == {"t": model.table}
