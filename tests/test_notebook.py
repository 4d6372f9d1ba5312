"""The notebook of the examples: its cells run in their order, and it lies in git without their outputs."""

import json
from pathlib import Path

import pytest
from support.paths import PYTHONPATH, ROOT

import recckpt

NOTEBOOK = json.loads((ROOT / "examples/first_look.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs() -> None:
    assert [cell["id"] for cell in CODE if cell["outputs"] or cell["execution_count"] is not None] == []
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_the_pages_that_the_notebook_links_to_are_there() -> None:
    text = "".join(line for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    for target in text.split("](../")[1:]:
        assert (ROOT / target.partition(")")[0].partition("#")[0]).exists(), target


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb", reason='the notebook needs pip install ".[sql]"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the trainers, whose steps are small
    names = {"__name__": "__main__"}

    for cell in CODE:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)

    text = capfd.readouterr().out
    assert "ended with -9" in text
    assert "begins at step 60 and ends at step 160" in text or "begins at step 40 and ends at step 160" in text
    assert [step for step, _ in names["saves"]] == [80, 100, 120, 140, 160]
    assert names["found"].tolist() == [True, True, False]
    assert names["report"].is_healthy
    assert names["item"].changed
    assert recckpt.CheckpointReader(tmp_path / "runs/first_look/run").manifest.step == 160
    names["connection"].close()
