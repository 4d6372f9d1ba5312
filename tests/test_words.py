"""Words that are gone stay gone: one list of them for names, comments, docstrings, messages and pages."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

import pytest
from support import parsed, paths

# Names of variables, parameters, functions and attributes -> what to say instead.
GONE_NAMES = {
    "given": "what was given: `pieces`, `options`",
    "held": "what is held: `contents`, `ids`, `data`",
    "form_of": "`supersedes`",
    "let_go": "the verb: `drop`, `close`, `release`",
    "of_run": "the noun: `attributes`",
    "origin": "`name`, of the rows; `place`, where it stands",
    "origins": "`names`, `places`",
    "representation": "what has a `name`",
    "representations": "what has a `name`",
    "revised": "`rewritten`",
    "revision": "`supersedes`, with fewer rows",
    "revision_of": "`supersedes`",
    "said": "what was said: `lines`, `values`, `record`",
    "telling": "the verb: `report`, `log`",
    "told": "what was told: `message`, `values`",
    "unsaid": "the noun: `private`",
    "wanted": "what is wanted: `ids`, `names`",
}
# `found` is the counterpart of `expected` in an error, and nothing else: a function that has it has one of these, too.
BESIDE_FOUND = re.compile(r"\b(expected|supported|CorruptCheckpointError|NotPlainError|wrong)\b")
# Phrases, as regular expressions -> what to say instead.
GONE_PHRASES = {
    r"(?<![Tt]here )\b(is|are) none\b(?! of)": "is not one; it reads as None",
    r"\bfor good\b": "permanently, and is not tried again",
    r"\bcounts? not\b": "does not count",
    r"\b(leaves?|left) (it |them )?away\b": "omit, left out",
    r"\bno word of\b": "without",
    r"\bof such\b": "name what is meant",
    r"\bbe it\b": "whether",
    r"\b[Ww]hat of\b": "the part of, which",
    r"\b[Ll]ets? go\b": "drop, close, evict, release",
    r"\bhas to tell\b|\bhas to be told\b": "say who gives what to whom",
    r"\bto who\b|\bwho asks\b": "say who: the caller, the user",
    r"\btells? of\b": "shows, describes",
    r"\b(is|are|was|were) told\b(?! (apart|from))": "say who gives, reports or logs what",
    r"\bcannot be told\b": "is not known",
    r"\b[Rr]evisions?\b": "what supersedes another, with fewer rows",
    r"\b[Rr]epresentations?\b": "the last whole one of a name",
    r"\bforms? of (a|the|its) (delta|checkpoint|parent)\b|\bcompacted forms?\b": "what supersedes it, compacted",
}
# In most texts there is none: one look instead of many, and at the beginnings of words alone, where each begins.
ANY_GONE_PHRASE = re.compile(rf"\b(?=\w)(?:{'|'.join(GONE_PHRASES)})")
# Tuples, made once: unions take three times as long for 500,000 nodes.
NAMED, DEFINED = (ast.Name, ast.Attribute), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BETWEEN_PIECES = re.compile(r"""["']\s+[frbu]*["']""")  # of one message


FILES = {path.relative_to(parsed.ROOT).as_posix(): path for path in parsed.FILES}  # format/layout.py -> where it lies


def names_made(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what a file names itself."""
    for node in nodes:
        if isinstance(node, NAMED):
            if isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, DEFINED):
            yield node.lineno, node.name


def prose_of(text: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments, docstrings and messages, each in one line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())


def may_have_a_gone_phrase(text: str) -> bool:
    """Whether to look closer at a file, which takes much longer: whatever its texts say is in its own text."""
    return ANY_GONE_PHRASE.search(" ".join(BETWEEN_PIECES.sub("", text).split())) is not None


def test_no_name_is_a_word_that_is_gone():
    found = [
        f"recckpt/{file}:{line}: {name!r}; instead: {GONE_NAMES[name.strip('_').lower()]}"
        for file, path in FILES.items()
        for line, name in names_made(parsed.nodes_of(path))
        if name.strip("_").lower() in GONE_NAMES
    ]
    assert not found, "\n".join(found)


def makes_found(nodes: Iterable[ast.AST]) -> bool:
    return any(name == "found" for _, name in names_made(nodes))


def test_found_is_the_counterpart_of_expected_and_nothing_else():
    strays = [
        f"recckpt/{file}:{function.lineno}: `found` in {function.name}; name what it is"
        for file, path in FILES.items()
        if makes_found(parsed.nodes_of(path))
        for function in parsed.nodes_of(path)
        if isinstance(function, ast.FunctionDef) and makes_found(ast.walk(function))
        if not BESIDE_FOUND.search(ast.unparse(function))
    ]
    assert not strays, "\n".join(strays)


def paragraphs() -> Iterator[tuple[str, int, str]]:
    """Yield (page, line, text) of each paragraph of the docs, in one line."""
    for path in (paths.ROOT / "README.md", *sorted((paths.ROOT / "docs").rglob("*.md"))):
        line = 1
        for paragraph in path.read_text().split("\n\n"):
            yield path.relative_to(paths.ROOT).as_posix(), line, " ".join(paragraph.split())
            line += paragraph.count("\n") + 2


def test_no_page_has_a_phrase_that_is_gone():
    found = [
        f"{page}:{line}: {match[0]!r} in {prose[max(0, match.start() - 60) : match.end() + 60]!r}; instead: {better}"
        for page, line, prose in paragraphs()
        if ANY_GONE_PHRASE.search(prose)
        for phrase, better in GONE_PHRASES.items()
        for match in re.finditer(phrase, prose)
    ]
    assert not found, "\n".join(found)


def test_no_comment_docstring_or_message_has_a_phrase_that_is_gone():
    found = [
        f"recckpt/{file}:{line}: {match[0]!r} in {prose[:60]!r}; instead: {better}"
        for file, path in FILES.items()
        if may_have_a_gone_phrase(parsed.text_of(path))
        for line, prose in prose_of(parsed.text_of(path), parsed.nodes_of(path))
        if ANY_GONE_PHRASE.search(prose)
        for phrase, better in GONE_PHRASES.items()
        if (match := re.search(phrase, prose))
    ]
    assert not found, "\n".join(found)


def test_each_phrase_that_is_gone_begins_with_a_word():
    """Else one look for any of them would miss it."""
    branches = [branch for phrase in GONE_PHRASES for branch in re.split(r"\|(?=\\b)", phrase)]
    assert [branch for branch in branches if not re.match(r"(\(\?<![^)]*\))?\\b", branch)] == []


@pytest.mark.parametrize(
    "text",
    [
        "# it counts not\n",
        'def f():\n    """That it\n    counts not is no reason."""\n',
        "f('it counts ' 'not')\n",
        "raise ValueError(\n    f'{x} counts '\n    f'not, {y}'\n)\n",
    ],
)
def test_a_file_with_a_phrase_that_is_gone_is_looked_at_closer(text):
    assert any(ANY_GONE_PHRASE.search(prose) for _, prose in prose_of(text, ast.walk(ast.parse(text))))
    assert may_have_a_gone_phrase(text)
