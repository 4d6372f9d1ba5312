"""Writes the page of the command line from what the commands say of themselves: ``python docs/command_line.py``."""

from __future__ import annotations

import os
from pathlib import Path

from recckpt.cli.commands import parsers

PAGE = Path(__file__).parent / "command-line.md"
_HEAD = """# Command line

`recckpt` is also `python -m recckpt`. No command imports torch.

```sh
recckpt ls runs/clicks                    # checkpoints, oldest first
recckpt show runs/clicks/ckpt_300         # tables, slots, dense tensors, training state; --files: those of each table
recckpt head runs/clicks/ckpt_300 item    # the first rows
recckpt get runs/clicks item 17 42        # rows by id, of the newest checkpoint
recckpt consolidate runs/clicks           # the dense state, of FSDP and tensor parallel runs too, as ./model.pt, or
                                          # --out FILE; a file that is there already is not overwritten
recckpt diff runs/clicks/ckpt_300 runs/clicks    # rows, tensors and state that differ, and by how much
recckpt history runs/clicks item 17       # a row in all checkpoints: norm, changes, count, moments
recckpt report runs/clicks                # a page: what is unhealthy, checkpoints, saves, rows; --json: the data
recckpt sql runs/clicks \"select count(*) from item\"    # duckdb: tables, `checkpoints`, `timeline`; --json, --csv
recckpt watch runs/clicks --once          # how a run saves: step, last save, pause, errors; without --once it goes on
recckpt verify runs/clicks                # read and check every byte; --quick: manifests and sizes
recckpt export runs/clicks vectors --to npy                   # ids and vectors of each table, ready for an index
recckpt export runs/clicks whole --to npy --skip-damaged      # those that are whole, of a damaged checkpoint
recckpt repair runs/clicks --dry-run      # what crashes left; without --dry-run: make the index file anew; --clean
```

[Watch a run](watch.md) is about `report` and `watch`, [read](read.md) about `diff`, `history` and `sql`,
[convert](convert.md) about `import` and `export`, [the page for the
night](does-not-resume.md#when-a-checkpoint-is-damaged) about damaged checkpoints. Exit codes: 0 good, 1 a problem was
found, 2 wrong usage.

`pip install "recckpt[cli]"` adds [rich](https://github.com/Textualize/rich) and
[argcomplete](https://github.com/kislyuk/argcomplete). With rich, tables fit the terminal and have colours: red is
damaged, yellow is what nobody can be sure of, bold the newest and what is pinned, faint what has been replaced. Without
it, through a pipe, with `NO_COLOR=1` or `TERM=dumb`, the same text comes without colours. What takes more than two
seconds shows a bar on stderr, or the seconds; [`RECCKPT_PROGRESS`](watch.md#log-and-timeline) turns that off and on.

`eval "$(register-python-argcomplete recckpt)"` in `~/.bashrc` or `~/.zshrc` completes commands, options, the
checkpoints of a local output dir and names of tables. `latest` and `latest~N` stand for the newest checkpoint and the
N-th before it wherever one is named: `runs/clicks/latest~1`, or `latest~1` alone where an id is asked for.

Below stands what `recckpt COMMAND --help` says.

"""


def page() -> str:
    """Return the page."""
    os.environ["COLUMNS"] = "100"  # as wide as argparse makes its lines
    parts = [f"## {name}\n\n```text\n{command.format_help().rstrip()}\n```\n" for name, command in parsers()[1].items()]
    return _HEAD + "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
