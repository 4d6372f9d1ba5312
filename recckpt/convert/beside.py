"""What an import of files of rows leaves out: other files there, and columns in the names of directories."""

from __future__ import annotations

from collections.abc import Sequence

from recckpt.convert.source import LeftOut
from recckpt.convert.source_files import SourceFiles

_MOST_LISTED = 20


def beside(files: SourceFiles, names: Sequence[str], format: str) -> list[LeftOut]:
    """List the partition columns of Hive, and the files that are not among ``names``, but for hidden ones."""
    if files.is_file:
        return []
    segments = {segment for name in names for segment in name.split("/")[:-1]}
    columns = sorted({segment.partition("=")[0] for segment in segments if "=" in segment})
    why = "is in names of directories alone; put it into a column"
    left = [LeftOut(f"partition {column}", why) for column in columns]
    others = sorted(set(files.ending("")) - set(names))
    left += [LeftOut(name, f"is no file of {format}") for name in others[:_MOST_LISTED]]
    if len(others) > _MOST_LISTED:
        left.append(LeftOut(f"{len(others) - _MOST_LISTED} more files", f"are not of {format}"))
    return left
