"""The layers hold: who may import whom, who may know which library, and how long things may get."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "recckpt"

# A file imports only from lines below its own. `recckpt`, `sparse` and `dense` are the doors of their packages, for
# users: nobody inside goes through them.
LINES = """
    recckpt  __main__  sparse  dense  checkpointer
    cli
    cli.app
    cli.ls  cli.show  cli.rows  cli.verify  cli.salvage  cli.repair  cli.plan  cli.consolidate
    cli.outcome
    checkpointer.builder
    checkpointer.checkpointer
    checkpointer.process  checkpointer.reader
    checkpointer.child  checkpointer.stager  checkpointer.template
    checkpointer.worker  checkpointer.values
    checkpointer.writer  checkpointer.tree
    checkpointer.pack
    checkpointer.archive  checkpointer.barrier  checkpointer.save_future
    checkpointer.arena  checkpointer.device_copy  checkpointer.failures  checkpointer.hook  checkpointer.rank
    manager
    autosave  restorer
    run  schedule
    saver
    model_state  save_runner  sparse.collection
    save  load  sparse.optim  sparse.sharded
    shard_writer  sparse.round_trip
    other_state  warm_start
    sparse_optim_state
    target  stage  repair  sparse.saver  sparse.loader  sparse.optim.adagrad  sparse.optim.adam  sparse.optim.sgd
    consolidate
    reader  verify  salvage  sources  commit  sparse.filler  sparse.source  sparse.optim.optimizer
    dense.chunk_saver  dense.sharded_loader
    dense.sharded_state
    dense.sharded  dense.tensors  dense.torch_writer
    sparse.table  sparse.part_writer  sparse.remains  inventory  checkup  plan_report  fence
    dense.stored_shards  dense.chunk_verifier  scalars
    load_plan  rotation  pins  visibility  dense.torch_file  dense.loader  sparse.module  sparse.shards  sparse.verifier
    ownership  listing  problems  checked  dense.saver  sparse.codec  sparse.store  sparse.partition  sparse.autograd
    sparse.snapshot  timeline  epochs  intent  index_file  room  keep  when  storage.outbox  storage.options
    sparse.pre_images  sparse.routing  sparse.agreement  storage.work_dir
    storage  load_conf  dense.torch_zip  sparse.catalog  sparse.column  sparse.index  sparse.initializers
    dense.chunks
    manifest  io_state  renames  storage.local  storage.objects  storage.held  dense.stored_tensor  sparse.random
    storage.sftp
    storage.remote  storage.sftp_files
    storage.upload  storage.ranged  storage.spool
    sparse.exchange
    layout  strict_json  sealed  group  names  split  sparse.kernels  sparse.checks  sparse.plan  sparse.row_filter
    progress  background  text  storage.base  dense.portable  dense.buffers  dense.named_optimizer  dense.torch_pickle
    sparse.buckets  storage.transfers
    roll_call  removal  sparse.messages  sparse.optim.groups  storage.mapping  storage.retry
    types  errors  arguments  signals  storage.faults  storage.slots
"""

LIBRARIES = {
    "fsspec": {"storage.objects", "storage.remote", "storage.upload"},
    "torch.distributed": {"dense.sharded", "group", "sparse.exchange"},
    "tqdm": {"progress"},
    "numba": {"sparse.index", "sparse.kernels", "sparse.random"},
    "llvmlite": {"sparse.kernels"},
    "pyarrow": {"sparse.codec", "sparse.part_writer", "sparse.saver", "sparse.loader", "sparse.filler"}
    | {"sparse.verifier", "sparse.remains", "reader", "salvage", "cli.rows"},
}

TORCH_FREE = [
    *("types", "errors", "layout", "strict_json", "manifest", "storage", "storage.local", "storage.objects", "listing"),
    *("storage.faults", "storage.ranged", "storage.remote", "storage.retry", "storage.sftp", "storage.sftp_files"),
    *("storage.upload", "storage.outbox", "storage.slots", "storage.spool", "storage.transfers", "storage.work_dir"),
    *("visibility", "storage.options"),
    *("checked", "background", "progress", "reader", "verify", "salvage", "__main__", "commit", "rotation", "text"),
    *("sealed", "epochs", "intent", "fence", "pins", "room", "keep", "when", "arguments"),
    *("names", "renames", "load_conf", "problems", "load_plan", "inventory", "plan_report", "sources", "warm_start"),
    "sparse.row_filter",
    *("checkup", "repair", "sparse.remains", "sparse.messages"),
    *("sparse", "sparse.buckets", "sparse.catalog", "sparse.codec", "sparse.plan", "sparse.shards", "sparse.verifier"),
    *("dense.chunks", "dense.chunk_verifier", "dense.stored_shards", "dense.tensors"),
    *("dense", "dense.torch_file", "dense.torch_zip", "dense.stored_tensor", "dense.torch_pickle"),
    *("checkpointer", "checkpointer.worker", "checkpointer.writer"),
    *("cli", "cli.app", "cli.ls", "cli.show", "cli.rows", "cli.verify", "cli.salvage", "cli.repair", "cli.plan"),
    *("consolidate", "cli.consolidate"),
]


def name_of(path: Path) -> str:
    """Return ``sparse.table`` of ``recckpt/sparse/table.py``, and the name of the package of its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "recckpt"


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
LEVEL = {name: -line for line, names in enumerate(LINES.strip().splitlines()) for name in names.split()}


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
    found = set()
    for full in imports(TREES[name]):
        if full.partition(".")[0] == "recckpt":
            inner = full.partition(".")[2]
            found.add(inner if inner in FILES else inner.rpartition(".")[0] or "recckpt")
    return found


def test_every_file_has_a_line_and_every_name_on_a_line_is_a_file():
    assert set(LEVEL) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_from_lower_lines(name):
    not_lower = {other for other in inner_imports(name) if LEVEL.get(other, 0) >= LEVEL.get(name, 0)}
    assert not not_lower


def test_sparse_and_dense_do_not_know_each_other():
    for one, other in (("sparse", "dense"), ("dense", "sparse")):
        for name in FILES:
            if name.partition(".")[0] == one:
                assert not {x for x in inner_imports(name) if x.partition(".")[0] == other}, name


def test_save_and_load_do_not_know_each_other():
    assert "load" not in inner_imports("save")
    assert "save" not in inner_imports("load")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_known_to_those_only_who_need_it(library):
    def knows(name):
        tree = TREES[name]
        uses = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        return any(f"{found}.".startswith(f"{library}.") for found in {*imports(tree), *uses})

    assert {name for name in FILES if knows(name)} <= LIBRARIES[library]


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_stay_short(name):
    assert len(FILES[name].read_text().splitlines()) <= 300
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            assert node.end_lineno - node.lineno + 1 - said <= 50, node.name


@pytest.mark.parametrize("name", FILES)
def test_files_are_named_after_what_they_do(name):
    assert not {"utils", "util", "helpers", "helper", "common", "misc", "base_impl"} & set(name.split("."))
    classes = [node.name for node in ast.walk(TREES[name]) if isinstance(node, ast.ClassDef)]
    assert not [name for name in classes if name.startswith("Base") or name.endswith("Impl")]


def loaded_after(code: str) -> set[str]:
    """Return the modules of a fresh interpreter after it has run some code."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(done.stdout.splitlines()[-1].split())


def test_reading_needs_neither_torch_nor_numba():
    modules = loaded_after("\n".join(f"import recckpt.{name}" for name in TORCH_FREE if name != "__main__"))
    assert not {"torch", "numba"} & modules
    assert {"recckpt.reader", "recckpt.cli.app", "pyarrow"} <= modules


def test_importing_recckpt_imports_next_to_nothing():
    modules = loaded_after("import recckpt")
    assert not {"torch", "numba", "numpy", "pyarrow", "fsspec"} & modules


def test_every_public_name_is_there():
    import recckpt
    import recckpt.sparse

    for package in (recckpt, recckpt.sparse):
        assert all(getattr(package, name) is not None for name in package.__all__)
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = package.Nothing
