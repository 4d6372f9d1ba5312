"""``recckpt import``, ``export`` and ``consolidate``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recckpt.cli.arguments import A_CHECKPOINT, argument
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.cli.upkeep import passed_by
from recckpt.errors import ConversionError, RecckptError
from recckpt.text import Line, Table, count, escaped, one_line, plural, size

if TYPE_CHECKING:
    from recckpt.convert.exporting import Exported
    from recckpt.convert.importing import ImportPlan
    from recckpt.convert.skip_damaged import Skipped

FORMATS = ("recis", "dynamicemb", "torchrec", "dcp", "safetensors", "torch_state", "parquet", "arrow", "npy")
TARGETS = ("parquet", "npy", "embedding", "safetensors", "dcp", "dynamicemb", "recis")

ARGUMENTS = {
    "import": (
        argument("source SOURCE", "a file or directory; a path or URL"),
        argument("dir DIR", "output dir of the checkpoint; a path or URL"),
        argument("--from FORMAT", f"{', '.join(FORMATS)} (default: recognised by the files)", dest="format"),
        argument(
            "--table NAME",
            "only this table; may be repeated. For files of rows, the name of their table (default: the file's)",
            dest="tables",
            action="append",
        ),
        argument(
            "--as-table TENSOR[=IDS]",
            "a tensor to import as a table, with the ids 0 to n - 1 or the ids in another tensor; may be repeated",
            action="append",
            default=[],
        ),
        argument(
            "--name TABLE=NEW",
            "a new name for a table of the source; may be repeated",
            dest="names",
            action="append",
            default=[],
        ),
        argument("--ids COLUMN", "for files of rows: the column of ids (default: %(default)s)", default="id"),
        argument(
            "--embedding COLUMN", "for files of rows: the column of vectors (default: %(default)s)", default="embedding"
        ),
        argument(
            "--slots A,B", "for Parquet and Arrow files: the other columns to read, separated by commas (default: all)"
        ),
        argument("--step N", "step of the checkpoint (default: the source's, or 0)", type=int),
        argument("--dry-run", "show what would be done; read no rows and write nothing"),
    ),
    "export": (
        argument("checkpoint CKPT", A_CHECKPOINT),
        argument("target TARGET", "path to write; must not exist"),
        argument("--to FORMAT", f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}", required=True),
        argument("--table NAME", "only this table; may be repeated", dest="tables", action="append"),
        argument(
            "--slots A,B",
            "slots beside the ids, separated by commas (default: embedding, or what the format needs; "
            "with --skip-damaged all)",
        ),
        argument("--where JSON", 'a filter of rows, as in a load_conf: \'{"count": {"min": 5}}\''),
        argument(
            "--dtype",
            "dtype for vectors and, except int8, for dense tensors; the metadata has the largest error",
            choices=["float16", "bfloat16", "int8"],
        ),
        argument(
            "--since CKPT",
            "only rows changed and ids deleted since this checkpoint, which must be in CKPT's chain",
        ),
        argument(
            "--skip-damaged",
            "export the undamaged parts of a damaged checkpoint (of DIR the newest); list the rest"
            "export the undamaged parts of a damaged checkpoint, by default DIR's newest; list the rest",
        ),
    ),
    "consolidate": (
        argument("checkpoint CKPT", A_CHECKPOINT),
        argument("--out FILE", "the file to write (default: %(default)s); must not exist", default="model.pt"),
    ),
}


def run_import(args: argparse.Namespace) -> CommandResult:
    from recckpt.convert.importing import import_checkpoint
    from recckpt.convert.source import ImportOptions

    if args.step is not None and args.step < 0:
        raise UsageError(f"--step: found {args.step}, expected 0 or more")
    as_table, names = dict[str, str | None](), dict[str, str]()
    for text in args.as_table:
        name, _, ids = text.partition("=")
        if not name:
            raise UsageError(f"--as-table: found {text!r}, expected TENSOR or TENSOR=IDS")
        as_table[name] = ids or None
    if len(as_table) < len(args.as_table):
        raise UsageError(f"--as-table: found {args.as_table}, expected each tensor once: it becomes one table")
    for text in args.names:
        name, _, new = text.partition("=")
        if not name or not new:
            raise UsageError(f"--name: found {text!r}, expected TABLE=NEW")
        names[name] = new
    slots = None if args.slots is None else tuple(name for name in args.slots.split(",") if name)
    table = args.tables[0] if args.tables and len(args.tables) == 1 else ""
    options = ImportOptions(table, args.ids, args.embedding, slots, as_table, names)
    with usage_checked():
        try:
            done = import_checkpoint(
                args.source,
                args.dir,
                format=args.format,
                tables=args.tables,
                options=options,
                step=args.step,
                dry_run=args.dry_run,
            )
        except RecckptError as error:
            return _refused(error)
    notes = passed_by(args.dir, done.ckpt_id, done.step)
    return CommandResult({**_data_of_import(done), "notes": notes}, [*_lines_of_import(done, args.dir), *notes])


def _refused(error: RecckptError) -> CommandResult:
    problem = f"{error}; nothing was written" if isinstance(error, ConversionError) else str(error)
    return CommandResult({"problems": [problem]}, [], [problem])


def _lines_of_import(done: ImportPlan, output_dir: str) -> Iterator[Line]:
    contents = done.contents
    what = f"{contents.format}, {plural(len(contents.tables), 'table')}, {plural(len(contents.dense), 'dense tensor')}"
    yield f"{one_line(done.source)}: {what}, step {'-' if contents.step is None else contents.step}"
    if contents.tables:
        rows = []
        for table in contents.tables:
            slots = (f"{escaped(s.name)} {s.dtype}[{', '.join(map(str, s.shape))}]" for s in table.slots)
            rows.append((escaped(table.name), count(done.rows[table.name]), ", ".join(slots)))
        yield ""
        yield Table(("TABLE", "ROWS", "SLOTS"), rows, ("ROWS",))
    if contents.values:
        yield f"plain values, to model.pt: {', '.join(map(_value, contents.values.items()))}"
    if contents.extra:
        yield f"extra: {', '.join(map(_value, contents.extra.items()))}"
    if contents.io_state:
        yield f"positions in the data: of {plural(len(contents.io_state), 'rank')}"
    if contents.left_out:
        yield ""
        yield Table(("NOT AS IT WAS", "WHY"), [(escaped(left.name), left.reason) for left in contents.left_out])
    yield ""
    where = one_line(f"{output_dir}/{done.directory or done.ckpt_id}")
    yield f"wrote {where}, {size(done.n_bytes)}" if done.directory else f"would write {where}"


def _value(item: tuple[str, Any]) -> str:
    n_tensors = _tensors_in(item[1])
    return escaped(item[0]) + (f" (with {plural(n_tensors, 'tensor')} inside)" if n_tensors else "")


def _tensors_in(value: Any) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return sum(map(_tensors_in, value))
    return int(hasattr(value, "dtype") and hasattr(value, "shape"))


def _data_of_import(done: ImportPlan) -> dict[str, Any]:
    contents = done.contents
    nested = (*contents.values.items(), *contents.extra.items())
    tables = [
        {
            "name": table.name,
            "rows": done.rows[table.name],
            "slots": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in table.slots],
        }
        for table in contents.tables
    ]
    return {
        "source": done.source,
        "format": contents.format,
        "id": done.ckpt_id,
        "directory": done.directory or None,
        "step": contents.step,
        "tables": tables,
        "dense": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in contents.dense],
        "values": list(contents.values),
        "extra": list(contents.extra),
        "tensors_inside": {name: n for name, value in nested if (n := _tensors_in(value))},
        "positions": len(contents.io_state),
        "left_out": [asdict(left) for left in contents.left_out],
        "bytes": done.n_bytes,
    }


def run_export(args: argparse.Namespace) -> CommandResult:
    from recckpt.convert.exporting import export_checkpoint

    slots = None if args.slots is None else args.slots.split(",")
    try:
        where = None if args.where is None else json.loads(args.where)
    except ValueError as error:
        raise UsageError(f"--where: not JSON: {error}") from error
    with usage_checked():
        try:
            done = export_checkpoint(
                args.checkpoint,
                args.target,
                to=args.to,
                tables=args.tables,
                slots=slots,
                where=where,
                dtype=args.dtype,
                since=args.since,
                skip_damaged=args.skip_damaged,
            )
        except RecckptError as error:
            return _refused(error)
    data = {
        "id": done.ckpt_id,
        "target": done.target,
        "format": done.format,
        "metadata": dict(done.metadata),
        "left_out": [asdict(left) for left in done.left_out],
        "bytes": done.n_bytes,
        "skipped": [asdict(each) for each in done.skipped],
    }
    return CommandResult(data, list(_lines_of_export(done)), list(_skipped(done.skipped)))


def _lines_of_export(done: Exported) -> Iterator[Line]:
    rows = []
    for name, table in done.metadata["tables"].items():
        error = f"{table['largest_error']:.3g}" if "largest_error" in table else "-"
        rows.append((escaped(name), count(table["rows"]), ", ".join(table["slots"]), error))
    if rows:
        yield Table(("TABLE", "ROWS", "SLOTS", "LARGEST ERROR"), rows, ("ROWS",))
    if done.left_out:
        yield ""
        yield Table(("LEFT OUT", "WHY"), [(escaped(left.name), left.reason) for left in done.left_out])
    if done.skipped:
        skipped = []
        for each in done.skipped:
            batch, n_rows = ("-" if number is None else count(number) for number in (each.batch, each.rows))
            buckets = "-" if each.buckets is None else f"{each.buckets[0]} to {each.buckets[1] - 1}"
            what = escaped(f"tensor {each.tensor}" if each.tensor else each.table) or "-"
            skipped.append((escaped(each.file), batch, what, buckets, n_rows, one_line(each.reason)))
        head = ("SKIPPED", "BATCH", "OF", "BUCKETS", "ROWS", "WHY")
        yield ""
        yield Table(head, skipped, ("BATCH", "ROWS"), dict.fromkeys(range(len(skipped)), "damaged"))
    yield ""
    yield f"{escaped(done.ckpt_id)}: wrote {one_line(done.target)}, {size(done.n_bytes)}"


def _skipped(skipped: Sequence[Skipped]) -> Iterator[str]:  # a line per table, and per other item
    for table in dict.fromkeys(each.table for each in skipped if each.table):
        rows = [each.rows for each in skipped if each.table == table]
        known = plural(sum(n for n in rows if n is not None), "row")
        yield f"{escaped(table)}: {known} skipped{', and an unknown number more' if None in rows else ''}"
    for each in skipped:
        if not each.table:
            yield f"{escaped(each.tensor or each.file)}: skipped, {one_line(each.reason)}"


def run_consolidate(args: argparse.Namespace) -> CommandResult:
    from recckpt.inspect.consolidate import consolidate

    with usage_checked():
        done = consolidate(args.checkpoint, args.out)
    tensors, sharded = plural(len(done.names), "tensor"), len(done.sharded)
    line = f"{escaped(done.ckpt_id)}: wrote {tensors} to {one_line(args.out)}, {size(done.n_bytes)}, {sharded} sharded"
    data = {"id": done.ckpt_id, "out": args.out, "tensors": list(done.names), "sharded": list(done.sharded)}
    return CommandResult({**data, "bytes": done.n_bytes}, [line])
