"""The page for the night: each symptom is brought about, and says what the page shows."""

from __future__ import annotations

import logging
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paths import ROOT

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import RecckptError
from recckpt.sparse import HashTable, SparseAdamW

PAGE = ROOT / "docs/does-not-resume.md"
Log = Callable[[int], str]
SYMPTOMS: dict[str, Callable[[Log], str | Exception]] = {}


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


def raised(action: Callable[[], object]) -> Exception:
    with pytest.raises((RecckptError, OSError)) as caught:
        action()
    return caught.value


def symptom(heading: str) -> Callable[[Callable[[Log], str | Exception]], None]:
    def add(bring_about: Callable[[Log], str | Exception]) -> None:
        SYMPTOMS[heading] = bring_about

    return add


@symptom("It starts at step 0")
def _(log: Log) -> str:
    assert made(output_dir="runs/clikcs").restore() == 0
    return log(logging.INFO)


@symptom("It resumes from an older step")
def _(log: Log) -> str:
    trained()
    damage("runs/clicks/ckpt_200")
    assert made().restore() == 100
    return log(logging.WARNING)


@symptom("Nothing that is there is whole")
def _(log: Log) -> Exception:
    trained()
    damage("runs/clicks/ckpt_100")
    damage("runs/clicks/ckpt_200")
    return raised(made().restore)


@symptom("The model is another one")
def _(log: Log) -> Exception:
    trained()
    return raised(made(Model(dim=32, dense=3)).restore)


@symptom("Another process has the output dir")
def _(log: Log) -> Exception:
    first, second = trained(), made()
    second.restore()
    go_on(second, 250)
    second.save()
    go_on(first, 299)
    return raised(first.step)


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


@symptom("A newer recckpt wrote it")
def _(log: Log) -> Exception:
    trained()
    manifest = Path("runs/clicks/ckpt_200/manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 2'))
    return raised(made().restore)


@symptom("A delta lacks what it stands on")
def _(log: Log) -> Exception:
    trained(3, deltas=Deltas())
    shutil.rmtree("runs/clicks/ckpt_100")
    return raised(made(deltas=True).restore)


@symptom("It reads the data from the start")
def _(log: Log) -> str:
    trained()
    manager = made()
    manager.register_io_state("clicks", Position())
    manager.restore()
    return log(logging.WARNING)


@symptom("A registered object is missing")
def _(log: Log) -> str:
    trained()
    manager = made()
    manager.register_for_checkpointing("dense_optim", torch.optim.Adam(manager.saver.model.parameters()))
    manager.restore()
    return log(logging.WARNING)


@symptom("Saved state was not asked for")
def _(log: Log) -> str:
    manager = made()
    manager.register_for_checkpointing("dense_optim", torch.optim.Adam(manager.saver.model.parameters()))
    go_on(manager, 200)
    made().restore()
    return log(logging.WARNING)


def damage(ckpt: str) -> None:
    part = next(Path(ckpt, "sparse").glob("*.arrow"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def as_shown(said: str | Exception, here: Path) -> str:
    """Return a message without what differs from run to run."""
    text = f"{type(said).__module__}.{type(said).__qualname__}: {said}" if isinstance(said, Exception) else said
    text = text.replace(str(here), "/data").replace(f"{__file__}", "train.py")
    return re.sub(r"\b[0-9a-f]{16,32}\b|\d{4}-\d\d-\d\dT[\d:]+Z|(?<=train.py:)\d+", "…", text)


def shown() -> dict[str, str]:
    """Return the heading of each symptom, and the message below it."""
    return dict(
        re.findall(r"^## ([^\n]+)\n\n```text\n(.+?)\n```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )


def test_each_symptom_of_the_page_is_brought_about_here() -> None:
    assert list(shown()) == list(SYMPTOMS)


@pytest.mark.parametrize("heading", SYMPTOMS)
def test_the_page_shows_what_is_said(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def log(level: int) -> str:
        return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= level)

    assert as_shown(SYMPTOMS[heading](log), tmp_path) == shown()[heading]
