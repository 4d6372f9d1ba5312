"""The budgets of the house: how many pieces there may be. A change that adds to one takes from another, or says why.

Each limit is the goal once that is reached; until then it is what there is, and goes down with each change that takes
away. ``python -m pytest -s tests/test_budgets.py`` prints the table.
"""

import ast
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from support import parsed, paths

import recckpt
from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, Normal, SparseAdamW

SLACK = 1.01
PACKAGE = str(parsed.ROOT)
# Positions, changes, checkpoints of other programs and FromRow took 6 files, 900 lines and 60 functions of the product.
# To read those of other programs as they are, and tensors that say where their shards lie, took 1 file, 500 lines and
# 32 functions; a plain save, load, restore and step enter none of them. Metrics in reports and in SQL, metadata of a
# run, runs that ended, dense tensors in narrow dtypes, and which recckpt reads a file: 240 lines and 25 functions. The
# golden files took 800 lines of tests, what others wrote 1,000. Shards of Hugging Face, saves on exceptions, ids that
# were evicted and keys of registered objects, 580 lines, 34 functions, and 1,350 lines of tests.
HOUSE = {  # figure -> limit, goal
    "lines": (62_936, 56_000),
    "code lines": (44_800, 40_500),
    "files": (302, 290),
    "classes": (723, 550),
    "dataclasses": (269, 230),
    "functions": (4_708, 3_850),
    "functions that are one return": (859, 650),
    "lines of tests": (95_760, 70_000),
    "test functions": (3_810, 3_200),
    "names on top": (14, 14),
    "arguments of Saver": (12, 12),
    "arguments of CheckpointManager": (10, 10),
}
ENTERED = {  # way -> named functions and files: limit, goal
    "a training step": ((94, 80), (18, 18)),
    "a save": ((519, 430), (73, 60)),
    "a load": ((639, 520), (78, 70)),
    "a restore": ((692, 580), (87, 80)),
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def body_of(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of a function, without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def n_code_lines(path: Any) -> int:
    """Return how many lines are neither empty, nor a comment, nor of a docstring."""
    quiet: set[int] = set()
    for node in parsed.nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTION) and ast.get_docstring(node, clean=False) is not None:
            quiet |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(parsed.text_of(path).splitlines(), 1)
    return sum(1 for n, line in lines if n not in quiet and line.strip() and not line.strip().startswith("#"))


def measured_house() -> Iterator[tuple[str, int]]:
    """Yield each figure of HOUSE."""
    nodes = [node for path in parsed.FILES for node in parsed.nodes_of(path)]
    functions = [node for node in nodes if isinstance(node, FUNCTION)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    tests = [path.read_text() for path in (paths.ROOT / "tests").rglob("*.py")]
    yield "lines", sum(len(parsed.text_of(path).splitlines()) for path in parsed.FILES)
    yield "code lines", sum(map(n_code_lines, parsed.FILES))
    yield "files", len(parsed.FILES)
    yield "classes", len(classes)
    yield "dataclasses", sum(any("dataclass" in ast.dump(made) for made in node.decorator_list) for node in classes)
    yield "functions", len(functions)
    returns = [body for body in map(body_of, functions) if len(body) == 1 and isinstance(body[0], ast.Return)]
    yield "functions that are one return", len(returns)
    yield "lines of tests", sum(len(text.splitlines()) for text in tests)
    yield "test functions", sum(line.lstrip().startswith("def test_") for text in tests for line in text.splitlines())
    yield "names on top", len(recckpt.__all__)
    yield "arguments of Saver", len(inspect.signature(Saver).parameters)
    yield "arguments of CheckpointManager", len(inspect.signature(CheckpointManager).parameters)


def entered_by(work: Callable[[], object]) -> tuple[int, int]:
    """Return how many named functions of recckpt some work enters, on all threads, and in how many files."""
    entered: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            entered.add((code.co_filename, code.co_name, code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(entered), len({file for file, _, _ in entered})


def over(figures: Iterator[tuple[str, int, int, int]]) -> list[str]:
    """Print a table of figures, and return those that are over their limit."""
    found = list(figures)
    for name, value, limit, goal in found:
        print(f"{name:42} {value:>7,}  limit {limit:>7,}  goal {goal:>7,}")
    return [
        f"{name}: found {value}, expected at most {limit}" for name, value, limit, _ in found if value > limit * SLACK
    ]


def test_the_house_has_no_more_pieces_than_its_budget():
    assert not over((name, value, *HOUSE[name]) for name, value in measured_house())


def test_the_plain_ways_enter_no_more_functions_and_files_than_their_budgets(tmp_path):
    table, dense = HashTable(8, name="item", initializer=Normal()), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(table, dense)
    sparse, adam = SparseAdamW([table]), torch.optim.Adam(dense.parameters())
    saver = Saver(model, sparse, str(tmp_path), 9, 1)
    saver.register_for_checkpointing("adam", adam)

    def step() -> None:
        sparse.zero_grad()
        adam.zero_grad()
        model(torch.randint(100, (64,))).sum().backward()
        sparse.step()
        adam.step()

    step()
    saver.save("first")  # what is done once in a run
    ways = {
        "a training step": step,
        "a save": lambda: saver.save("second", step=3),
        "a load": saver.load,
        "a restore": CheckpointManager(saver, 1).restore,
    }
    entered = {way: entered_by(work) for way, work in ways.items()}
    assert not over((f"functions of {way}", entered[way][0], *ENTERED[way][0]) for way in ways)
    assert not over((f"files of {way}", entered[way][1], *ENTERED[way][1]) for way in ways)
