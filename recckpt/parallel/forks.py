"""What torch leaves to be done in a fork before other threads compute there."""

from __future__ import annotations

import os
import sys

_pools_of_parents: list[bool] = []  # one in a fork that has not taken care of it


def renew_torch_pool() -> None:
    """Make torch's pool of threads anew, once in a fork; to be called before a thread is started.

    Torch gives up the pool of the parent when a thread first computes in the fork. Where two do so at once, the second
    may find no pool: "pool INTERNAL ASSERT FAILED ... Invalid thread pool!" (caffe2/utils/threadpool/pthreadpool-cpp.cc
    takes no lock).
    """
    if _pools_of_parents:
        _pools_of_parents.clear()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(torch.get_num_threads())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _pools_of_parents.append(True))
