"""Completes the command line in shells: `eval "$(register-python-argcomplete recckpt)"`."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recckpt.cli.convert import FORMATS, TARGETS
from recckpt.format import layout

_PLACES = ("checkpoint", "path", "before", "after")  # arguments that name a checkpoint or an output dir


def complete(parser: argparse.ArgumentParser, **how: Any) -> None:
    """Answer the shell and end the process, if argcomplete is installed; ``how`` is passed to it."""
    try:
        import argcomplete
    except ImportError:
        return
    logging.disable()  # a log line on stderr would appear in the middle of the command line
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=_candidates, **how)


def _candidates(prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the candidates for an argument; none after any error, because error text would break the command line."""
    ways: dict[str, Callable[[], Iterable[str]]] = {
        **dict.fromkeys(_PLACES, lambda: _paths(prefix, with_checkpoints=True)),
        "dir": lambda: _paths(prefix),
        "ckpt": lambda: _names_in(Path(parsed_args.dir).expanduser()),
        "since": lambda: _names_in(Path(parsed_args.checkpoint).expanduser().parent),
        "table": lambda: _tables(parsed_args),
        "tables": lambda: _tables(parsed_args),
        "to": lambda: TARGETS,
        "format": lambda: FORMATS,
    }
    try:
        candidates = ways[action.dest]() if action.dest in ways else _paths(prefix, with_files=True)
        return [name for name in candidates if name.startswith(prefix)]
    except Exception:
        return []


def _paths(prefix: str, *, with_checkpoints: bool = False, with_files: bool = False) -> Iterable[str]:
    """Yield local paths without reading manifests; yields none for URLs, because an object store may be slow."""
    if "://" in prefix:
        return
    folder, slash, begun = prefix.rpartition("/")
    place = Path(f"{folder}{slash}").expanduser()
    if with_checkpoints:
        yield from (f"{folder}{slash}{name}" for name in _names_in(place))
    for entry in sorted(os.scandir(place), key=lambda each: each.name):
        is_hidden = entry.name.startswith(".") and not begun.startswith(".")
        if entry.is_dir() and not is_hidden and not Path(entry.path, layout.MANIFEST).is_file():
            yield f"{folder}{slash}{entry.name}/"
        elif with_files and not is_hidden:
            yield f"{folder}{slash}{entry.name}"


def _names_in(output_dir: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(output_dir) if Path(entry.path, layout.MANIFEST).is_file())
    return [*names, *["latest", *(f"latest~{back}" for back in range(1, len(names)))][: len(names)]]


def _tables(args: argparse.Namespace) -> list[str]:
    from recckpt.output_dir.at_path import locate_path

    path = next(getattr(args, name) for name in (*_PLACES, "dir") if getattr(args, name, None))
    return [table.name for table in locate_path(path)[1].manifest.tables]
