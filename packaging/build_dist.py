"""Build the sdist and the wheel of the commit into dist/, byte for byte reproducible.

The commit is exported twice, to two directories, and built with another time zone, locale and hash seed each time;
where a byte differs nothing is put into dist/. Dates are those of the commit (``SOURCE_DATE_EPOCH``), modes and owners
are fixed. The build tools are those of packaging/requirements.txt, so nothing is fetched while it builds.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
SUMS = "SHA256SUMS"


def git(*arguments: str) -> str:
    """Return what a git command says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def export(folder: Path) -> None:
    """Write the files of the commit to a folder, with modes that do not depend on who asks."""
    command = ["git", "-c", "tar.umask=0022", "archive", "HEAD"]
    content = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        archive.extractall(folder, filter="tar")


def build(source: Path, out: Path, epoch: int, **environment: str) -> None:
    """Build sdist, and the wheel from that sdist."""
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch), **environment},
        umask=0o022,  # the modes of files that the build writes go into the wheel
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"the build failed:\n{done.stdout}{done.stderr}")
    for sdist in out.glob("*.tar.gz"):
        repack(sdist, epoch)


def repack(sdist: Path, epoch: int) -> None:
    """Write an sdist anew, without what setuptools takes from the clock and the user."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.pax_headers = {}
        return member

    content = BytesIO()
    with (
        tarfile.open(sdist) as before,
        tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda each: each.name):
            after.addfile(plain(member), before.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as compressed:
        compressed.write(content.getvalue())


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main() -> None:
    """Build twice, compare, and fill dist/."""
    if changed := git("status", "--porcelain"):
        sys.exit(f"a release is built from a commit, and these files are not in it; commit them first:\n{changed}")
    epoch = int(git("log", "-1", "--format=%ct"))
    with TemporaryDirectory(prefix="one-") as one, TemporaryDirectory(prefix="the-other-") as other:
        builds = [
            (Path(one), {"TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"}),
            (Path(other), {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "2"}),
        ]
        for folder, environment in builds:
            export(folder / "source")
            build(folder / "source", folder / "out", epoch, **environment)
        first, second = digests(Path(one) / "out"), digests(Path(other) / "out")
        if first != second:
            differing = sorted(name for name in first | second if first.get(name) != second.get(name))
            sys.exit(f"two builds of one commit differ: {', '.join(differing)}; diffoscope shows where")
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(Path(one) / "out", DIST)
    (DIST / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in first.items()), encoding="utf-8")
    for name, digest in first.items():
        print(f"dist/{name}  {(DIST / name).stat().st_size:,} bytes  sha256 {digest}, twice")


if __name__ == "__main__":
    main()
