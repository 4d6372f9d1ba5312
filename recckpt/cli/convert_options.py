"""The arguments of ``recckpt import`` and ``recckpt export``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

FORMATS = ("recis", "dynamicemb", "torchrec", "dcp", "safetensors", "torch_state", "parquet", "arrow", "csv", "npy")
TARGETS = ("parquet", "npy", "csv", "embedding", "safetensors", "dcp", "dynamicemb", "recis")


def add_import(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``import``."""
    add = command("import", "make a checkpoint of what another program saved").add_argument
    add("source", metavar="SOURCE", help="a file or directory; a path or URL")
    add("dir", metavar="DIR", help="output dir of the checkpoint; a path or URL")
    add("--from", dest="format", metavar="FORMAT", help=f"{', '.join(FORMATS)} (default: what the files look like)")
    table_help = "only this table, once for each; of files of rows, which have one: its name (default: the file's)"
    add("--table", dest="tables", action="append", metavar="NAME", help=table_help)
    as_table_help = "a tensor that becomes a table, with the ids 0 to n - 1, or those of another tensor"
    add("--as-table", action="append", default=[], metavar="TENSOR[=IDS]", help=as_table_help)
    name_help = "another name for a table of the source, once for each"
    add("--name", dest="names", action="append", default=[], metavar="TABLE=NEW", help=name_help)
    add("--ids", default="id", metavar="COLUMN", help="of files of rows: the column of ids (default: %(default)s)")
    vectors_help = "of files of rows: the column of vectors (default: %(default)s)"
    add("--embedding", default="embedding", metavar="COLUMN", help=vectors_help)
    slots_help = "of Parquet and Arrow files: the other columns to take, separated by commas (default: all)"
    add("--slots", metavar="A,B", help=slots_help)
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the source's, or 0)")
    add("--dry-run", action="store_true", help="say what would be done; read no rows and write nothing")


def add_export(command: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add ``export``."""
    add = command("export", "write tables and tensors of a checkpoint in another format").add_argument
    add(
        "checkpoint",
        metavar="CKPT",
        help="a checkpoint, or an output dir, whose newest is meant; a path or URL, DIR/latest~1 too",
    )
    add("target", metavar="TARGET", help="what to write; must not exist")
    add("--to", required=True, metavar="FORMAT", help=f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    add("--table", dest="tables", action="append", metavar="NAME", help="only this table, once for each")
    slots_help = "slots beside the ids, separated by commas (default: embedding, or what the format needs)"
    add("--slots", metavar="A,B", help=slots_help)
    add("--where", metavar="JSON", help='which rows, as in a load_conf: \'{"count": {"min": 5}}\'')
    add("--dtype", choices=["float16", "bfloat16", "int8"], help="of the vectors; the largest error is in the metadata")
    since_help = "only what has changed since this checkpoint, which CKPT stands on, and the ids that were deleted"
    add("--since", metavar="CKPT", help=since_help)
