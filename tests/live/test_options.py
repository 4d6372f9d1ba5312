"""What live_tables is given, and what is said of what it cannot take."""

import pytest
from support.live_runs import Clicks
from torch import optim

from recckpt.errors import LiveTableError
from recckpt.live import live_tables


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "model"}, TypeError, "model must be a torch.nn.Module"),
        ({"optimizers": ["adam"]}, TypeError, "optimizers must be optimizers of torch, found a str"),
        ({"optimizers": optim.Adam}, TypeError, "optimizers must be optimizers of torch, found the class Adam"),
        ({"optimizers": None}, TypeError, "optimizers must be optimizers of torch, found a NoneType"),
        ({"min_rows": 0}, ValueError, "min_rows"),
        ({"names": ["users"]}, TypeError, "names must be a dict, path of a module -> name of its table, found"),
        ({"names": {"users": ""}}, ValueError, "a table name is a non-empty string"),
        ({"names": {"users.weight": "u"}}, LiveTableError, "'users.weight' is not .*; did you mean 'users'?"),
        ({"exclude": "users"}, TypeError, "exclude must be a list of paths"),
        ({"marks": None}, TypeError, "marks must be 'auto' or 'fingerprints', or a dict, .*, found None"),
        ({"marks": "hooks"}, ValueError, "marks: found 'hooks', expected 'auto' or 'fingerprints'"),
        ({"marks": {"usrs": "auto"}}, ValueError, "marks: 'usrs' is not a live table; did you mean 'users'?"),
        ({"audit": True}, ValueError, "audit must be an int of at least 0, found True"),
        ({"adapters": object()}, TypeError, "adapters must be a list of tables, found a object"),
        (
            {"adapters": [object()]},
            TypeError,
            "adapters must be tables as recckpt.types.LiveTable or .*, found a object",
        ),
    ],
)
def test_arguments_are_checked(arguments, error, text):
    model = Clicks()
    arguments = {"model": model, "optimizers": optim.SGD(model.parameters()), "min_rows": 1, **arguments}
    with pytest.raises(error, match=text):
        live_tables(**arguments)


@pytest.mark.parametrize("made", [lambda one: one, lambda one: {one}, lambda one: (each for each in [one])])
def test_optimizers_may_be_one_or_several(made):
    model = Clicks()
    assert set(live_tables(model, made(optim.SGD(model.parameters())), min_rows=1)) == {"users", "items"}
