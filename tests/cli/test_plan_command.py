"""recckpt plan: what a model bank would load, told without the model and without torch."""

import json
import subprocess
import sys

import pytest
import torch
from support.bank_runs import run, table
from torch import nn

from recckpt import Saver


def with_optimizer(saver):
    saver.register_for_checkpointing("dense_optim", torch.optim.Adam(saver.model.top.parameters()))
    return saver


@pytest.fixture
def names(tmp_path):
    """A file of the names of a model."""
    saver = with_optimizer(run(tmp_path / "own", table("t"), table("new"), optimizer="adam", top=nn.Linear(2, 1)))
    path = tmp_path / "names.txt"
    path.write_text("\n".join(saver.names()))
    return path


@pytest.fixture
def source(tmp_path):
    saver = with_optimizer(run(tmp_path / "a", table("u", range(1000)), optimizer="adam", steps=1, top=nn.Linear(2, 1)))
    saver.save("c")
    return str(tmp_path / "a")


def bank_file(tmp_path, bank):
    path = tmp_path / "bank.json"
    path.write_text(bank if isinstance(bank, str) else json.dumps(bank))
    return path


def test_a_bank_is_planned_as_the_saver_would(recckpt, tmp_path, names, source):
    bank = [{"path": source, "oname": {"t": "u"}}]
    saver = with_optimizer(run(tmp_path / "own", table("t"), table("new"), optimizer="adam", top=nn.Linear(2, 1)))
    expected = saver.plan(bank)
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, bank))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == str(expected) + "\n"
    assert answer.lines[0][:2] == ["[0]", f"{source}/c:"]
    assert ["t@embedding", "[0]", "u@embedding", "1,000", "16.0", "kB"] in answer.lines
    assert ["top.weight@dense_optim", "[0]"] in answer.lines
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, bank), "--json")
    assert answer.json == expected.to_dict()


def test_a_tied_parameter_is_planned_as_the_saver_would(recckpt, tmp_path):
    layer = nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    untied, tied = (nn.ModuleDict(names) for names in ({"b": layer}, {"a": layer, "b": layer}))
    savers = {}
    for name, model in (("untied", untied), ("tied", tied)):
        savers[name] = Saver(model, None, str(tmp_path / name))
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        savers[name].register_for_checkpointing("adam", optimizer)
    savers["untied"].save("c")
    bank = [{"path": str(tmp_path / "untied"), "strict": False}]
    names = tmp_path / "names.txt"
    names.write_text("\n".join(savers["tied"].names()))
    expected = savers["tied"].plan(bank)
    assert "b.weight@adam" in str(expected)
    assert recckpt("plan", "--model-names", names, bank_file(tmp_path, bank)).out == str(expected) + "\n"


def test_one_entry_is_a_bank_too(recckpt, tmp_path, names, source):
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, {"path": source, "load": ["dense"]}))
    assert answer.code == 0


def test_all_problems_are_listed_on_stderr(recckpt, tmp_path, names, source):
    bank = [
        {"path": source, "load": ["nothing"], "exlude": []},
        {"path": f"{tmp_path}/nowhere"},
        {"path": source, "load": ["dense"], "oname": {"top.bias": "gone"}},
        {},
    ]
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, bank))
    assert (answer.code, answer.out) == (1, "")
    lines = answer.err.splitlines()
    for text in ("'nothing' is neither", "unknown key 'exlude'", "nowhere", "no 'gone'", "bank[3]: no 'path'"):
        assert len([line for line in lines if text in line and line.startswith("recckpt: ")]) >= 1
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, bank), "--json")
    assert answer.code == 1
    assert len(answer.json["problems"]) == len(lines)


def test_a_table_without_its_slots_among_the_names_is_not_taken_for_itself(recckpt, tmp_path, source):
    (tmp_path / "names.txt").write_text("u")
    bank = bank_file(tmp_path, {"path": source, "load": ["u"]})
    answer = recckpt("plan", "--model-names", tmp_path / "names.txt", bank)
    assert answer.code == 1
    assert "has no 'u'" in answer.err
    assert "did you mean 'u'" not in answer.err


@pytest.mark.parametrize("bank", ["{", "[1, 2]", '"x"', "null"])
def test_what_is_no_bank_is_a_problem(recckpt, tmp_path, names, bank):
    answer = recckpt("plan", "--model-names", names, bank_file(tmp_path, bank))
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("recckpt: ")


@pytest.mark.parametrize(
    ("names", "text"), [(b"", "no names"), (b"\xff", "UTF-8"), (b"a\tdens", "unknown group 'dens'")]
)
def test_what_is_no_list_of_names_is_a_problem(recckpt, tmp_path, names, text):
    path = tmp_path / "names.txt"
    path.write_bytes(names)
    answer = recckpt("plan", "--model-names", path, bank_file(tmp_path, []))
    assert answer.code == 1
    assert text in answer.err


def test_a_file_that_is_not_there_is_a_problem_and_missing_arguments_are_wrong_usage(recckpt, tmp_path, names):
    assert recckpt("plan", "--model-names", names, tmp_path / "nothing.json").code == 1
    assert recckpt("plan", tmp_path / "bank.json").code == 2
    assert recckpt("plan", "--model-names", names).code == 2


def test_neither_torch_nor_numba_is_imported(tmp_path, names, source):
    bank = bank_file(tmp_path, [{"path": source, "oname": {"t": "u"}}])
    code = (
        "import sys; from recckpt.cli import main\n"
        "code = main(['plan', '--model-names', sys.argv[1], sys.argv[2]])\n"
        "print(code, sorted({'torch', 'numba', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, names, bank], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
