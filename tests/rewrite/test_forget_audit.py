"""The audit of what was forgotten is sealed, and what copies checkpoints waits until a request to forget is ended."""

import random
import re

import pytest
import torch
from support.forgetting import ForgettingRun, ids_at

import recckpt
from recckpt.convert.importing import import_checkpoint
from recckpt.errors import CorruptCheckpointError, RecckptError
from recckpt.inspect.verify import verify
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import audit
from recckpt.rewrite.forgetting import forget
from recckpt.storage import open_storage


def problems(root) -> list[str]:
    """What verify finds wrong with an output dir."""
    return [f"{problem.file} {problem}" for problem in verify(str(root), deep=False)]


@pytest.fixture
def root(tmp_path):
    """An output dir of which three times something was forgotten."""
    root = tmp_path / "runs"
    ForgettingRun(root).save_chain()
    for number in (1, 2, 5000):
        forget(str(root), "user", ids_at(number))
    return root


def damages(data: bytes):
    """Yield the audit with a bit flipped, cut, without a line and in another order."""
    draw = random.Random(0)
    for at in {*range(0, len(data), 211), *(draw.randrange(len(data)) for _ in range(20)), len(data) - 1}:
        yield data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    first, second, third = data.splitlines(keepends=True)
    yield from (first + third, second + third, second + first + third, first + second + second + third)
    yield from (data[:-1], data[:-2], data[: len(first) + 30], data + b"{}\n", b"[]\n" + data, data + b"\n")


def test_an_audit_that_was_changed_is_found_and_nothing_is_noted_in_it(root):
    assert problems(root) == []
    path = root / "forgotten.jsonl"
    data = path.read_bytes()
    assert [line["n_ids"] for line in audit(open_storage(str(root)))] == [1, 1, 1]
    for damaged in damages(data):
        path.write_bytes(damaged)
        [problem] = problems(root)
        assert re.match(r"forgotten.jsonl forgotten.jsonl at line [1-4]: found", problem)
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.raises(CorruptCheckpointError, match="move the file elsewhere and keep it"):
        forget(str(root), "user", ids_at(3))
    assert path.read_bytes() == damaged
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before


def pending_in(root, monkeypatch):
    """Leave a request that is not ended."""

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Fence, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            forget(str(root), "user", ids_at(50))


def test_nothing_is_copied_from_or_added_to_an_output_dir_where_ids_are_yet_to_be_forgotten(
    root, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    ForgettingRun(other).save_chain()
    torch.save({"top.weight": torch.zeros(2)}, tmp_path / "model.pt")
    pending_in(root, monkeypatch)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for copy in (
        lambda: recckpt.rewrite.compact(str(root)),
        lambda: recckpt.rewrite.compact(str(root / "ckpt_4")),
        lambda: recckpt.rewrite.compact(str(root), out=str(tmp_path / "out")),
        lambda: recckpt.rewrite.compact(str(other), "ckpt_2", out=str(root)),
        lambda: recckpt.rewrite.compact(str(root), adopt=True),
        lambda: import_checkpoint(str(tmp_path / "model.pt"), str(root), step=77),
    ):
        with pytest.raises(
            RecckptError, match=r"runs: found an unfinished request to forget ids, .*run `recckpt forget DIR` first"
        ):
            copy()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    forget(str(root), "user", ids_at(51))
    assert recckpt.rewrite.compact(str(root)).directory is not None
