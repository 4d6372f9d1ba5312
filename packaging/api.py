"""Write API.txt: every public name of recckpt with its signature, a line each. `make api` runs it.

STABILITY.md says which modules are public. Of a module its ``__all__`` is public; without one, the classes and
functions that it defines. The sources are parsed and not imported: adapters need trainers that may not be installed,
and a default reads as it was written, not as the object that it became.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "API.txt"
HEADING = """\
# Every public name of recckpt and its signature, written by `make api`. STABILITY.md says what may change, and when.
# Tests compare it with the code: a change here wants a line in CHANGELOG.md.
"""
# Methods with two underscores that callers never name and that no syntax of theirs calls.
_HOOKS = re.compile(r"__(init|new|post_init|repr|str|reduce|getstate|setstate|getattr|setattr|del|init_subclass)__")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name is defined, and by what."""

    module: str
    node: ast.stmt


def modules(stability: str, status: str) -> list[str]:
    """Return the modules that the text of STABILITY.md gives a status, in its order."""
    return re.findall(rf"^\| `(recckpt[\w.]*)` \| {status} \|", stability, re.MULTILINE)


def undecided(stability: str, package: Path = ROOT / "recckpt") -> list[str]:
    """Return the modules that name what is public in them, and that STABILITY.md does not mention."""
    naming = (path for path in sorted(package.rglob("*.py")) if re.search(r"^__all__ = ", path.read_text(), re.M))
    names = (".".join((package.name, *path.relative_to(package).with_suffix("").parts)) for path in naming)
    return [name for name in (each.removesuffix(".__init__") for each in names) if f"| `{name}` |" not in stability]


def listing(stability: str) -> str:
    """Return what API.txt should say."""
    sections, public = [HEADING], modules(stability, "(?:stable|provisional)")
    names = {module: public_names(module) for module in public}
    everywhere = {name for some in names.values() for name in some}
    for module in public:
        lines = [line for name in names[module] for line in lines_of(module, name, everywhere)]
        sections.append(f"\n## {module}\n\n" + "".join(f"{line}\n" for line in lines))
    return "".join(sections).replace("lambda :", "lambda:")  # as Python 3.10 writes it


def public_names(module: str) -> list[str]:
    """Return the names that are public in a module, sorted."""
    for node in statements(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    own = (node.name for node in statements(module) if isinstance(node, (*_FUNCTION, ast.ClassDef)))
    return sorted({name for name in own if not name.startswith("_")})


def path_of(module: str) -> Path:
    """Return the file of a module or package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def statements(module: str) -> tuple[ast.stmt, ...]:
    """Return the statements at the top of a module, those below an `if` or `try` among them."""

    def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.If | ast.Try):
                yield from flat(node.body)

    return tuple(flat(ast.parse(path_of(module).read_text(encoding="utf-8")).body))


@cache
def definition(module: str, name: str) -> Definition | None:
    """Follow a name to where recckpt defines it; None for what comes from elsewhere."""
    for node in statements(module):
        if isinstance(node, (*_FUNCTION, ast.ClassDef)) and node.name == name:
            return Definition(module, node)
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "recckpt":
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(str(node.module), alias.name)
    return None


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the plain names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def lines_of(module: str, name: str, public: Collection[str]) -> list[str]:
    """Return the lines of a public name: one of a function or value, several of a class; ``public`` are all names."""
    found = definition(module, name)
    if found is None:
        raise SystemExit(f"{module}.{name} is public, and its definition was not found: import it `from recckpt...`")
    full = f"{module}.{name}"
    if isinstance(found.node, ast.ClassDef):
        return class_lines(full, found, public)
    if isinstance(found.node, _FUNCTION):
        return [full + signature(found.node)]
    if isinstance(found.node, ast.AnnAssign):
        return [f"{full}: {ast.unparse(found.node.annotation)}"]
    assert isinstance(found.node, ast.Assign)
    return [f"{full} = {ast.unparse(found.node.value)}"]


def signature(node: Function, *, bound: bool = False) -> str:
    """Return arguments and what is returned; ``bound`` omits the first argument."""
    arguments = deepcopy(node.args)
    if bound and (first := arguments.posonlyargs or arguments.args):
        del first[0]
    return f"({ast.unparse(arguments)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def class_lines(full: str, found: Definition, public: Collection[str]) -> list[str]:
    """Return the line of a class and those of its members, inherited ones too where recckpt defines them."""
    family = list(ancestry(found))
    node = family[0][0]
    bases = [ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_")]
    members: dict[str, str] = {}
    said = set[str]().union(*(documented(cls) for cls, _ in family if cls.name in public))
    for cls, _ in reversed(family):
        members |= members_of(cls, full, None if is_record(cls) else said)
    return [
        f"class {full}{constructor([cls for cls, _ in family])}" + (f" [{', '.join(bases)}]" if bases else ""),
        *(members[name] for name in sorted(members)),
    ]


def ancestry(found: Definition) -> Iterator[tuple[ast.ClassDef, str]]:
    """Yield a class and the classes of recckpt that it inherits from, nearest first."""
    assert isinstance(found.node, ast.ClassDef)
    yield found.node, found.module
    for base in found.node.bases:
        inherited = definition(found.module, base.id) if isinstance(base, ast.Name) else None
        if inherited is not None and isinstance(inherited.node, ast.ClassDef):
            yield from ancestry(inherited)


def constructor(family: list[ast.ClassDef]) -> str:
    """Return the arguments of a constructor: of an ``__init__``, else of the fields of a dataclass or named tuple."""
    for cls in family:
        for node in cls.body:
            if isinstance(node, _FUNCTION) and node.name == "__init__":
                return signature(node, bound=True).removesuffix(" -> None")
        if is_record(cls) and "Protocol" not in map(ast.unparse, cls.bases):
            fields = {name: text for each in reversed(family) for name, text in fields_of(each)}
            keywords = any("kw_only=True" in ast.unparse(each) for each in cls.decorator_list)
            return f"({', '.join(['*'] * bool(keywords and fields) + list(fields.values()))})"
    return ""


def fields_of(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields that a constructor takes, as (name, argument)."""
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, kind, default = node.target.id, ast.unparse(node.annotation), node.value
        if kind == "KW_ONLY":
            yield name, "*"
        elif not name.startswith("_") and "ClassVar" not in kind and not is_left_out(default):
            yield name, f"{name}: {kind}" + (f"={default_of(default)}" if default else "")


def is_left_out(default: ast.expr | None) -> bool:
    """Whether a field is ``field(init=False)``."""
    return isinstance(default, ast.Call) and "init=False" in map(ast.unparse, default.keywords)


def default_of(default: ast.expr) -> str:
    """Return a default as a caller reads it: ``dict()`` for ``field(default_factory=dict)``."""
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in default.keywords}
        return given.get("default") or f"{given.get('default_factory', '...')}()"
    return ast.unparse(default)


def members_of(cls: ast.ClassDef, full: str, said: set[str] | None) -> dict[str, str]:
    """Return the public members that a class defines itself, by name, each as its line.

    ``said`` are the attributes that may be public, None for all.
    """
    members: dict[str, str] = {}  # attributes
    methods: dict[str, str] = {}
    settable: list[str] = []
    for node in cls.body:
        if isinstance(node, _FUNCTION):
            if node.name == "__init__":
                members |= attributes_set_by(node, full)
            if any(ast.unparse(each).endswith(".setter") for each in node.decorator_list):
                settable.append(node.name)
            elif is_public(node.name) and not is_internal(node):
                methods[node.name] = method_line(node, full)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            for name in filter(is_public, assigned(node)):
                of = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                members[name] = f"{full}.{name}{of}"
    attributes = {name: line for name, line in members.items() if said is None or name in said}
    return attributes | {name: line + " (settable)" * (name in settable) for name, line in methods.items()}


def is_record(cls: ast.ClassDef) -> bool:
    """Whether all fields of a class are public: what its constructor takes, or what a protocol asks for."""
    kinds = [*map(ast.unparse, cls.decorator_list), *map(ast.unparse, cls.bases)]
    return any("dataclass" in kind or kind in {"NamedTuple", "Protocol"} for kind in kinds)


def documented(cls: ast.ClassDef) -> set[str]:
    """Return the attributes that the docstring of a class names: the others that it sets are not public."""
    _, _, listed = (ast.get_docstring(cls) or "").partition("Attributes:\n")
    return {name for line in re.findall(r"^ {4}([\w, ]+):", listed, re.MULTILINE) for name in line.split(", ")}


def is_internal(node: Function) -> bool:
    """Whether the docstring of a method says that it is not for users."""
    return (ast.get_docstring(node) or "").startswith("Internal: ")


def is_public(name: str) -> bool:
    """Whether callers may use a member: by its name, or by syntax such as ``a | b``."""
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__") and not _HOOKS.fullmatch(name))


def method_line(node: Function, full: str) -> str:
    """Return the line of a method or property."""
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if decorators & {"property", "cached_property"}:
        return f"{full}.{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    kind = next((f"{each} " for each in ("classmethod", "staticmethod") if each in decorators), "")
    return f"{kind}{full}.{node.name}{signature(node, bound='staticmethod' not in decorators)}"


def attributes_set_by(init: Function, full: str) -> dict[str, str]:
    """Return the public attributes that a constructor sets on ``self``."""
    arguments = (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)
    types = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
    members: dict[str, str] = {}
    for node in ast.walk(init):
        if isinstance(node, ast.AnnAssign):
            pairs: list[tuple[ast.expr, str]] = [(node.target, f": {ast.unparse(node.annotation)}")]
        elif isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in typed(target, node.value, types)]
        else:
            continue
        for target, of in pairs:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and is_public(target.attr):
                members[target.attr] = f"{full}.{target.attr}{of}"
    return members


def typed(target: ast.expr, value: ast.expr, types: dict[str, str]) -> list[tuple[ast.expr, str]]:
    """Return each target of an assignment, with its type where an annotated argument is assigned to it."""
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        return [pair for one, its in zip(target.elts, values, strict=True) for pair in typed(one, its, types)]
    return [(target, f": {types[value.id]}" if isinstance(value, ast.Name) and value.id in types else "")]


def main() -> None:
    """Write API.txt, or refuse where STABILITY.md does not say what a module is."""
    stability = (ROOT / "STABILITY.md").read_text(encoding="utf-8")
    if missing := undecided(stability):
        sys.exit(f"say in STABILITY.md whether these are stable, provisional or private: {', '.join(missing)}")
    API.write_text(listing(stability), encoding="utf-8")
    print(f"{API.name}: {sum(line.startswith(('recckpt', 'c')) for line in API.read_text().splitlines())} names")


if __name__ == "__main__":
    main()
