"""What a benchmark ran on: every result line names it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """Return the processor, its cores, the memory and the versions that a figure depends on."""
    packages = ("torch", "numpy", "numba", "pyarrow")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
