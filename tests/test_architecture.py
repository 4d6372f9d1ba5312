"""The house holds: who may import whom, who may know which library, and how long things may get."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest
from support import parsed, paths
from support.parsed import ROOT, nodes_of, tree_of

# A room imports only from rooms on lines below its own; within a room there are no cycles.
ROOMS = """
    testing
    recckpt  __main__  recis
    integrations  positions
    cli  manager  averages
    inspect  convert  saver
    near  adapters
    load  save  rewrite  checkpointer
    checkpoint
    live
    sparse  dense
    output_dir
    storage  policies
    format  parallel
    errors  types  text  telemetry
"""
# Its __init__ gives out what is put together above: it stands where that of recckpt does.
FACES = {"live"}
# What a run can do without. Guests know the trunk, which knows none of them: they come in by seams.
GUESTS = {
    *("adapters", "averages", "checkpointer", "cli", "convert", "inspect", "integrations", "near", "positions"),
    "rewrite",
}
PUT_TOGETHER = {"recckpt", "__main__", "saver", "manager.attach"}  # where a run is: these hand guests to the seams
LIBRARIES = {  # library -> the rooms and files that may know it
    "fsspec": {"storage"},
    "msgspec": {"format"},
    "torch.distributed": {
        "parallel",
        "dense.sharded",
        "dense.loader",
        "sparse.sharded.all_to_all",
        "convert.dcp",
    },
    "pytest": {"testing"},
    "tqdm": {"text"},
    "IPython": {"text.drawn_bar"},
    "rich": {"cli"},
    "opentelemetry": {"telemetry"},
    "numba": {"sparse.table"},
    "llvmlite": {"sparse.table"},
    "matplotlib": {"inspect.report_page"},
    "pyarrow": {"sparse.files", "inspect", "convert", "cli.rows", "positions"},
}
# Parts of names on disk; and which files may contain such, beside format/layout.py, and why.
PART_OF_A_NAME = re.compile(
    r"\.jsonl?\b|\.arrow|\.bin\b|\.pt\b|(?<!delta)\.deletes|\.tmp\b|\.list\b|\.done\b|\.probe|^/?(sparse|dense|owner|pins|forget)/"
    r"|^INTENT$|^(io_state|extra|rng|ckpt|checkpoint)_(\W|$)|-of-|^\.recckpt\b"
)
KNOW_NAMES = {
    "cli.convert": "the file that consolidation writes by default",
    "convert.arrow": "endings of files of Arrow",
    "convert.dynamicemb": "files of dynamicemb",
    "convert.recis": "files of RecIS",
    "convert.safetensors": "shards as Hugging Face names them",
    "convert.target_files": "files of exports",
    "convert.torch_state": "endings of files of torch.save",
    "format.near_seal": "files in the near dir of a host, which is no output dir",
    "inspect.consolidate": "endings that a torch file does not have",
    "integrations.transformers": "files of the Trainer",
    "output_dir.index_file": "files of RecIS, by which its output dirs are told from ours",
}
TORCH_FREE = {
    *(
        "cli",
        "inspect",
        "convert",
        "rewrite",
        "near",
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


FILES = {name_of(path): path for path in parsed.FILES}
# Tuples, made once: to make a union anew for each of 500,000 nodes, and to look into it, takes longer than all else.
FUNCTION, IMPORT = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Import, ast.ImportFrom)
STORE, TARGET = (ast.Store, ast.Del), (ast.NamedExpr, ast.AnnAssign)
LEVEL = {name: -line for line, names in enumerate(ROOMS.strip().splitlines()) for name in names.split()}


def room(name: str) -> str:
    return name.partition(".")[0]


def level(name: str) -> int:
    return LEVEL["recckpt" if name in FACES else room(name)]


@cache
def imports_of(name: str) -> set[str]:
    return set(imports(tree_of(FILES[name])))


@cache
def names_used_in(name: str) -> set[str]:
    """Return the attributes of names, such as ``torch.distributed.ReduceOp``."""
    attributes = (node for node in nodes_of(FILES[name]) if isinstance(node, ast.Attribute))
    return set(filter(None, map(dotted, attributes)))


def dotted(node: ast.AST) -> str | None:
    """Return what ``ast.unparse`` gives of an attribute of a name, thirty times as fast; None of any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full names that a file imports, wherever it does so, but for the eyes of the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # has no statements
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def all_inner_imports(name: str) -> Iterator[str]:
    """Yield the files of recckpt that a file imports, those for the type checker too."""
    for node in nodes_of(FILES[name]):
        if isinstance(node, IMPORT):
            yield from map(file_of, (full for full in imports(ast.Module([node], [])) if room(full) == "recckpt"))


def file_of(full_name: str) -> str:
    """Return the file of recckpt that defines what is imported by this name."""
    part = full_name.partition(".")[2]
    return part if part in FILES else part.rpartition(".")[0] or "recckpt"


def inner_imports(name: str) -> set[str]:
    """Return the files of recckpt that a file imports."""
    return {file_of(full) for full in imports_of(name) if room(full) == "recckpt"}


def test_files_import_only_from_their_own_room_and_lower_ones():
    def is_lower(name, imported):
        return room(imported) == room(name) or level(imported) < level(name)

    assert not [(name, x) for name in FILES for x in inner_imports(name) if not is_lower(name, x)]


def test_the_trunk_imports_no_guest():
    """Not for the type checker either, nor inside a function, nor by a name in a string."""
    trunk = [name for name in FILES if room(name) not in GUESTS and name not in PUT_TOGETHER]
    assert not [(name, x) for name in trunk for x in all_inner_imports(name) if room(x) in GUESTS]
    texts = (
        (name, text)
        for name in trunk
        if "import_module" in FILES[name].read_text()
        for text in texts_of(nodes_of(FILES[name]))
    )
    assert not [(name, text) for name, text in texts if room(text.removeprefix("recckpt.")) in GUESTS]


def test_a_run_imports_no_guest_that_it_has_not_asked_for():
    loaded = loaded_after("import recckpt.manager.manager, recckpt.load.serving")
    assert not [name for name in loaded if name.startswith("recckpt.") and name.split(".")[1] in GUESTS]


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter({name: inner_imports(name) - {name} for name in FILES}).prepare()


def test_no_files_know_each_other_in_a_circle():
    """What a file imports for the type checker alone, or inside a function, it knows too."""
    known = {name: set(all_inner_imports(name)) - {name} for name in FILES}
    TopologicalSorter(known).prepare()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_known_to_those_only_who_need_it(library):
    def knows(name):
        return any(f"{found}.".startswith(f"{library}.") for found in imports_of(name) | names_used_in(name))

    allowed = tuple(f"{place}." for place in LIBRARIES[library])
    assert not [name for name in FILES if knows(name) and not f"{name}.".startswith(allowed)]


def n_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many lines a function has beside its docstring."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
    return function.end_lineno - function.lineno + 1 - said


def texts_of(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the strings of a file, but for docstrings and prose."""
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from (text.value for text in texts if id(text) not in statements and not re.search(r"\s", text.value))


def test_names_on_disk_are_made_and_parsed_in_one_place():
    homes = ("format.layout.", *(f"{name}." for name in KNOW_NAMES))
    strays = {name: [*filter(PART_OF_A_NAME.search, texts_of(nodes_of(path)))] for name, path in FILES.items()}
    assert not {name: texts for name, texts in strays.items() if texts and not f"{name}.".startswith(homes)}
    assert all(any(f"{name}.".startswith(f"{home}.") for name in strays if strays[name]) for home in KNOW_NAMES)


def test_files_and_functions_stay_short():
    assert not [name for name, path in FILES.items() if len(path.read_text().splitlines()) > 500]  # an idea, whole
    functions = [(name, node) for name, path in FILES.items() for node in nodes_of(path) if isinstance(node, FUNCTION)]
    assert not [(name, node.name) for name, node in functions if n_lines(node) > 50]


def test_files_and_classes_are_named_after_what_they_do():
    says_nothing = {"utils", "util", "helpers", "helper", "common", "misc", "base_impl"}
    assert not [name for name in FILES if says_nothing & set(name.split("."))]
    classes = [node.name for path in FILES.values() for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.startswith("Base") or name.endswith("Impl")]


def loaded_after(code: str) -> set[str]:
    """Return the modules of a fresh interpreter after it has run some code."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=paths.ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_reading_and_the_command_line_need_neither_torch_nor_numba():
    make_near_saves = {x for x in FILES if room(x) == "near" and any(room(y) == "save" for y in inner_imports(x))}
    free = [name for name in FILES if room(name) in TORCH_FREE and name not in make_near_saves]
    modules = loaded_after("\n".join(f"import recckpt.{name}" for name in free))
    assert not {"torch", "numba"} & modules
    assert {"recckpt.inspect.reader", "recckpt.cli.app", "pyarrow"} <= modules


def test_importing_recckpt_imports_next_to_nothing():
    assert not {"torch", "numba", "numpy", "pyarrow", "fsspec", "opentelemetry"} & loaded_after("import recckpt")


def test_every_public_name_is_there():
    import recckpt
    import recckpt.sparse

    assert recckpt.__version__ == version("recckpt")
    assert len(recckpt.__all__) == 14
    for package in (recckpt, recckpt.sparse, recckpt.inspect, recckpt.policies, recckpt.rewrite, recckpt.recis):
        assert all(getattr(package, name) is not None for name in package.__all__)
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = package.Nothing


def test_no_class_name_stands_twice():
    homes = {}
    for name, path in FILES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_each_helper_of_tests_says_what_it_is_for():
    assert not [path.stem for path in paths.SUPPORT.glob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_room_has_the_name_of_a_public_function():
    """The import of such a room would put the module in the place of the function."""
    import recckpt

    for package in (recckpt, recckpt.inspect, recckpt.policies, recckpt.rewrite):
        folder = Path(package.__file__).parent
        assert [name for name in package.__all__ if (folder / name).exists() or (folder / f"{name}.py").exists()] == []


# Attributes that a function sets on an object that it has neither made nor is a method of: (file, what it sets).
SET_ON_OTHERS = {
    # Objects of torch, torchdata, TorchRec, Lightning, transformers and accelerate, which have no other way.
    ("adapters.torchrec_collision", "module._current_history_buffer_offset"),
    ("adapters.torchrec_collision", "module._current_iter"),
    ("adapters.torchrec_collision", "module._evicted"),
    ("dense.data_loaders", "base.generator"),
    ("dense.data_loaders", "self._base._get_iterator"),
    ("dense.data_loaders", "root.next"),
    ("dense.data_loaders", "root.reset"),
    ("dense.data_loaders", "self._loader.iteration"),
    ("dense.data_loaders", "self._loader.restart_on_stop_iteration"),
    ("integrations.lightning", "stepped._optimizer"),
    ("integrations.lightning", "trainer.callbacks"),
    ("integrations.lightning", "callback._restarting"),
    ("integrations.lightning", "count.completed"),
    ("integrations.lightning", "epoch.restarting"),
    ("integrations.lightning", "fit._restarting"),
    ("integrations.transformers", "args.max_grad_norm"),
    ("load.hyper_parameters", "outer._last_lr"),
    ("sparse.sharded.lookup", "ctx.trip"),
    ("sparse.table.gradients", "ctx.give"),
    ("sparse.table.gradients", "ctx.ids"),
    ("sparse.table.gradients", "ctx.present"),
    # Objects of Python, ctypes, fsspec and tqdm, likewise.
    ("manager.signals", "self._give_back.atexit"),
    ("storage.local_files", "_LIBC.mmap.restype"),
    ("storage.local_files", "_LIBC.mmap.argtypes"),
    ("storage.local_files", "_LIBC.munmap.argtypes"),
    ("storage.objects", "self._fs.retries"),
    ("storage.upload", "file.closed"),
    ("storage.upload", "self._file.closed"),
    ("storage.upload", "self._file.offset"),
    ("storage.upload", "self._file.forced"),
    ("text.bars", "self._bar.disable"),
    # An error on its way up says more of where it happened.
    ("load.problems", "error.args"),
    ("storage.local_files", "error.strerror"),
    ("storage.local_files", "error.filename"),
    ("storage.transfers", "error.strerror"),
    ("storage.transfers", "error.filename"),
    # Properties of tables and tensors that users set too.
    ("manager.autosave", "table.step"),
    ("manager.autosave", "table.event_time"),
    ("sparse.optim.optimizer", "self.table.grad"),
    ("sparse.optim.optimizer", "self.table.requires_grad"),
}


@cache
def made_in(function: ast.AST) -> set[str]:
    """Return the variables that a function gives what a call returns, such as a constructor."""
    made = set()
    for node in ast.walk(function):
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, node.context_expr)]
        elif isinstance(node, TARGET):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            sides = [target.elts for target in node.targets if isinstance(target, ast.Tuple)]
            pairs = [pair for side in sides for pair in zip(side, node.value.elts, strict=False)]
        else:
            pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
        made |= {at.id for at, value in pairs if isinstance(at, ast.Name) and isinstance(value, ast.Call)}
    return made


def set_on_others(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes, but for names with ``__``, that are set on objects that were not made right there."""
    nodes: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]  # each with the functions that it is in
    while nodes:
        node, functions = nodes.pop()
        if isinstance(node, FUNCTION):
            functions = (*functions, node)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, STORE)
        if is_set and not node.attr.startswith("__") and not is_made(node.value, functions):
            yield ast.unparse(node)
        nodes.extend((child, functions) for child in ast.iter_child_nodes(node))


def is_made(value: ast.AST, functions: tuple[ast.AST, ...]) -> bool:
    """Whether it is what a call returns, the object of a method, or a variable that one of the functions has made."""
    if not isinstance(value, ast.Name):
        return isinstance(value, ast.Call)
    return value.id in ("self", "cls") or any(value.id in made_in(function) for function in functions)


def test_nobody_sets_state_on_an_object_that_somebody_else_has_made():
    setters = {(name, attribute) for name, path in FILES.items() for attribute in set_on_others(tree_of(path))}
    assert setters == SET_ON_OTHERS


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a):\n    a.b = 1", ["a.b"]),
        ("def f(a):\n    a.b, c = 1, 2", ["a.b"]),
        ("def f(self):\n    self.a.b += 1", ["self.a.b"]),
        ("def f(a):\n    for a.b in c: pass", ["a.b"]),
        ("def f(a):\n    del a.b", ["a.b"]),
        ("def f(a):\n    def g():\n        a.b = 1", ["a.b"]),
        ("def f(self):\n    self.a = 1", []),
        ("def f(a):\n    b = Made(a)\n    b.c = 1", []),
        ("def f(a):\n    with Made() as b:\n        b.c = 1", []),
        ("def f(a):\n    a.__name__ = 'b'", []),
        ("def f(a):\n    a[b.c] = a.b", []),
    ],
)
def test_what_sets_state_on_others_is_seen(code, expected):
    assert [*set_on_others(ast.parse(code))] == expected
