"""Says which command or option was probably meant by one that does not exist, with the usage of its command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from recckpt.text import nearest

_OPTION = re.compile(r"--[a-z][a-z-]*")


def refuse_misspelt(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], argv: Sequence[str]
) -> None:
    """End by wrong usage where a command or a long option does not exist.

    argparse would say so too, but of an option only after the value behind it was taken for something else.
    """
    place = next((place for place, word in enumerate(argv) if not word.startswith("-")), None)
    if place is None:
        return
    name = argv[place]
    if name not in commands:
        hint = nearest(name, commands) or f"; there are {', '.join(commands)}"
        parser.error(f"there is no command {name!r}{hint}")
    known = set(_OPTION.findall(commands[name].format_help().partition("\nexamples:\n")[0]))
    for word in argv[place + 1 :]:
        if word == "--":
            return
        option = word.partition("=")[0]
        if word.startswith("--") and " " not in word and not any(each.startswith(option) for each in known):
            commands[name].error(f"there is no option {option!r}{nearest(option, sorted(known))}")
