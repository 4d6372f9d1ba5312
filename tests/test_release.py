"""What a release is held to: its public names are listed, its versions agree, and it waits until it is ready."""

import io
import re
import shutil
import tarfile
from pathlib import Path

import api
import build_dist
import pytest
import ready
from support.paths import ROOT

STABILITY = (ROOT / "STABILITY.md").read_text(encoding="utf-8")


def test_api_txt_lists_every_public_name_as_it_is() -> None:
    assert api.API.read_text(encoding="utf-8") == api.listing(STABILITY), (
        "a public name or signature changed: run `make api`, and write a line in CHANGELOG.md"
    )


def test_stability_md_speaks_of_each_module_that_has_public_names() -> None:
    assert api.undecided(STABILITY) == [], "say in STABILITY.md whether they are stable, provisional or private"
    listed = re.findall(r"^## (\S+)$", api.API.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == api.modules(STABILITY, "(?:stable|provisional)")
    assert [module for module in api.modules(STABILITY, r"\w+") if not api.path_of(module).exists()] == []


def test_what_is_provisional_says_until_when() -> None:
    rows = [line for line in STABILITY.splitlines() if "| provisional |" in line]
    assert [row for row in rows if not re.search(r"; decided by \d+\.\d+ \|$", row)] == []


def test_a_class_is_listed_with_what_it_inherits_and_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "ROOT", tmp_path)
    api.statements.cache_clear()
    api.definition.cache_clear()
    package = tmp_path / "recckpt"
    package.mkdir()
    (package / "__init__.py").write_text("from recckpt.a import B, f\nfrom os import path\n__all__ = ['B', 'f']\n")
    (package / "a.py").write_text(
        "class _A:\n    def __init__(self, x: int, *, y: str = 'z') -> None:\n        self.x, self._y = x, y\n"
        "        self.w = x\n"
        "    def g(self, n: int = 1) -> int: ...\n    def _h(self): ...\n"
        "class B(_A, Exception):\n    'A b.\\n\\n    Attributes:\\n        x, z: given.\\n    '\n    kind = 1\n"
        "    def i(self): 'Internal: no.'\n"
        "    @property\n    def p(self) -> str: ...\n    @p.setter\n    def p(self, v): ...\n"
        "    @classmethod\n    def of(cls, s: str) -> 'B': ...\n    def __or__(self, other: 'B') -> 'B': ...\n"
        "def f(*parts: str, deep: bool = False) -> None: ...\n"
    )
    listed = api.listing("| `recckpt` | stable | all |\n| `recckpt.a` | private | where it lies |\n")
    api.statements.cache_clear()
    api.definition.cache_clear()
    assert listed == f"{api.HEADING}\n## recckpt\n\n" + "".join(
        f"{line}\n"
        for line in (
            "class recckpt.B(x: int, *, y: str='z') [Exception]",
            "recckpt.B.__or__(other: 'B') -> 'B'",
            "recckpt.B.g(n: int=1) -> int",
            "classmethod recckpt.B.of(s: str) -> 'B'",
            "recckpt.B.p: str (settable)",
            "recckpt.B.x: int",
            "recckpt.f(*parts: str, deep: bool=False) -> None",
        )
    )


def test_all_files_name_one_version() -> None:
    assert list(ready.disagreeing(ROOT, None)) == []


def test_every_action_of_the_workflows_is_pinned_by_its_digest() -> None:
    assert list(ready.unpinned(ROOT)) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is ready for a release, as far as its own files go."""
    for file in ("setup.py", "CITATION.cff", "SECURITY.md", "README.md", "CHANGELOG.md", "recckpt/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        text = (ROOT / file).read_text(encoding="utf-8")
        dated = re.sub(r"(?m)\A(.*?^## \[\S+\])[^\n]*", r"\1 - 2027-01-31", text, flags=re.DOTALL)
        filled = dated.replace(".invalid", ".example").replace("pip install . ", "pip install recckpt ")
        (tmp_path / file).write_text(filled, encoding="utf-8")
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    return tmp_path


def test_a_checkout_whose_addresses_are_filled_in_is_ready(checkout: Path) -> None:
    version = ready.versions(checkout)["CITATION.cff"]
    assert ready.problems(checkout, f"v{version}") == []


@pytest.mark.parametrize(
    ("file", "before", "after", "problem"),
    [
        ("setup.py", 'URL = "https://', 'URL = "https://recckpt.invalid/', "setup.py:.* is a placeholder; write the"),
        ("README.md", "pip install recckpt ", "pip install . ", "README.md:8: installs a checkout; write"),
        ("CITATION.cff", "\nversion: 1", "\nversion: 9", "CITATION.cff: found version 9.*, expected 1"),
        ("CHANGELOG.md", " - 2027-01-31", "", "CHANGELOG.md: .* has no date; write"),
        (".github/workflows/release.yml", "actions/checkout@", "actions/checkout@v4 #", "actions/checkout@v4 is not"),
        (".github/workflows/release.yml", " # v4.2.2", "", "does not say its version"),
    ],
)
def test_a_checkout_that_is_not_ready_is_refused(
    checkout: Path, file: str, before: str, after: str, problem: str
) -> None:
    text = (checkout / file).read_text(encoding="utf-8")
    assert before in text
    (checkout / file).write_text(text.replace(before, after, 1), encoding="utf-8")
    [found] = ready.problems(checkout)
    assert re.search(problem, found)


def test_a_tag_of_another_version_is_refused(checkout: Path) -> None:
    [found] = ready.problems(checkout, "v0.9.0")
    assert found.startswith("the tag: found version 0.9.0, expected 1.")


def test_an_sdist_keeps_nothing_of_the_clock_the_user_and_the_order(tmp_path: Path) -> None:
    def sdist(name: str, *members: str, clock: int, user: str, mode: int) -> bytes:
        path = tmp_path / name
        with tarfile.open(path, "w:gz") as archive:
            for member in members:
                info = tarfile.TarInfo(f"recckpt-1/{member}")
                info.size, info.mtime, info.uname, info.uid, info.mode = len(member), clock, user, clock, mode
                archive.addfile(info, io.BytesIO(member.encode()))
        build_dist.repack(path, 1_700_000_000)
        return path.read_bytes()

    first = sdist("one.tar.gz", "a.py", "b.py", clock=1, user="root", mode=0o644)
    assert first == sdist("two.tar.gz", "b.py", "a.py", clock=2, user="me", mode=0o600)
    assert first != sdist("three.tar.gz", "a.py", "c.py", clock=1, user="root", mode=0o644)
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        assert [(each.name, each.mtime, each.mode) for each in archive] == [
            ("recckpt-1/a.py", 1_700_000_000, 0o644),
            ("recckpt-1/b.py", 1_700_000_000, 0o644),
        ]
