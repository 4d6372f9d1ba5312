"""The pages do what they say, and the site has all of them and all public names.

That the site builds, and has no dead link, is tried by ``make docs``.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support import warm_python
from support.documents import DOCS, PAGES, TEXTS, blocks, commands, is_said, named_in_vain
from support.paths import ROOT, SUPPORT, TESTS

import recckpt
import recckpt.averages
import recckpt.sparse
from recckpt.cli.commands import parsers

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"python", "sh", "text", "json", "yaml", "bash", ""}  # none: a picture, which promises nothing
RUN = [page for page in PAGES if {block.language for block in blocks(page) if not block.why_not_run} & {"python", "sh"}]
FIRST = ("tutorial.md", "save.md", "load.md")  # run by the default suite, as the README is
AFTER_THE_QUICK_START = ("forget.md", "reference/reading.md")
NOT_RUN = {  # how many blocks of a page; each says why above it
    "checkpointer.md": 1,
    "coming-from.md": 2,
    "convert.md": 3,
    "deltas.md": 2,
    "does-not-resume.md": 1,
    "format.md": 2,
    "integrations.md": 6,
    "resume.md": 1,
    "storage.md": 2,
    "watch.md": 3,
    "your-tables.md": 3,
}


def follow(page: str, here: Path) -> None:
    done = warm_python.run(SUPPORT / "follow_page.py", page, cwd=here)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README leaves behind."""
    here = tmp_path_factory.mktemp("quick_start")
    follow("README.md", here)
    return here


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page in FIRST else pytest.mark.slow) for page in RUN if page != "README.md"],
)
def test_a_page_runs_as_it_stands_and_says_what_it_shows(page: str, tmp_path: Path, quick_start: Path) -> None:
    if page in AFTER_THE_QUICK_START:
        shutil.copytree(quick_start / "runs", tmp_path / "runs")
    follow(page, tmp_path)


def test_every_block_is_run_or_says_why_not() -> None:
    for page, path in PAGES.items():
        fences = re.findall(r"^ *```", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), (
            f"{page}: a block that tests do not see; begin it at a line's start"
        )
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert Counter(block.page for block in BLOCKS if block.why_not_run) == NOT_RUN
    for block in BLOCKS:
        for named in re.findall(r"\btests/[\w/.]+\w", block.why_not_run or ""):
            assert (ROOT / named).exists(), f"{block}: {named}"
    assert all((TESTS / test).exists() for test in TEXTS.values())


def test_commands_that_are_not_run_name_what_there_is() -> None:
    parser, _ = parsers()
    for block in BLOCKS:
        if block.language == "sh" and block.why_not_run:
            for words in commands(block.text):
                parser.parse_args(words[1:])
    for page, path in PAGES.items():
        for line in re.findall(r"^ {4}(?=python |make )(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            for words in commands(line):
                assert named_in_vain(words) is None, f"{page}: {line}"


def test_what_is_not_there_and_not_said_is_found() -> None:
    assert named_in_vain(["make", "docks"]) == "docks"
    assert named_in_vain(["pip", "install", ".[sql,gone]"]) == "gone"
    assert named_in_vain(["python", "benchmarks/pause.py", "--rows", "1", "--gone"]) == "--gone"
    assert named_in_vain(["python", "benchmarks/gone.py"]) == "benchmarks/gone.py"
    assert named_in_vain(["curl", "x"]) == "curl"
    assert is_said("a  1\n...\nb", "a 1\nc\nb")
    assert not is_said("a 1\nb", "a 1\nc\nb")


def test_the_page_on_architecture_names_files_and_threads_that_there_are() -> None:
    page = PAGES["architecture.md"].read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w/]+\.py)`", page)) - {"rows.py", "snapshot.py"}
    assert [name for name in files if not ((ROOT / "recckpt" / name).exists() or (ROOT / name).exists())] == []
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "recckpt").rglob("*.py"))
    assert [name for name in re.findall(r"`(recckpt-\w+)`", page) if f'"{name}"' not in sources] == []


def test_the_versions_of_torchrec_and_fbgemm_are_those_that_are_tried() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    row = f"| {pins['torch']} | `torchrec` {pins['torchrec']} | `fbgemm-gpu-cpu` {pins['fbgemm-gpu-cpu']} |"
    assert row in (ROOT / "docs/your-tables.md").read_text(encoding="utf-8")


def test_the_readme_is_one_screen() -> None:
    assert len(PAGES["README.md"].read_text(encoding="utf-8").splitlines()) <= 70


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert here | {"index.md", "contributing.md", "changelog.md", "stability.md", "security.md"} == listed


def test_the_glossary_has_each_word_once_and_in_order() -> None:
    glossary = PAGES["concepts.md"].read_text(encoding="utf-8").partition("\n## Glossary\n")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", glossary, re.MULTILINE)[1:]
    words = [word for word, _, _ in rows]
    assert words == sorted(set(words))
    assert [word for word, _, page in rows if not page.startswith("[")] == []


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    for document in (*PAGES.values(), *ROOT.glob("*.md")):
        prose = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", prose):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_file_of_tests_that_a_page_names_is_there() -> None:
    there = {path.name for path in TESTS.rglob("test_*.py")} | {
        path.relative_to(ROOT).as_posix() for path in TESTS.rglob("*.py")
    }
    named = {
        name for page in PAGES.values() for name in re.findall(r"(?:tests/[a-z_/]+/)?\btest_\w+\.py", page.read_text())
    }
    assert named - there == set()


def test_the_pages_that_the_code_names_are_there() -> None:
    for folder in ("recckpt", "examples", "benchmarks"):
        for source in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text(encoding="utf-8")):
                assert (ROOT / page).exists(), f"{source} names {page}"


def test_each_name_of_the_reference_has_an_example_above_it() -> None:
    for page in (DOCS / "reference").glob("*.md"):
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            code = "".join(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
            for name in re.findall(r"^::: recckpt\.(?!errors)(?:\w+\.)*(\w+)$", section, re.MULTILINE):
                assert re.search(rf"\b{name}\b", code), f"{page.name}: {name}"


@pytest.mark.parametrize("module", [recckpt, recckpt.sparse, recckpt.averages], ids=lambda module: module.__name__)
def test_the_reference_has_every_public_name(module: object) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = {name for home, name in re.findall(r"^::: (\S+)\.(\w+)$", pages, re.MULTILINE) if home == module.__name__}
    assert set(module.__all__) <= named
