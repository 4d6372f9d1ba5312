"""The example that serves look-ups over HTTP beside a run."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.paths import ROOT
from torch import nn

from recckpt import Saver
from recckpt.sparse import HashTable

IDS = list(range(30))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serve

    return serve


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = HashTable(2, name="user"), HashTable(3, name="item")

    def train_to(self, n: int) -> None:
        for table in (self.user, self.item):
            table.insert(torch.tensor(IDS), torch.full((len(IDS), *table.embedding_shape), float(n)))


@contextmanager
def served(example: ModuleType, output_dir: Path) -> Iterator[Any]:
    server, is_over = example.serve(str(output_dir), 0, 0.001)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server: Any, body: object, path: str = "/lookup") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_an_answer_is_never_a_mix_of_two_checkpoints(tmp_path: Path, example: ModuleType) -> None:
    model = Model()
    saver = Saver(model, output_dir=str(tmp_path), max_keep=2, deltas=True)
    model.train_to(1)
    saver.save("ckpt_1")
    is_over, seen, mixed = threading.Event(), set(), []

    def client(server: Any) -> None:
        while not is_over.is_set():
            status, answer = ask(server, {"user": IDS, "item": IDS})
            rows = [row for table in answer["tables"].values() for row in table["vectors"]]
            seen.add(answer["checkpoint"])
            if status != 200 or {f"ckpt_{value:.0f}" for row in rows for value in row} != {answer["checkpoint"]}:
                mixed.append(answer)

    with served(example, tmp_path) as server:
        clients = [threading.Thread(target=client, args=(server,)) for _ in range(2)]
        for thread in clients:
            thread.start()
        try:
            for n in range(2, 5):
                model.train_to(n)
                saver.save(f"ckpt_{n}")
            while "ckpt_4" not in seen and not mixed:
                ask(server, {})
        finally:
            is_over.set()
            for thread in clients:
                thread.join()
    assert not mixed


def test_ids_that_are_missing_and_requests_that_are_wrong_are_told_apart(tmp_path: Path, example: ModuleType) -> None:
    model = Model()
    model.train_to(1)
    Saver(model, output_dir=str(tmp_path)).save("ckpt_1")
    with served(example, tmp_path) as server:
        status, answer = ask(server, {"user": [99, 1]})
        assert (status, answer["tables"]["user"]) == (200, {"vectors": [[0, 0], [1, 1]], "found": [False, True]})
        assert ask(server, {"usr": [1]}) == (
            400,
            {"error": "\"no table 'usr' in 'ckpt_1'; there are 'user', 'item'; did you mean 'user'?\""},
        )
        for wrong in ({"user": ["a"]}, {"user": 1}, [1], "x"):
            status, answer = ask(server, wrong)
            assert (status, [*answer]) == (400, ["error"])
        assert ask(server, {}, "/elsewhere")[0] == 404
