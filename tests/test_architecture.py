"""The house holds: who may import whom, who may know which library, and how long things may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import version

import pytest
from support import paths

ROOT = paths.ROOT / "recckpt"

# A room imports only from rooms on lines below its own; within a room there are no cycles.
ROOMS = """
    recckpt  __main__
    integrations
    cli  manager
    inspect  convert  saver
    load  save  checkpointer
    compaction  forgetting
    checkpoint
    sparse  dense
    output_dir
    storage  policies
    format  parallel
    errors  types  text  telemetry
"""
LIBRARIES = {  # library -> the rooms and files that may know it
    "fsspec": {"storage"},
    "torch.distributed": {
        "parallel",
        "dense.sharded",
        "dense.loader",
        "sparse.sharded.all_to_all",
        "convert.targets.dcp",
    },
    "tqdm": {"text"},
    "rich": {"cli"},
    "opentelemetry": {"telemetry"},
    "numba": {"sparse.table"},
    "llvmlite": {"sparse.table"},
    "matplotlib": {"inspect.report.plots"},
    "pyarrow": {"sparse.files", "inspect", "convert", "cli.rows"},
}
TORCH_FREE = {
    *(
        "cli",
        "inspect",
        "convert",
        "compaction",
        "forget",
        "checkpoint",
        "output_dir",
        "storage",
        "policies",
        "format",
        "parallel",
    ),
    *("format", "parallel", "errors", "types", "text", "telemetry"),
}


def name_of(path):
    """Return ``sparse.table.column`` of its file, and the name of the package of its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "recckpt"


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
LEVEL = {name: -line for line, names in enumerate(ROOMS.strip().splitlines()) for name in names.split()}


def room(name: str) -> str:
    return name.partition(".")[0]


@cache
def imports_of(name: str) -> set[str]:
    return set(imports(TREES[name]))


@cache
def names_used_in(name: str) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full names that a file imports, wherever it does so, but for the eyes of the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def inner_imports(name: str) -> set[str]:
    """Return the files of recckpt that a file imports."""
    inner = (full.partition(".")[2] for full in imports_of(name) if room(full) == "recckpt")
    return {part if part in FILES else part.rpartition(".")[0] or "recckpt" for part in inner}


def test_files_import_only_from_their_own_room_and_lower_ones():
    def is_lower(name, imported):
        return room(imported) == room(name) or LEVEL[room(imported)] < LEVEL[room(name)]

    assert not [(name, x) for name in FILES for x in inner_imports(name) if not is_lower(name, x)]


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter({name: inner_imports(name) - {name} for name in FILES}).prepare()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_known_to_those_only_who_need_it(library):
    def knows(name):
        return any(f"{found}.".startswith(f"{library}.") for found in imports_of(name) | names_used_in(name))

    allowed = tuple(f"{place}." for place in LIBRARIES[library])
    assert not [name for name in FILES if knows(name) and not f"{name}.".startswith(allowed)]


def n_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has beside its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - said


def test_files_and_functions_stay_short():
    assert not [name for name, path in FILES.items() if len(path.read_text().splitlines()) > 300]
    nodes = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
    functions = [(name, node) for name, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert not [(name, node.name) for name, node in functions if n_lines(node) > 50]


def test_files_and_classes_are_named_after_what_they_do():
    says_nothing = {"utils", "util", "helpers", "helper", "common", "misc", "base_impl"}
    assert not [name for name in FILES if says_nothing & set(name.split("."))]
    classes = [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.startswith("Base") or name.endswith("Impl")]


def loaded_after(code: str) -> set[str]:
    """Return the modules of a fresh interpreter after it has run some code."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_reading_and_the_command_line_need_neither_torch_nor_numba():
    modules = loaded_after("\n".join(f"import recckpt.{name}" for name in FILES if room(name) in TORCH_FREE))
    assert not {"torch", "numba"} & modules
    assert {"recckpt.inspect.reader", "recckpt.cli.app", "pyarrow"} <= modules


def test_importing_recckpt_imports_next_to_nothing():
    assert not {"torch", "numba", "numpy", "pyarrow", "fsspec", "opentelemetry"} & loaded_after("import recckpt")


def test_every_public_name_is_there():
    import recckpt
    import recckpt.sparse

    assert recckpt.__version__ == version("recckpt")
    for package in (recckpt, recckpt.sparse):
        assert all(getattr(package, name) is not None for name in package.__all__)
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = package.Nothing


def test_no_class_name_stands_twice():
    homes = {}
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_the_index_of_helpers_lists_each_of_them():
    index = ast.get_docstring(ast.parse((paths.SUPPORT / "__init__.py").read_text()))
    listed = [line.partition(":")[0] for line in index.splitlines()[1:] if line and not line.startswith(" ")]
    assert listed == sorted(path.stem for path in paths.SUPPORT.glob("*.py") if path.stem != "__init__")


def test_no_room_has_the_name_of_a_public_function():
    """The import of such a room would put the module in the place of the function."""
    import recckpt

    assert {name for name in recckpt.__all__ if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()} == set()
