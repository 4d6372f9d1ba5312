"""Tables inside ``torch.compile``, in processes of their own whose numba kernels have never been compiled."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.sweeps import SWEEP_STRIDE

from recckpt.sparse import HashTable, SparseSGD

BACKENDS, CASES = ["eager", "aot_eager", "inductor"], ["table", "sharded", "collection"]
SWEEP = list(itertools.product(BACKENDS, CASES))[:: min(SWEEP_STRIDE, 4)]  # with four, each of them once


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), SWEEP)
def test_a_compiled_model_and_a_compiled_step_train_as_plain_ones_with_cold_kernels(backend, case, tmp_path):
    script = Path(__file__).with_name("compiled_run.py")
    environ = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else it starts interpreters for it, which import torch
    }
    done = subprocess.run(
        [sys.executable, script, backend, case], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recompile_limit" not in done.stderr
    assert any((tmp_path / "numba").rglob("*.nbi"))  # compiled there, and not before


@pytest.mark.slow
def test_what_else_a_table_does_is_done_in_a_compiled_function_too():
    table = HashTable(2, name="t")
    optim = SparseSGD([table], lr=1.0)

    @torch.compile(backend="eager")
    def change(ids):
        table.reserve(100)
        table.add_slot("count", ())
        rows, found = table.lookup(ids)
        table.insert(ids + 1, torch.ones_like(rows))
        table.erase(ids)
        table(ids).sum().backward()
        optim.step()
        optim.zero_grad()
        return found.any().item(), table.ids().tolist(), table.embeddings()

    assert change(torch.tensor([1]))[:2] == (False, [2, 1])
    found, ids, rows = change(torch.tensor([2]))
    assert (found, ids) == (True, [3, 1, 2])
    assert rows[0].tolist() == [1, 1]


def test_a_graph_that_may_not_break_names_the_table():
    table = HashTable(2, name="t")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"HashTable\.forward"):
        torch.compile(lambda ids: table(ids) + 1, backend="eager", fullgraph=True)(torch.tensor([1]))


@pytest.mark.parametrize("call", ["forward", "bag", "lookup"])
def test_an_error_of_a_look_up_passes_through_no_frame_of_the_compiler(call):
    assert "torch._dynamo" in sys.modules
    table = HashTable(2, name="t")
    look_up = table if call == "forward" else getattr(table, call)
    with pytest.raises(ValueError, match="int64") as caught:
        look_up(torch.tensor([[1.5]]))
    files = [entry.path.as_posix() for entry in caught.traceback]
    assert not [file for file in files if "_dynamo" in file or file.endswith("external_utils.py")]
    assert sum(file.endswith("opaque.py") for file in files) == 1
