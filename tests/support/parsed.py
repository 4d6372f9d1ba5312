"""The syntax trees of recckpt: parsed and walked once a process, where a test asks for them, which takes seconds."""

import ast
from functools import cache
from pathlib import Path

from support import paths

ROOT = paths.ROOT / "recckpt"
FILES = sorted(ROOT.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    """Return what a file says."""
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of the tree, from the top down."""
    return list(ast.walk(tree_of(path)))
