"""The page for users of RecIS names nothing that is not there."""

import inspect
import re

from paths import ROOT
from torch import nn

import recckpt
from recckpt import CheckpointManager, Saver, sparse
from recckpt.sparse import HashTable

PAGE = (ROOT / "docs/coming-from-recis.md").read_text()


def test_its_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.ModuleDict({"user": HashTable(4, name="user")})
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1].replace("= ...", "= nn.Linear(4, 1)")
    exec(code, {"model": model, "nn": nn})


def test_what_it_names_on_the_right_is_there():
    right = "\n".join(line.rpartition(" | ")[2] for line in PAGE.splitlines() if line.startswith("| `"))
    for name in re.findall(r"`(Sparse\w+|HashTable|ShardedHashTable|EmbeddingCollection|hash_ids|Constant)[`(]", right):
        assert hasattr(sparse, name)
    for name in re.findall(r"manager\.(\w+)\(", right):
        assert hasattr(CheckpointManager, name)
    for name in re.findall(r"saver\.(\w+)\(", right):
        assert hasattr(Saver, name)
    for name in re.findall(r"recckpt\.(\w+)`", right):
        assert hasattr(recckpt, name)


def test_the_slots_and_defaults_are_those_it_says():
    slots = {
        name
        for rule in vars(sparse).get("__all__", ())
        if rule.startswith("Sparse")
        for name in getattr(sparse, rule).slot_names
    }
    for name in re.findall(r"`(sparse_\w+)`", PAGE):
        assert name in slots | {"sparse_optim"}
    assert inspect.signature(sparse.SparseAdagrad).parameters["lr"].default == 1e-2
    assert {"weight_decay", "lr_decay", "maximize"} <= inspect.signature(sparse.SparseAdagrad).parameters.keys()
