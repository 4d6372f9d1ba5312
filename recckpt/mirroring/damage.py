"""Whether a checkpoint of a run is damaged itself, or stands on one that is: each damage is named once."""

from __future__ import annotations

from collections.abc import Mapping

from recckpt.errors import CorruptCheckpointError
from recckpt.output_dir.chains import Damage


def damaged_below(directory: str, broken: Mapping[str, Damage]) -> str:
    """Return the directory of the damaged link that a broken checkpoint stands on; "" where it is damaged itself.

    Args:
        directory: that of the checkpoint.
        broken: directory -> what is wrong in it or below it, as of :class:`recckpt.output_dir.chains.Chains`.
    """
    error = broken[directory]
    if isinstance(error, CorruptCheckpointError):
        link = error.path.partition("/")[0]  # the damaged file is named by its path in the output dir
    else:
        link = next(name for name, other in broken.items() if other is error)  # the same error for all above a link
    return link if link in broken and link != directory else ""
