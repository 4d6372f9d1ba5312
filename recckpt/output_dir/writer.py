"""What writes a checkpoint: the versions of the packages that have a part in its bytes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _find_versions() -> dict[str, str]:
    versions = {}
    for package in ("recckpt", "torch", "numpy", "pyarrow"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


WRITER = _find_versions()  # once: they are files, and a save does not depend on files of packages
