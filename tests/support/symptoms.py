"""The symptoms of the page for the night, by heading, each with what brings it about and returns what is said then."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from servers.expired_s3 import expired_s3

import recckpt
from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import RecckptError
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdamW, gen_slice
from support.builders import flip_bit
from support.documents import blocks
from support.forked import in_fork
from support.paths import ROOT
from support.thread_ranks import on_ranks

PAGE = ROOT / "docs/does-not-resume.md"


class Model(torch.nn.Module):
    def __init__(self, dim: int = 16, dense: int = 2) -> None:
        super().__init__()
        self.user = HashTable(dim, name="user")
        self.dense = torch.nn.Linear(dim, dense)


def made(model: Model | None = None, output_dir: str = "runs/clicks", **options: object) -> CheckpointManager:
    model = model or Model()
    optim = SparseAdamW([model.user])
    return CheckpointManager(Saver(model, optim, output_dir, **{"max_keep": 3, **options}), save_interval=100)


def trained(steps: int = 2, **options: object) -> CheckpointManager:
    """Leave checkpoints ckpt_100, ckpt_200, ... in runs/clicks."""
    manager = made(**options)
    model = manager.saver.model
    model.user.insert(torch.arange(50), torch.ones(50, 16))
    for step in range(1, steps + 1):
        model.user.insert(torch.arange(step), torch.ones(step, 16))
        go_on(manager, 100 * step)
    return manager


def go_on(manager: CheckpointManager, step: int) -> None:
    while manager.global_step < step:
        manager.step()


class Position:
    """A dataset that says where it is."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def damage(ckpt: str) -> None:
    flip_bit(next(Path(ckpt, "sparse").glob("*.arrow")))


class Log:
    """What was logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clear, self._caplog = caplog.clear, caplog

    def lines(self, level: int) -> str:
        return "\n".join(record.getMessage() for record in self._caplog.records if record.levelno >= level)


SYMPTOMS: dict[str, Callable[[Log], str | Exception]] = {}


def raised(action: Callable[[], object]) -> Exception:
    with pytest.raises((RecckptError, OSError, ValueError)) as caught:
        action()
    return caught.value


def symptom(heading: str) -> Callable[[Callable[[Log], str | Exception]], None]:
    def add(bring_about: Callable[[Log], str | Exception]) -> None:
        SYMPTOMS[heading] = bring_about

    return add


@symptom("It starts at step 0")
def _(log: Log) -> str:
    assert made(output_dir="runs/clikcs").restore() == 0
    return log.lines(logging.INFO)


@symptom("It trains without having restored")
def _(log: Log) -> str:
    trained()
    manager = made()
    go_on(manager, 99)
    log.clear()
    manager.step()
    said = log.lines(logging.WARNING)
    assert [made().restore(), made().restore(200)] == [100, 200]
    return said


@symptom("The output dir is another user's")
def _(log: Log) -> str:
    def resume() -> None:
        os.chdir(shared)
        if os.getuid() == 0:  # who may do anything
            os.setuid(65534)
        made().restore()

    trained()
    with tempfile.TemporaryDirectory() as shared:
        shutil.copytree("runs", f"{shared}/runs")
        for path, mode in ((shared, 0o755), (f"{shared}/runs/clicks", 0o555)):
            Path(path).chmod(mode)
        said = in_fork(resume)
        Path(shared, "runs/clicks").chmod(0o755)
        return said.replace(shared, str(Path.cwd()))


@symptom("The storage lets nobody in")
def _(log: Log) -> Exception:
    with expired_s3() as endpoint_url:
        fsspec.config.conf["s3"] = {"endpoint_url": endpoint_url, "key": "k", "secret": "s"}
        try:
            return raised(lambda: made(output_dir="s3://bucket/runs/clicks").restore())
        finally:
            del fsspec.config.conf["s3"]


@symptom("It resumes from an older step")
def _(log: Log) -> str:
    trained()
    damage("runs/clicks/ckpt_200")
    assert made().restore() == 100
    return log.lines(logging.WARNING)


@symptom("Nothing that is there is whole")
def _(log: Log) -> Exception:
    trained()
    damage("runs/clicks/ckpt_100")
    damage("runs/clicks/ckpt_200")
    return raised(made().restore)


@symptom("A delta lacks what it stands on")
def _(log: Log) -> Exception:
    trained(3, deltas=Deltas())
    shutil.rmtree("runs/clicks/ckpt_100")
    return raised(made(deltas=True).restore)


@symptom("A newer recckpt wrote it")
def _(log: Log) -> Exception:
    trained()
    manifest = Path("runs/clicks/ckpt_200/manifest.json")
    text = manifest.read_bytes().replace(b'"version": 1', b'"version": 2')
    manifest.write_bytes(text.replace(b'"reader": "1.0"', b'"reader": "1.3"'))
    return raised(made().restore)


@symptom("The model is another one")
def _(log: Log) -> Exception:
    trained()
    return raised(made(Model(dim=32, dense=3)).restore)


@symptom("Names have changed")
def _(log: Log) -> Exception:
    trained()
    model = Model()
    model.top = model.dense
    del model.dense
    error = raised(made(model).restore)
    assert made(model).restore(load_conf={"oname": {"top.*": "dense.*"}, "strict": True}) == 200
    return error


@symptom("The sparse optimizer is another one")
def _(log: Log) -> str:
    trained()
    model = Model()
    log.clear()
    CheckpointManager(Saver(model, SparseAdagrad([model.user]), "runs/clicks", max_keep=3), 100).restore()
    return log.lines(logging.WARNING)


@symptom("The dense optimizer is another one")
def _(log: Log) -> str:
    for make, step in ((torch.optim.Adam, 100), (torch.optim.SGD, 0)):
        log.clear()
        manager = made()
        manager.register_for_checkpointing("dense_optim", make(manager.saver.model.dense.parameters()))
        manager.restore()
        go_on(manager, step)
    return log.lines(logging.WARNING)


@symptom("The number of ranks is another one")
def _(log: Log) -> Exception:
    def save(rank: int, connect: Callable[[Saver], Saver]) -> None:
        model = Model()
        model.user = HashTable(16, name="user", slice=gen_slice(rank, 2))
        saver = connect(Saver(model, SparseAdamW([model.user]), "runs/clicks"))
        registered(saver).save("ckpt_200", rank, 2, step=200)

    def registered(saver: Saver) -> Saver:
        saver.register_io_state("clicks", Position())
        saver.register_for_checkpointing("history", [0], per_rank=True)
        return saver

    on_ranks(2, save)
    manager = made()
    registered(manager.saver)
    error = raised(manager.restore)
    assert manager.restore(load_conf={"exclude": ["io_state", "history"], "strict": True}) == 200
    return error


@symptom("It reads the data from the start")
def _(log: Log) -> str:
    trained()
    manager = made()
    manager.register_io_state("clicks", Position())
    manager.restore()
    return log.lines(logging.WARNING)


@symptom("The loader has no position")
def _(log: Log) -> Exception:
    loader = torch.utils.data.DataLoader(range(10))
    return raised(lambda: made().register_io_state("clicks", loader))


@symptom("A registered object is missing")
def _(log: Log) -> str:
    trained()
    manager = made()
    manager.register_for_checkpointing("dense_optim", torch.optim.Adam(manager.saver.model.parameters()))
    manager.restore()
    return log.lines(logging.WARNING)


@symptom("An optimizer was never saved")
def _(log: Log) -> str:
    manager = made()
    dense = manager.saver.model.dense
    optimizer = torch.optim.Adam(dense.parameters())
    for _ in range(2):
        dense(torch.ones(16)).sum().backward()
        optimizer.step()
        manager.step()
        manager.save()
    assert "lacks the state of the optimizer that trained 'dense.weight'" in str(recckpt.report("runs/clicks"))
    return log.lines(logging.WARNING)


@symptom("An optimizer was made anew")
def _(log: Log) -> str:
    manager = made()
    dense = manager.saver.model.dense
    manager.register_for_checkpointing("dense_optim", torch.optim.Adam(dense.parameters()))
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.1)
    for _ in range(2):
        dense(torch.ones(16)).sum().backward()
        optimizer.step()
        manager.step()
        manager.save()
    assert "lacks the state of the optimizer that trained in place of 'dense_optim'" in str(
        recckpt.report("runs/clicks")
    )
    return log.lines(logging.WARNING)


@symptom("Saved state was not asked for")
def _(log: Log) -> str:
    manager = made()
    manager.register_for_checkpointing("dense_optim", torch.optim.Adam(manager.saver.model.parameters()))
    go_on(manager, 200)
    made().restore()
    return log.lines(logging.WARNING)


def said_by_the_loop() -> str:
    """Run the loop of the page over ``runs/clicks``, and return what it prints."""
    [loop] = [block.text for block in blocks(PAGE.name) if "list_checkpoints(" in block.text]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(loop, PAGE, "exec"), {})
    return said.getvalue()


@symptom("The loss is NaN")
def _(log: Log) -> str:
    manager = trained(1)
    manager.saver.model.user.insert(torch.tensor([7]), torch.full((1, 16), torch.nan))
    go_on(manager, 200)

    def resumed(step: int | None = None) -> str:
        manager = made()
        manager.saver.sparse_optim.param_groups[0]["lr"] = 1e-4
        manager.restore(step, hyper_parameters="keep")
        assert manager.saver.sparse_optim.param_groups[0]["lr"] == 1e-4
        model = manager.saver.model
        return f"step {manager.global_step + 1}: loss {model.dense(model.user(torch.arange(10))).sum():.1f}"

    assert "nan" not in resumed(100)
    found = re.search(r'^recckpt sql runs/clicks "(.+)"', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    assert recckpt.inspect.connect("runs/clicks").sql(found[1]).fetchall() == [(7,)]
    assert said_by_the_loop() == "ckpt_200 ['user@embedding of id 7']\n"
    return resumed()


@symptom("Another process has the output dir")
def _(log: Log) -> Exception:
    def take_over() -> None:
        second = made()
        second.restore()
        go_on(second, 250)
        second.save()

    first = trained()
    assert in_fork(take_over) == "None"
    go_on(first, 299)
    return raised(first.step)


@symptom("The output dir is gone")
def _(log: Log) -> Exception:
    manager = trained()
    Path("runs/clicks").rename("runs/moved")
    go_on(manager, 299)
    error = raised(manager.step)
    assert made(output_dir="runs/moved").restore() == 200
    return error


@symptom("The storage takes no more")
def _(log: Log) -> Exception:
    manager = trained()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        go_on(manager, 299)
        return raised(manager.step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
