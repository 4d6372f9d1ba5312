"""Embeddings of torch as live tables: what changes their rows is announced, or noticed, or refused."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from support.devices import here, ids
from support.gate import Gate
from support.live_runs import DIM, N_ROWS, Run, assert_same, read_rows
from support.sweeps import mostly_slow
from torch import nn, optim

from recckpt import Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.save.job import SparseSaver

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path, "Adagrad", deltas=True, max_keep=None)
    run.train(2)
    run.saver.save("base", step=0)
    return run


def holds_all(saved):
    """Say whether a save holds all rows of the users."""
    kind, tables = saved
    return kind == "full" or tables["users"] == (N_ROWS, True)


def save(run, ckpt_id="next"):
    """Save, check that the rows are those of now, and return the entries of the tables."""
    rows, record = run.rows(), run.saver.save(ckpt_id, step=1)
    assert read_rows(run, ckpt_id) == rows
    deltas = {table.name: table.delta for table in record.tables}
    return record.kind, {name: delta and (delta.upserts, delta.replaced) for name, delta in deltas.items()}


def passes(run, *batches, step=None):
    """Look ids up, pass by pass, and step once."""
    for batch in batches:
        run.model.users(ids(*batch)).sum().backward()
    (step or run.step)()


def scaled(run):
    scaler = torch.amp.GradScaler(here().type, init_scale=8.0)
    scaler.scale(run.model.users(ids(7)).sum()).backward()
    scaler.step(run.row_optim)
    scaler.update()


def scheduled(run):
    schedule = optim.lr_scheduler.ExponentialLR(run.row_optim, 0.5)
    passes(run, [7])
    schedule.step()


def with_a_later_group(run):
    run.row_optim.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 1.0})
    passes(run, [7])


def zeroed(run, *, set_to_none):
    for id_ in (7, 8):
        passes(run, [id_], step=run.row_optim.step)
        if id_ == 7:
            run.row_optim.zero_grad(set_to_none)


@mostly_slow()
@pytest.mark.parametrize(
    ("train", "n_rows"),
    [
        *((train, 1) for train in (scaled, scheduled, with_a_later_group)),
        *((partial(zeroed, set_to_none=flag), 2) for flag in (True, False)),
    ],
)
def test_a_step_marks_the_rows_that_have_a_gradient(run, train, n_rows):
    train(run)
    assert save(run) == ("delta", {"users": (n_rows, False), "items": (0, False)})


@pytest.mark.parametrize("batches", [[[3, 5, 3]], [[3], [5]]])
def test_a_gradient_of_one_pass_or_several_is_announced_as_a_whole(run, batches):
    passes(run, *batches)
    assert save(run) == ("delta", {"users": (2, False), "items": (0, False)})


def test_a_gradient_that_was_clipped_is_that_of_its_rows(tmp_path):
    run = Run(tmp_path, "sparse SGD", deltas=True)
    run.saver.save("base")
    run.backward()
    for weight in run.row_optim.param_groups[0]["params"]:
        weight.grad = weight.grad.coalesce() * 0.5
    run.step()
    assert save(run)[0] == "delta"


@pytest.mark.parametrize("form", ["positional", "keyword"])
def test_a_gradient_that_a_closure_makes_is_announced(run, form):
    def closure():
        run.row_optim.zero_grad()
        run.model.users(ids(7)).sum().backward()
        return torch.zeros(())

    handle = run.saver.save_async("open", step=0)
    rows = run.rows()
    run.row_optim.step(closure) if form == "positional" else run.row_optim.step(closure=closure)
    handle.wait()
    assert rows != run.rows()
    assert save(run)[1]["users"] == (1, False)


def test_a_step_of_a_compiled_model_is_announced(tmp_path):
    run = Run(tmp_path, "Adagrad", deltas=True)
    compiled = torch.compile(run.model, backend="eager")
    run.saver.save("base")
    compiled(ids([3, 4])).sum().backward()
    run.step()
    assert save(run) == ("delta", {"users": (1, False), "items": (2, False)})


@pytest.mark.parametrize("call", ["positional", "keyword"])
def test_rows_that_a_forward_shortens_are_announced_also_without_training(tmp_path, call):
    model = nn.Sequential(nn.Embedding(N_ROWS, DIM, max_norm=0.1)).to(here())
    run = Run(tmp_path)
    run.model, run.row_optim = model, optim.SGD(model.parameters(), lr=0.1)
    run.tables = live_tables(model, run.row_optim, min_rows=1)
    run.saver = run.new_saver(tmp_path, deltas=True)
    run.saver.save("base", step=0)
    model.eval()
    before = run.rows()
    handle = run.saver.save_async("open", step=0)
    with torch.no_grad():
        model[0](ids(4, 5)) if call == "positional" else model[0](input=ids(4, 5))
    handle.wait()
    assert read_rows(run, "open") == before != run.rows()
    assert save(run) == ("delta", {"0": (2, False)})


# -- writes that no hook announces --


def fill(run):
    with torch.no_grad():
        run.model.users.weight[3].fill_(0)


def fill_state(run):
    run.row_optim.state[run.model.users.weight]["sum"][3] = 9


@pytest.mark.parametrize("write", [fill, fill_state])
def test_a_write_between_saves_that_nobody_announces_makes_the_next_save_hold_all_rows(run, write):
    write(run)
    assert holds_all(save(run))


@mostly_slow()
@pytest.mark.parametrize("write", [fill, fill_state])
@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_write_beside_a_save_that_nobody_announces_fails_the_save(run, monkeypatch, write, steps_after):
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = run.saver.save_async("torn", step=1)
    write(run)
    run.train(steps_after)
    gate.open()
    with pytest.raises(LiveTableError, match=r"'users': its rows were changed .* saver.settle\(\)"):
        handle.wait()
    assert holds_all(save(run))


def write_data(run):
    run.model.users.weight.data[3] = 7


def write_memory(run):
    run.row_optim.state[run.model.users.weight]["sum"].data[3] = 7


@mostly_slow()
@pytest.mark.parametrize("write", [write_data, write_memory])
def test_a_write_that_torch_does_not_count_is_found_by_the_next_save_of_a_small_table(run, caplog, write):
    write(run)
    run.train()
    assert save(run)[1]["users"] == (N_ROWS, False)
    [warning] = caplog.messages
    assert "table 'users': found 1 rows that changed and were not marked, such as [3]" in warning
    assert "fingerprints  a save found changed rows" in str(run.tables)
    assert holds_all(save(run, "copied"))
    run.train()
    write_data(run)
    save(run, "by prints")
    rows, handle = run.rows(), run.saver.save_async("open", step=1)
    run.model.users.weight.data.mul_(2)
    handle.wait()
    assert read_rows(run, "open") == rows != run.rows(), "it is a copy from then on"
    assert len(caplog.messages) == 1


def test_a_second_optimizer_that_steps_the_same_weights_is_noticed(run, monkeypatch):
    stranger = optim.SGD(run.model.users.parameters(), lr=1.0)
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = run.saver.save_async("torn", step=1)
    run.model.users(ids(3)).sum().backward()
    stranger.step()
    gate.open()
    with pytest.raises(LiveTableError, match="pass the optimizer that makes the change to live_tables"):
        handle.wait()


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_write_after_a_step_that_raises_is_in_the_next_save(run, steps_after):
    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.row_optim.step(closure)
    handle = run.row_optim.register_step_pre_hook(lambda *args: 1 / 0)
    run.backward()
    with pytest.raises(ZeroDivisionError):
        run.step()
    handle.remove()
    if steps_after == 0:
        run.saver.save("between", step=1)
    fill(run)
    run.train(steps_after)
    assert steps_after or holds_all(save(run, "next"))
    save(run, "after")


def test_a_hook_that_comes_after_ours_and_changes_the_gradient_is_followed(run):
    run.row_optim.register_step_pre_hook(lambda *args: add_noise(run))
    run.model.users(ids(3)).sum().backward()
    run.step()
    assert holds_all(save(run))


def add_noise(run):
    weight = run.model.users.weight
    noise = torch.full_like(weight, 0.5)
    weight.grad = weight.grad + (noise.to_sparse(1) if weight.grad.is_sparse else noise)


def test_a_frozen_weight_may_be_written_at_any_time_since_it_is_copied(tmp_path):
    run = Run(tmp_path)
    run.model.users.weight.requires_grad_(False)
    run.tables.close()
    run.tables = live_tables(run.model, [optim.SGD(run.model.items.parameters(), lr=0.1)], min_rows=1)
    run.saver = run.new_saver(tmp_path, deltas=True)
    rows, handle = run.rows(), run.saver.save_async("open")
    run.model.users.weight.fill_(3)
    handle.wait()
    assert read_rows(run, "open") == rows != run.rows()
    kind, written = save(run)
    assert (kind, written["users"][0]) == ("delta", len(run.model.users.weight)), "all of its rows are others"


# -- hooks of other code around ours --


def shrink(run):
    """Write rows that have no gradient, in a way that torch does not count."""
    run.model.users.weight.data[20:30] *= 0.5


def shrink_seen(run):
    with torch.no_grad():
        run.model.users.weight[20:30] *= 0.5


@mostly_slow()
@pytest.mark.parametrize("write", [shrink, shrink_seen])
@pytest.mark.parametrize("order", ["before", "after"])
def test_what_step_hooks_of_other_code_write_is_saved_as_it_is_at_the_moment(
    tmp_path, monkeypatch, caplog, write, order
):
    run = Run(tmp_path, "sparse SGD")
    run.tables.close()
    if order == "before":
        run.row_optim.register_step_post_hook(lambda *args: write(run))
    run.tables = live_tables(run.model, [run.row_optim], min_rows=10)
    if order == "after":
        run.row_optim.register_step_post_hook(lambda *args: write(run))
    assert ("its optimizer has step hooks of other code" in str(run.tables)) == (order == "before")
    assert live_tables(run.model, [run.row_optim], min_rows=10) is run.tables
    run.saver = run.new_saver(tmp_path, deltas=True, max_keep=None)
    run.saver.save("base", step=0)
    for number in range(3):
        run.train()
        gate, rows = Gate(monkeypatch, SparseSaver, "save"), run.rows()
        handle = run.saver.save_async(str(number), step=number)
        run.train()
        gate.open()
        handle.wait()
        assert read_rows(run, str(number)) == rows != run.rows()
        monkeypatch.undo()
    assert not caplog.messages


def test_a_step_hook_that_is_removed_costs_no_marks(run):
    handle = run.row_optim.register_step_post_hook(lambda *args: None)
    run.train()
    assert holds_all(save(run))
    handle.remove()
    run.model.users(ids(3)).sum().backward()
    run.step()
    assert save(run, "after")[1]["users"] == (1, False)


@pytest.mark.parametrize("hook", ["forward before", "forward first", "pre after", "pre after that changes ids"])
def test_what_forward_hooks_of_other_code_do_beside_max_norm_is_saved(tmp_path, hook):
    def write(module, *args):
        with torch.no_grad():
            module.weight[20:30] *= 0.5
        return (ids(7, 8),) if hook.endswith("ids") else None

    model = nn.Sequential(nn.Embedding(N_ROWS, DIM, max_norm=0.1)).to(here())
    if hook == "forward before":
        model[0].register_forward_hook(lambda module, *args: write(module))
    run = Run(tmp_path)
    run.model, run.row_optim = model, optim.SGD(model.parameters(), lr=0.1)
    run.tables = live_tables(model, run.row_optim, min_rows=1)
    if hook == "forward first":
        model[0].register_forward_hook(lambda module, *args: write(module), prepend=True)
    elif hook.startswith("pre"):
        model[0].register_forward_pre_hook(write)
    run.saver = run.new_saver(tmp_path, deltas=True)
    run.saver.save("base", step=0)
    with torch.no_grad():
        model[0](ids(4, 5))
    save(run)


@pytest.mark.parametrize("rule", ["Adagrad", "sparse SGD"])
def test_a_compiled_step_is_announced(tmp_path, monkeypatch, rule):
    run = Run(tmp_path, rule, deltas=True)
    step = torch.compile(run.row_optim.step, backend="eager")

    def train():
        run.model.users(ids(3)).sum().backward()
        step()
        run.row_optim.zero_grad()

    train()
    run.saver.save("base", step=0)
    gate, rows = Gate(monkeypatch, SparseSaver, "save"), run.rows()
    handle = run.saver.save_async("open", step=0)
    train()
    gate.open()
    handle.wait()
    assert read_rows(run, "open") == rows != run.rows()
    assert save(run) == ("delta", {"users": (1, False), "items": (0, False)})


def test_a_weight_in_shared_memory_is_saved_by_fingerprints_of_a_copy(tmp_path, caplog):
    run = Run(tmp_path)
    run.tables.close()
    run.model.cpu().share_memory()
    run.row_optim = optim.SGD([run.model.users.weight, run.model.items.weight], lr=0.1)
    run.tables = live_tables(run.model, [run.row_optim], min_rows=10)
    assert "table 'users': it lies in shared memory, so writes of other processes are not detected" in caplog.text
    assert "fingerprints  it lies in shared memory" in str(run.tables)
    run.saver = run.new_saver(tmp_path, deltas=True)
    run.saver.save("base", step=0)
    rows, handle = run.rows(), run.saver.save_async("open", step=0)
    run.model.users.weight.data[3] = 7  # as another process
    handle.wait()
    assert read_rows(run, "open") == rows != run.rows()
    assert save(run) == ("delta", {"users": (1, False), "items": (0, False)})


def test_rows_that_a_loaded_sum_of_nan_changes_without_a_gradient_are_saved(run):
    run.row_optim.state[run.model.users.weight]["sum"][7] = float("nan")
    run.saver.save("odd", step=0)
    run.saver.load(ckpt_id="odd")
    run.saver.save("base again", step=0)
    run.train()
    assert run.model.users.weight[7].isnan().all()
    assert holds_all(save(run))


# -- what puts other tensors, or other values, in the place of a table --


def load_model(run):
    run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})


def load_model_by_assigning(run):
    run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()}, assign=True)
    weights = [run.model.users.weight, run.model.items.weight]
    run.row_optim.param_groups[0]["params"] = weights
    run.row_optim.state = dict(zip(weights, run.row_optim.state.values(), strict=True))


def load_optimizer(run):
    run.row_optim.load_state_dict(copy.deepcopy(run.row_optim.state_dict()))


def to_another_dtype(run):
    run.model.to(torch.float64).to(torch.float32)


def other_data(run):
    run.model.users.weight.data = torch.ones(N_ROWS, DIM, device=here())


REPLACING = [load_model, load_model_by_assigning, load_optimizer, to_another_dtype, other_data]


@mostly_slow()
@pytest.mark.parametrize("replace", REPLACING)
def test_after_other_tensors_took_the_place_of_a_table_the_next_save_is_full_and_right(run, replace):
    replace(run)
    assert holds_all(save(run))
    run.train()
    save(run, "after")
    state = run.state()
    run.train()
    run.saver.load(ckpt_id="after")
    assert_same(run.state()["model"], state["model"])


@mostly_slow()
@pytest.mark.parametrize("replace", REPLACING)
def test_a_save_goes_on_with_the_rows_of_its_moment_while_other_tensors_take_their_place(run, replace):
    rows, handle = run.rows(), run.saver.save_async("open", step=1)
    replace(run)
    handle.wait()
    assert read_rows(run, "open") == rows


@pytest.mark.parametrize("how", ["load", "max_norm"])
def test_what_other_modules_write_to_a_tied_weight_is_announced(tmp_path, how):
    run = Run(tmp_path)
    run.model = nn.ModuleDict({"one": nn.Embedding(N_ROWS, DIM), "other": nn.Embedding(N_ROWS, DIM, max_norm=0.1)})
    run.model.to(here())
    run.model["other"].weight = run.model["one"].weight
    run.row_optim = optim.SGD(run.model.parameters(), lr=0.1)
    run.tables = live_tables(run.model, run.row_optim, min_rows=1)
    run.saver = run.new_saver(tmp_path, deltas=True, max_keep=None)
    run.saver.save("base", step=0)
    for moment in range(3):
        rows, handle = run.rows(), run.saver.save_async(f"open {moment}", step=0)
        if how == "load":
            run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})
        else:
            run.model["other"](ids(moment))
        handle.wait()
        assert read_rows(run, f"open {moment}") == rows != run.rows()
    assert save(run) == (("full", {"one": None}) if how == "load" else ("delta", {"one": (1, False)}))


@pytest.mark.parametrize(
    ("n_rows", "what", "text"),
    [
        (N_ROWS, "weight", "its module now has a weight that Adagrad does not train"),
        (
            N_ROWS + 1,
            "module",
            "the model's weights were replaced after live_tables was called",
        ),  # a resized vocabulary
    ],
)
def test_what_takes_the_place_of_a_weight_and_is_not_trained_is_refused_by_name(run, n_rows, what, text):
    other = nn.Embedding(n_rows, DIM).to(here())
    if what == "weight":
        run.model.users.weight = other.weight
    else:
        run.model.users = other
    with pytest.raises(LiveTableError, match=f"'users': {text}"):
        run.saver.save("next")


def test_a_new_weight_that_the_optimizer_trains_is_saved_with_new_states(run):
    run.model.users.weight = run.row_optim.param_groups[0]["params"][0] = nn.Parameter(
        torch.zeros(N_ROWS, DIM, device=here())
    )
    run.row_optim.state.clear()
    run.saver.save("next")
    assert read_rows(run, "next")["users"][0].keys() == {"embedding", "sparse_adagrad_sum"}


# -- copies --


def test_a_deep_copy_of_the_model_trains_without_a_word_to_the_tables_of_the_first(run):
    twin = copy.deepcopy(run.model)
    assert all(one is not run.row_optim for one in vars(twin).values())
    optimizer = optim.SGD(twin.parameters(), lr=1.0)
    twin(ids([1, 2])).sum().backward()
    optimizer.step()
    assert save(run) == ("delta", {"users": (0, False), "items": (0, False)})
    assert torch.equal(live_tables(twin, optimizer, min_rows=1)["users"].embeddings(), twin.users.weight)


def test_a_pickled_model_has_hooks_that_do_nothing(run):
    data = io.BytesIO()
    torch.save(run.model, data)
    assert len(data.getvalue()) < 12_000  # the optimizer would come along
    data.seek(0)
    twin = torch.load(data, weights_only=False)
    twin.load_state_dict(run.model.state_dict())
    assert_same(twin.state_dict(), run.model.state_dict())
    pickle.dumps(run.row_optim)
    assert save(run)[0] == "delta"


def test_a_step_that_is_captured_in_a_graph_refuses_all_saves_and_waits_for_no_device(tmp_path, monkeypatch):
    model = nn.ModuleDict({"users": nn.Embedding(1000, DIM)})
    optimizer = optim.SGD(model.parameters())
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer))
    model["users"](torch.tensor([3])).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.Tensor, "nonzero", lambda tensor: pytest.fail("waited for the device"))
        optimizer.step()
    with pytest.raises(LiveTableError, match=r"table 'users': .* captured in a CUDA graph"):
        saver.save("c0")
